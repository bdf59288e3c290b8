"""Kills at random moments: does the same command, started again, end with the bytes and losses of an unkilled one?

    python benchmarks/kills.py --kills 500 --jobs 2 --save    # an hour on two cores; 30 kills take some minutes
    python benchmarks/kills.py --kills 30 --only "poison|2 ranks"

Each scenario runs once without a kill. Then it is started, killed (mostly SIGKILL, some SIGTERM and SIGINT) and started
again, several times, until it finishes. Compared are every loss and validation loss, that every step is recorded once,
or the bytes of the prepared data; and that no process is left ten seconds after a kill. Most starts are forks of this
process, which has imported torch, and call the function that the command line calls; a share goes through the real
command line. Moments are drawn over the run's duration, or within a phase that the process publishes (save, evaluate,
trial, ...).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import mmap
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

import bessemer.session.session  # noqa: F401  forked processes need not import it
from bessemer.cli import main as command_line
from bessemer.guard.watchdog import PhaseTracker
from bessemer.parent import PARENT
from bessemer.run.directory import Run
from bessemer.session.recovery.incident import IncidentResponder
from bessemer.session.replay import documents_of

MARK = "BESSEMER_KILLS"  # in the environment of everything that is started by a command
ORPHAN_S = 10.0
SHUTDOWN_S = 45.0  # for ranks that were asked to end, as torchrun has it
END_S = 90.0  # for a process that was asked to end, on a busy machine
ROUND = 100  # kills of all scenarios
PER_RUN = 5  # kills of one run, before it may finish
PHASES = ("begin", "data", "forward", "backward", "report", "judge", "optimizer", "agree", "evaluate", "save", "trial")
POISONED = (64, 65, 66)  # steps
LENGTHS_S = {"save": 0.2, "evaluate": 0.05, "trial": 0.5}
WORDS = "steel iron blast flame ore coke slag heat pour mould ingot forge anvil hammer tongs bellows".split()  # noqa: SIM905


@dataclass(frozen=True)
class Scenario:
    """What is run and killed. `share` is its part of all kills."""

    name: str
    share: float
    spec: dict[str, Any]
    verb: str = "train"
    ranks: int = 1
    real: bool = False  # through the command line, in processes of its own
    phases: tuple[str, ...] = ()  # that half of its kills aim at
    options: tuple[str, ...] = ()


def corpora(folder: Path) -> dict[str, Path]:
    """Short documents, and a larger set of files to prepare."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(40, 60))) for _ in range(1600)]
    made = {name: folder / f"{name}.jsonl" for name in ("clean", "poison")}
    made["clean"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made["files"] = folder / "files"
    made["files"].mkdir()
    for number in range(12):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(30, 200))) + f" {draw.random()}." for _ in range(300)]
        texts += texts[:20]  # copies, which deduplication removes
        rows = [json.dumps({"text": f"{text} Reach me at me{number}@example.org."}) for text in texts]
        (made["files"] / f"part-{number:02}.jsonl").write_text("\n".join(rows) + "\n")
    return made


