"""Silent damage: one file of a run's folder or of its prepared data with a flipped bit, cut short, deleted, exchanged
with another or replaced by an old version, and then a resume.

    python benchmarks/damage.py --cases 200 --seed 0 --save

A run of 12 steps is stopped once and killed once; every case starts from a copy of what was left, damages one file and
continues the run. It must end in one of three ways: refused with the name of the damaged file; finished with an event
that tells of the repair; or finished without one. Finished runs must have every number of every step and evaluation of
a run that was never stopped, each step once. Anything else, a traceback or a hang among them, is a failure.

Every case is a forked process: torch is imported once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
STEPS, STOPPED_AT, KILLED_AT = 12, 5, 9
CASE_S = 120  # after which a case counts as a hang
KINDS = ("bit flip", "truncation", "deletion", "swap", "old version")
# Numbers of a record that a resume may not change; the others are times.
STEP_NUMBERS = ("step", "loss", "accuracy", "grad_norm", "lr", "clip", "clipped", "veto", "tokens")
VALIDATION_NUMBERS = ("step", "loss", "bits_per_byte", "accuracy", "tokens", "per_source")
# Events that say that something was found and mended.
TOLD = ("records_repaired", "checkpoint_passed_over", "data_repaired", "swept")
WORDS = ("steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge", "anvil")
# Ways to read the data, so that every kind of file is there.
DESIGNS: dict[str, dict[str, Any]] = {
    "concatenated, curated": {"clean": ["whitespace", "dedup_exact", {"length": {"min_chars": 40}}]},
    "best fit, by length": {"packing": "best_fit", "curriculum": {"by": "length", "groups": 2}},
}


def spec_data(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    sources = {name: {"path": [str(folder / f"{name}.jsonl")]} for name in ("words", "more")}
    return {
        "name": "run", "runs": str(folder / "runs"),
        "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32}, "tokenizer": {"vocab": 300},
        "data": {"sources": sources, "context": 32, "validation": 0.1, **data},
        "budget": {"steps": STEPS, "batch": 128}, "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
        "guard": {"warmup": 8, "window": 16}, "checkpoint": {"every": 4, "keep_last": 3},
        "evaluate": {"every": 4, "tokens": 512},
    }  # fmt: skip


def write_corpus(folder: Path) -> None:
    draw = random.Random(0)
    for name in ("words", "more"):
        rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(6, 60)))} for _ in range(80)]
        rows += rows[:8]  # for the deduplication
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns, from a process of its own; how it ended where it returns nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        answer: dict[str, Any] = {}
        try:
            signal.alarm(CASE_S)
            answer = work()
        except BaseException:
            answer = {"end": "traceback", "message": traceback.format_exc()[-2000:]}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"end": f"killed by signal {os.WTERMSIG(status)}"}


def train(spec: dict[str, Any], stop_at: int | None = None, kill_at: int | None = None) -> dict[str, Any]:
    """Start or continue the run: how it ended. A kill returns nothing."""
    import torch

    from bessemer.errors import UserError
    from bessemer.observe.view import RunView
    from bessemer.session.session import Session
    from bessemer.spec.schema import RunSpec

    torch.set_num_threads(1)

    class View(RunView):
        session: Session

        def step(self, record: dict[str, Any]) -> None:
            super().step(record)
            if record["step"] == stop_at:
                self.session.interrupt.signal = "SIGTERM"
            if record["step"] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    view = View()
    try:
        view.session = Session(RunSpec.model_validate(spec), view)
        outcome = view.session.train()
    except UserError as error:
        return {"end": "refused", "message": str(error)}
    return {"end": outcome.kind, "message": outcome.reason}


def numbers(run: Path) -> list[Any]:
    """Every number of a run that does not depend on the clock."""
    from bessemer.run.directory import Run

    found = Run(run)
    steps = [[record.get(key) for key in STEP_NUMBERS] for record in found.metrics()]
    return [steps, [[record.get(key) for key in VALIDATION_NUMBERS] for record in found.validations()]]


def make_base(folder: Path, data: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """A killed run and another one in `folder`/base, as they were after the first start in `folder`/old; the spec, and
    the numbers of a run that was never stopped."""
    write_corpus(folder)
    spec = spec_data(folder, data)
    reference = in_child(lambda: train(spec | {"runs": str(folder / "reference")}))
    assert reference.get("end") == "finished", reference
    stopped = in_child(lambda: train(spec, stop_at=STOPPED_AT))
    assert stopped.get("end") == "interrupted", stopped
    shutil.copytree(folder / "runs", folder / "old")
    killed = in_child(lambda: train(spec, kill_at=KILLED_AT))
    assert killed.get("end") == f"killed by signal {signal.SIGKILL:d}", killed
    other = in_child(lambda: train(spec | {"name": "other", "seed": 1}))  # files are exchanged with its own
    assert other.get("end") == "finished", other
    os.rename(folder / "runs", folder / "base")
    return spec, numbers(folder / "reference" / "run")


def files_of(folder: Path) -> list[Path]:
    """Every file that is not empty, relative to the folder; links point back into it."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def kind_of(path: Path) -> str:
    """A file's path without what differs between files of a kind."""
    name = re.sub(r"[0-9a-f]{16,}", "HASH", str(path))
    name = re.sub(r"^(run|other)/", "RUN/", re.sub(r"/[0-9a-f]{2}/", "/HH/", name))
    return re.sub(r"\d+", "N", re.sub(r"/(words|more)\.((train|validation)\.)?", "/SOURCE.", name))