def scenarios(files: dict[str, Path]) -> list[Scenario]:
    model = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64}

    def spec(steps: int = 60, source: str = "clean", **more: Any) -> dict[str, Any]:
        data = {"sources": {"words": {"path": [str(files[source])]}}, "context": 32, "validation": 0.05}
        base: dict[str, Any] = {
            "name": "run", "model": model, "tokenizer": {"vocab": 300}, "data": data, "precision": "fp32",
            "budget": {"steps": steps, "batch": 128}, "optimizer": {"lr": 0.01}, "schedule": {"warmup": 4},
            "parallel": {"device": "cpu", "threads": 1}, "guard": {"warmup": 8, "window": 32},
            "checkpoint": {"every": 7}, "evaluate": {"every": 10, "tokens": 512},
        }  # fmt: skip
        for key, value in more.items():
            base[key] = {**base[key], **value} if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        return base

    trial = {"warmup": 8, "window": 32, "copy_every": "16 steps", "trial": {"budget": "600s", "share": "100%"}}
    trial |= {"max_vetoes": 2, "veto_share": "50%"}
    rows = {"packing": "pad", "padding": {"long": "truncate"}, "validation": 0, "context": 48}
    before_poison = spec(84, guard=trial, data=rows, budget={"batch": 16 * 48})
    poisoned = spec(84, "poison", guard=trial, data=rows, budget={"batch": 16 * 48})
    poisoned["data"]["sources"]["words"]["path"] = [str(files["poison"])]
    poisoned["tokenizer"] = {"path": str(files["poison"].parent / "before-poison" / "runs" / "run" / "tokenizer.json")}
    mixed = spec(
        optimizer={"lr": 0.01, "ema": 0.98}, dropout={"residual": 0.1}, data={"packing": "best_fit"},
        budget={"micro_batch": 2}, checkpoint={"every": 5, "keep_last": 1},
    )  # fmt: skip
    parts = {"sources": {"web": {"path": [str(files["files"])], "format": "jsonl"}}, "context": 64, "part": "64K"}
    prepared = spec(data={**parts, "clean": ["unicode", "dedup_exact", "dedup_minhash", "pii"]})
    two = {"device": "cpu", "threads": 1}
    saves, trials = ("save", "save", "evaluate"), ("trial", "trial", "save")
    return [
        Scenario("before poison", 0.0, before_poison),
        Scenario("one process", 0.16, spec(), phases=PHASES),
        Scenario("asynchronous saves", 0.12, spec(checkpoint={"every": 4, "asynchronous": True}), phases=saves),
        Scenario("average, dropout, best-fit packing", 0.1, mixed, phases=saves),
        Scenario("poison: trials and exclusions", 0.12, poisoned, phases=trials),
        Scenario("2 ranks, replicas", 0.1, spec(parallel={**two, "dp_replicate": 2}), ranks=2, phases=PHASES),
        Scenario("2 ranks, shards", 0.06, spec(parallel={**two, "dp_shard": 2}), ranks=2, phases=saves),
        Scenario("2 ranks, poison", 0.04, {**poisoned, "parallel": {**two, "dp_replicate": 2}}, ranks=2, phases=trials),
        Scenario("data prepare", 0.14, prepared, "prepare", options=("--workers", "1")),
        Scenario("data prepare, 2 workers", 0.06, prepared, "prepare", options=("--workers", "2")),
        Scenario("command line: train", 0.03, spec(120), real=True),
        Scenario(
            "command line: train, 2 workers", 0.04, spec(120, parallel={**two, "dp_replicate": 2}), ranks=2, real=True
        ),
        Scenario("command line: data prepare", 0.03, prepared, "prepare", real=True, options=("--workers", "2")),
    ]


# --- What a process publishes, and how it is started


class Phases:
    """Counters of phases in memory that a forked process shares with this one."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(PHASES))
        self._counts = memoryview(self._memory).cast("Q")

    def count(self, phase: str) -> int:
        return self._counts[PHASES.index(phase)]

    def publish(self) -> None:
        """In the forked process: count what the loop enters from here on."""
        enter, respond = PhaseTracker.enter, IncidentResponder.respond

        def counted(where: PhaseTracker, phase: str) -> None:
            enter(where, phase)
            if phase in PHASES:
                self._counts[PHASES.index(phase)] += 1

        def tried(responder: IncidentResponder, outcome: Any) -> Any:
            self._counts[PHASES.index("trial")] += 1
            return respond(responder, outcome)

        PhaseTracker.enter = counted  # type: ignore[method-assign]
        IncidentResponder.respond = tried  # type: ignore[method-assign]


def call(arguments: list[str], log: Path) -> NoReturn:
    """In a forked process: the command line's own function, and its exit code."""
    code = 1
    try:
        out = log.open("a", buffering=1)  # until the process ends
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.stdout = sys.stderr = out
        sys.argv = ["bessemer", *arguments]
        command_line.run()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except KeyboardInterrupt:  # before the command line's own function
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        log.with_suffix(".modules").write_text("\n".join(sys.modules))
        os._exit(code)


def import_as(folder: Path) -> None:
    """Import here what a forked process had to import, so that the next ones need not."""
    path = folder / "log.modules"
    for name in path.read_text().split() if path.exists() else ():
        if name not in sys.modules and not name.startswith("_"):
            with suppress(Exception):  # some modules are made by others while they are imported
                importlib.import_module(name)


def fork(arguments: list[str], log: Path, ranks: int, phases: Phases | None) -> int:
    """Start a session of forked processes; the pid of its leader, which is the only one or starts the ranks."""
    campaign = os.getpid()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    leader = os.fork()
    if leader:
        return leader
    try:
        os.setsid()
        os.environ[PARENT] = str(campaign)
        if ranks > 1:
            lead(arguments, log, ranks, port, phases)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if phases:
            phases.publish()
        call(arguments, log)
    finally:  # a signal before the command line's own function: nothing of the campaign may go on here
        os._exit(130)