def damage(kind: str, target: Path, place: Path, old: Path, draw: random.Random) -> str | None:
    """Damage `place`/`target`; what was done, or None where this kind cannot be done to it."""
    path = place / target
    content = path.read_bytes()
    if kind == "bit flip":
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        return f"bit {bit} of byte {at} of {len(content)}"
    if kind == "truncation":
        kept = draw.randrange(len(content))
        os.truncate(path, kept)
        return f"{kept} of {len(content)} bytes"
    if kind == "deletion":
        path.unlink()
        return "deleted"
    if kind == "old version":
        former = old / target
        if not former.exists() or former.read_bytes() == content:
            return None
        shutil.copy2(former, path)
        return "as after the first start"
    alike = [other for other in files_of(place) if other != target and kind_of(other) == kind_of(target)]
    alike = [other for other in alike if (place / other).read_bytes() != content]
    if not alike:
        return None
    other = draw.choice(alike)
    path.write_bytes((place / other).read_bytes())
    (place / other).write_bytes(content)
    return f"exchanged with {other}"


def judge(result: dict[str, Any], run: Path, target: Path, done: str, wanted: list[Any]) -> tuple[str, str]:
    """The outcome of a case, and the words behind it."""
    from bessemer.run.directory import Run

    names = {target.name, *(Path(word).name for word in [done.removeprefix("exchanged with ")] if "exchanged" in done)}
    if target.parent.name.startswith("step-"):
        names.add(target.parent.name)  # a checkpoint is passed over as a whole
    message = str(result.get("message", ""))
    if result["end"] == "refused":
        by_name = any(name in message for name in names) and "\n" not in message.strip()
        return ("refused by name" if by_name else "FAILED: refused without the name"), message
    if result["end"] != "finished":
        return f"FAILED: {result['end']}", message
    if numbers(run) != wanted:
        return "FAILED: other numbers", message
    events = list(Run(run).events())
    since = max(i for i, event in enumerate(events) if event.get("kind") == "started")
    before = max((i for i, event in enumerate(events[:since]) if event.get("kind") in ("started", "saved")), default=0)
    told = [event for event in events[before:] if event.get("kind") in TOLD]
    about = [event for event in told if any(name in json.dumps(event) for name in names)]
    if about:
        return "repaired with an event", str(about[0].get("reason"))
    return "without effect", "every number is that of the undamaged run"


def campaign(cases: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    import torch

    import bessemer.session.session  # noqa: F401  once, for all cases

    torch.set_num_threads(1)
    bases = {}
    for number, (design, data) in enumerate(DESIGNS.items()):
        place = folder / str(number)
        place.mkdir()
        bases[design] = (place, *make_base(place, data))
    sound = {design: one_case(base, None, "", random.Random(0)) for design, base in bases.items()}
    assert all(case["outcome"] == "without effect" for case in sound.values()), sound
    draw, results = random.Random(seed), []
    queue: list[tuple[str, Path]] = []
    while len(results) < cases:
        if not queue:  # every file in turn, in another order each time
            queue = [(design, path) for design, base in bases.items() for path in files_of(base[0] / "base")]
            queue = [(design, path) for design, path in queue if path.parts[0] != "other"]
            draw.shuffle(queue)
        design, target = queue.pop()
        case = one_case(bases[design], target, draw.choice(KINDS), draw)
        results.append({"design": design, **case})
        print(
            f"{len(results):4}  {case['damage']:<11}  {case['outcome']:<24}  {target}  {case['words'][:300]}",
            flush=True,
        )
    return results


def one_case(
    base: tuple[Path, dict[str, Any], list[Any]], target: Path | None, kind: str, draw: random.Random
) -> dict[str, Any]:
    place, spec, wanted = base
    work = place / "runs"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(place / "base", work)
    done: str | None = ""
    if target is not None:
        while (done := damage(kind, target, work, place / "old", draw)) is None:
            kind = draw.choice(KINDS)
    assert done is not None
    began_s = time.monotonic()
    result = in_child(lambda: train(spec))
    outcome, words = judge(result, work / "run", target or Path("-"), done, wanted)
    case = {"file": str(target), "damage": kind, "done": done, "outcome": outcome, "words": words}
    return case | {"seconds": round(time.monotonic() - began_s, 2)}


def table(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """File -> kind of damage -> outcome -> cases."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for case in results:
        found.setdefault(kind_of(Path(case["file"])), {}).setdefault(case["damage"], Counter())[case["outcome"]] += 1
    return {file: {kind: dict(n) for kind, n in sorted(by.items())} for file, by in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    default = Path(__file__).parent / "results" / f"{time.strftime('%Y-%m-%d')}-damage.json"
    parser.add_argument("--save", nargs="?", const=default, help="write the result here (benchmarks/results)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bessemer-damage-") as folder:
        results = campaign(options.cases, options.seed, Path(folder))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    totals = Counter(case["outcome"] for case in results)
    report = {
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "commit": commit,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "cases": len(results), "outcomes": dict(totals), "table": table(results), "each": results,
    }  # fmt: skip
    for file, by in report["table"].items():
        for kind, outcomes in by.items():
            print(f"{file:<64} {kind:<12} {', '.join(f'{n} {outcome}' for outcome, n in outcomes.items())}")
    print(dict(totals))
    if options.save:
        Path(options.save).write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(outcome.startswith("FAILED") for outcome in totals))


if __name__ == "__main__":
    main()