def lead(arguments: list[str], log: Path, ranks: int, port: int, phases: Phases | None) -> NoReturn:
    """Start the ranks and wait for them, as torchrun does: ends with the first that fails, and they end with it."""
    signalled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # the ranks get them too
        signal.signal(number, lambda number, _: signalled.append(number))
    started, children = os.getpid(), set()
    for rank in range(ranks):
        if child := os.fork():
            children.add(child)
            continue
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", PARENT: str(started),
        }  # fmt: skip
        if phases and rank == 0:
            phases.publish()
        call(arguments, log.with_suffix(f".{rank}"))
    until = float("inf")
    while children and time.monotonic() < until:
        if signalled:
            until = min(until, time.monotonic() + SHUTDOWN_S)
        pid, status = os.waitpid(-1, os.WNOHANG)
        children.discard(pid)
        if pid and status and not signalled:
            os._exit(1)
        time.sleep(0.01)
    os._exit(128 + signalled[0] if signalled else 0)


@dataclass
class Start:
    """One start of a command."""

    pid: int
    process: subprocess.Popen[bytes] | None = None
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None and self.process:
            self.code = self.process.poll()
        elif self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> int | None:
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        return self.code


def left_over(leader: int, mark: str) -> list[psutil.Process]:
    """Processes of a start that are still there: in its session, or with its mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            ours = os.getsid(process.pid) == leader or process.environ().get(MARK) == mark
            if process.pid != os.getpid() and ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# --- The campaign


@dataclass
class Campaign:
    """Draws, kills and compares. `findings` are what must not happen."""

    folder: Path
    draw: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    references: dict[str, tuple[dict[str, Any], float]] = field(default_factory=dict)
    slowest_end_s: float = 0.0
    starts: int = 0

    def start(self, scenario: Scenario, folder: Path, mark: str, phases: Phases | None) -> Start:
        self.starts += 1
        verb = ["train", str(folder / "spec.json"), "--plain"]
        if scenario.verb == "prepare":
            verb = ["data", "prepare", str(folder / "spec.json"), *scenario.options]
        if not scenario.real:
            return Start(fork(verb, folder / "log", scenario.ranks, phases))
        with (folder / "log").open("a") as log:
            command = [sys.executable, "-m", "bessemer", *verb]
            environment = {**os.environ, MARK: mark, "GLOO_SOCKET_IFNAME": "lo"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        return Start(process.pid, process)

    def moment(self, scenario: Scenario, start: Start, phases: Phases, duration_s: float) -> str:
        """Wait for a moment drawn by time or by phase; what it was, or "" if the process ended before."""
        until = time.monotonic() + self.draw.uniform(0, 1.05 * duration_s)
        what = "any time"
        if scenario.phases and self.draw.random() < 0.5:
            what = self.draw.choice(scenario.phases)
            rare = what in ("save", "evaluate", "trial")
            wanted = phases.count(what) + self.draw.randint(1, 3 if rare else 25)
            until = time.monotonic() + 4 * duration_s + 5
            while phases.count(what) < wanted and time.monotonic() < until:
                if start.poll() is not None:
                    return ""
                time.sleep(0.0005)
            until = time.monotonic() + self.draw.uniform(0, LENGTHS_S.get(what, 0.01))
        while time.monotonic() < until:
            if start.poll() is not None:
                return ""
            time.sleep(0.0005)
        return what

    def kill(self, scenario: Scenario, start: Start, mark: str) -> str:
        """Send a signal to the whole start or a part of it, and see that everything of it ends."""
        number = self.draw.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [0.8, 0.12, 0.08])[0]
        whom = "leader"
        if scenario.ranks > 1:
            parts = ["leader", "rank"] if scenario.real else ["all", "leader", "rank"]
            whom = self.draw.choice(parts) if number == signal.SIGKILL else parts[0]
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(start.pid).children()
        whom = "leader" if whom == "rank" and not children else whom  # none has been started yet
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if scenario.real and number != signal.SIGKILL:
                os.kill(start.pid, number)  # torchrun passes it on
            elif whom == "all":
                os.killpg(start.pid, number)
            elif whom == "rank":
                self.draw.choice(children).send_signal(number)
            else:
                os.kill(start.pid, number)
        began = time.monotonic()
        restarts = scenario.real and whom == "rank"  # by torchrun: the command goes on by itself
        code = start.wait(600 if restarts else END_S)
        if code is None:
            self.finding(scenario, f"not ended {END_S:.0f} s after {number.name} to {whom}")
            for process in left_over(start.pid, mark):
                process.kill()
            start.wait(10)
        expected = {signal.SIGTERM: (143, -15, 0), signal.SIGINT: (130, -2, 0)}.get(number)
        if (expected and code not in expected) or (restarts and code != 0):
            self.finding(scenario, f"exit code {code} after {number.name} to {whom}")
        began = began if not restarts else time.monotonic()
        while (rest := left_over(start.pid, mark)) and time.monotonic() - began < ORPHAN_S:
            time.sleep(0.05)
        if rest:
            names = [" ".join(process.cmdline())[:100] for process in rest]
            self.finding(scenario, f"orphans {ORPHAN_S:.0f} s after {number.name} to {whom}: {names}")
            for process in rest:
                process.kill()
        elif number == signal.SIGKILL:
            self.slowest_end_s = max(self.slowest_end_s, time.monotonic() - began)
        self.signals[f"{number.name} to {whom}" if scenario.ranks > 1 else number.name] += 1
        return number.name

    def finding(self, scenario: Scenario, what: str, **more: Any) -> None:
        self.findings.append({"scenario": scenario.name, "finding": what, **more})
        print(f"FINDING  {scenario.name}: {what} {more or ''}", flush=True)

    def finish(self, scenario: Scenario, folder: Path, mark: str) -> float:
        """Run to the end without a kill; seconds. An exit code other than 0 is a finding."""
        began = time.monotonic()
        code = self.start(scenario, folder, mark, None).wait(900)
        if code != 0:
            self.finding(scenario, f"exit code {code} without a kill", folder=str(folder))
        return time.monotonic() - began

    def new_folder(self, scenario: Scenario, name: str) -> Path:
        folder = self.folder / re.sub(r"\W+", "-", f"{scenario.name} {name}".strip())
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps({**scenario.spec, "runs": str(folder / "runs")}))
        return folder

    def poison(self, scenario: Scenario, files: dict[str, Path]) -> None:
        """Documents of a few steps of a clean run become noise. With its tokenizer they come at those steps again."""
        folder = self.new_folder(scenario, "")
        self.finish(scenario, folder, "poison")
        bad = {document["row"] for step in POISONED for document in documents_of(folder / "runs" / "run", step)}
        lines = files["clean"].read_text().splitlines()
        draw = random.Random(1)
        for row in sorted(bad)[::2]:  # counted from 1
            lines[row - 1] = json.dumps({"text": "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(120))})
        files["poison"].write_text("\n".join(lines) + "\n")

    def reference(self, scenario: Scenario) -> tuple[dict[str, Any], float]:
        """What an unkilled run gives, and how many seconds it takes once its modules are imported here."""
        reference = self.new_folder(scenario, "reference")
        self.finish(scenario, reference, "reference")
        import_as(reference)
        duration_s = self.finish(scenario, self.new_folder(scenario, "again"), "reference")
        expected = outcome(scenario, reference)
        if scenario.verb == "train":
            events = Counter(event["kind"] for event in Run(reference / "runs" / "run").events())
            print(f"{scenario.name}: {duration_s:.1f} s unkilled, {dict(events)}", flush=True)
        return expected, duration_s

    def run(self, scenario: Scenario, kills: int) -> None:
        if scenario.name not in self.references:
            self.references[scenario.name] = self.reference(scenario)
        expected, duration_s = self.references[scenario.name]
        done = 0
        while done < kills:
            number = self.runs[scenario.name] + 1
            mark, phases = f"{os.getpid()}-{scenario.name}-{number}", Phases()
            folder = self.new_folder(scenario, str(number))
            ended = False
            for _ in range(min(PER_RUN, kills - done)):
                start = self.start(scenario, folder, mark, phases)
                what = self.moment(scenario, start, phases, duration_s)
                if not what:
                    ended = start.code == 0
                    if not ended:
                        words = {path.name: path.read_text()[-600:] for path in sorted(folder.glob("log*"))}
                        words.pop("log.modules", None)
                        self.finding(scenario, f"exit code {start.code} before a kill", **words)
                    break
                self.kill(scenario, start, mark)
                self.kills[scenario.name] += 1
                self.moments[what] += 1
                done += 1
            if not ended:
                self.finish(scenario, folder, mark)
            self.runs[scenario.name] += 1
            differences = compare(expected, outcome(scenario, folder))
            if differences:
                self.finding(scenario, differences, folder=str(folder))
            else:
                shutil.rmtree(folder)
        total = sum(self.kills.values())
        print(f"{total} kills, {len(self.findings)} findings; last {done} of {scenario.name}", flush=True)


def outcome(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """What an unkilled run and a killed one must share."""
    if scenario.verb == "prepare":
        root = folder / "runs" / ".data"
        names = (path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix in (".bin", ".idx", ".npy"))
        stores = {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}
        tokenizers = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("tokenizer.json"))
        return {"stores": stores, "tokenizers": tokenizers}
    run = Run(folder / "runs" / "run")
    return {
        "steps": [(record["step"], record["loss"], record["grad_norm"], record["lr"]) for record in run.metrics()],
        "validation": [(record["step"], record["loss"]) for record in run.validations()],
        "state": run.state,
    }


def compare(expected: dict[str, Any], found: dict[str, Any]) -> str:
    for key, values in expected.items():
        if found[key] == values:
            continue
        if isinstance(values, list):
            at = next((i for i, (a, b) in enumerate(zip(values, found[key], strict=False)) if a != b), None)
            pair = f"{values[at]} became {found[key][at]}" if at is not None else ""
            return f"{key} differ: {len(values)} became {len(found[key])} {pair}"
        if isinstance(values, dict):
            names = [name for name in {*values, *found[key]} if values.get(name) != found[key].get(name)]
            return f"{key} differ: {sorted(names)[:5]} of {len(values)}"
        return f"{key}: {values} became {found[key]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression of scenarios")
    parser.add_argument("--jobs", type=int, default=1, help="campaigns at a time, each with a share of the kills")
    default = Path(__file__).parent / "results" / f"{time.strftime('%Y-%m-%d')}-kills.json"
    parser.add_argument("--save", nargs="?", const=default, help="write the result here (benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.jobs > 1:
        sys.exit(run_jobs(arguments))
    torch.set_num_threads(1)  # and no operation before a fork, which OpenMP's threads would not survive
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bessemer-kills-") as scratch:
        campaign = Campaign(Path(scratch), random.Random(arguments.seed))
        files = corpora(Path(scratch))
        first, *rest = scenarios(files)
        chosen = [one for one in rest if re.search(arguments.only, one.name)]
        if any("poison" in one.name for one in chosen):
            campaign.poison(first, files)
        whole = sum(one.share for one in chosen)
        rounds = max(1, arguments.kills // ROUND)
        for scenario in chosen * rounds:  # in rounds, so that a campaign that is ended early has seen all of them
            campaign.run(scenario, max(1, round(arguments.kills / rounds * scenario.share / whole)))
            result = report(campaign, arguments.seed, time.monotonic() - began)
            if arguments.save:
                Path(arguments.save).write_text(json.dumps(result, indent=1) + "\n")
        if campaign.findings:
            kept = Path(tempfile.mkdtemp(prefix="bessemer-kills-findings-"))
            shutil.copytree(scratch, kept, dirs_exist_ok=True)
            print(f"folders of findings are in {kept}")
    print(json.dumps(result, indent=1))
    sys.exit(1 if campaign.findings else 0)


def run_jobs(arguments: argparse.Namespace) -> int:
    """Several campaigns side by side, their results added up; the exit code."""
    with tempfile.TemporaryDirectory(prefix="bessemer-kills-jobs-") as scratch:
        started = []
        for job in range(arguments.jobs):
            kills = len(range(job, arguments.kills, arguments.jobs))
            options = ["--kills", str(kills), "--seed", str(arguments.seed + job), "--only", arguments.only]
            command = [sys.executable, __file__, *options, "--save", str(Path(scratch) / f"{job}.json")]
            started.append(subprocess.Popen(command))
        codes = [process.wait() for process in started]
        results = [json.loads(path.read_text()) for path in sorted(Path(scratch).iterdir())]
    total = {**results[0], "command": f"python {' '.join(sys.argv)}", "seed": arguments.seed, "jobs": arguments.jobs}
    for key, value in results[0].items():
        if key in ("kills", "runs", "starts", "findings"):
            total[key] = sum((result[key] for result in results), type(value)())
        elif key in ("seconds", "slowest_end_after_sigkill_s"):
            total[key] = max(result[key] for result in results)
        elif isinstance(value, dict):
            total[key] = dict(sum((Counter(result[key]) for result in results), Counter()))
    print(json.dumps(total, indent=1))
    if arguments.save:
        Path(arguments.save).write_text(json.dumps(total, indent=1) + "\n")
    return max(codes)


def report(campaign: Campaign, seed: int, seconds: float) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"), "command": f"python {' '.join(sys.argv)}", "seed": seed, "commit": commit,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__,
        "seconds": round(seconds), "kills": sum(campaign.kills.values()), "runs": sum(campaign.runs.values()),
        "starts": campaign.starts, "findings": campaign.findings,
        "slowest_end_after_sigkill_s": round(campaign.slowest_end_s, 2),
        "kills_by_scenario": dict(campaign.kills), "kills_by_moment": dict(campaign.moments),
        "kills_by_signal": dict(campaign.signals), "runs_by_scenario": dict(campaign.runs),
    }  # fmt: skip


if __name__ == "__main__":
    main()
