"""Plays a small copy of a run through all its stages: train, save, a kill, resume, evaluation, export
(`bessemer train --rehearse`). Before that it checks what only the full run would show.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.chaos.rehearsal_spec import KILL_AT, STEPS, rehearsal_spec
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.hf import choose_family
from bessemer.parent import child_environment
from bessemer.plan.decide import vocab_limit
from bessemer.plan.search.layout import count_processes
from bessemer.run.directory import Run
from bessemer.session.start import complete_spec, open_source
from bessemer.spec.load import dump_spec
from bessemer.spec.model import model_shape
from bessemer.spec.quantity import human_bytes, human_time
from bessemer.spec.reward_model import with_label_head
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.spec.trained import parameter_bytes

MARK = "rehearsal.txt"  # in a folder that a later rehearsal may replace
COMPARED = ("loss", "grad_norm", "lr")  # columns of the steps
GPU_TOLERANCE = 1e-3  # relative: attention's backward pass on a GPU does not repeat its sums bit for bit
IN_FLIGHT = 2  # checkpoints beside those that are kept: the one being written, and the best
PROCESSES_PER_CORE = 4  # more would stall the machine
Report = Callable[["RehearsalStage"], None]


@dataclass(frozen=True)
class RehearsalStage:
    """One line of the result. `look` is the command that shows more of a failure."""

    name: str
    state: str  # ok, failed, skipped
    seconds: float
    text: str
    look: str = ""

    def __str__(self) -> str:
        time_words = f"{self.seconds:.1f} s" if self.state != "skipped" else "-"
        line = f"{self.state:<8} {self.name:<10} {time_words:>8}  {self.text}"
        return f"{line}\n{' ' * 29}look: {self.look}" if self.look else line


class StageFailure(Exception):
    """Why a stage failed, and what to look at."""

    def __init__(self, reason: str, look: str = "") -> None:
        super().__init__(reason)
        self.look = look


@dataclass
class Rehearsal:
    """A rehearsal of `spec` in `folder`. `report` receives each stage when it is done."""

    spec: RunSpec
    folder: Path
    report: Report
    gpus: int
    processes: int = 1  # of the small run

    def run(self) -> list[RehearsalStage]:
        stages: list[RehearsalStage] = []
        checks: list[tuple[str, Callable[[], str]]] = [
            ("disk", self.check_disk), ("store", self.check_store), ("tokenizer", self.check_tokenizer),
            ("family", self.check_family),
        ]  # fmt: skip
        played: list[tuple[str, Callable[[], str]]] = [
            ("prepare", self.prepare), ("train", self.train), ("save", self.save), ("resume", self.resume),
            ("evaluate", self.evaluate), ("export", self.export),
        ]  # fmt: skip
        for name, action in checks:
            stages.append(_play(name, action, self.report))
        broken = ""
        for name, action in played:
            stages.append(_skip(name, broken, self.report) if broken else _play(name, action, self.report))
            if stages[-1].state == "failed" and name not in ("evaluate", "export"):
                broken = name
        return stages

    # Of the full run.

    def check_disk(self) -> str:
        """The runs folder can be written, and has room for the checkpoints that are kept."""
        runs = Path(self.spec.runs)
        try:
            runs.mkdir(parents=True, exist_ok=True)
            probe = runs / f".rehearsal-{os.getpid()}"
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            raise StageFailure(f"runs: {runs} cannot be written: {error.strerror}", f"ls -ld {runs}") from None
        each, count = self._checkpoint_bytes(), self.spec.checkpoint.keep_last + IN_FLIGHT
        needed, free = each * count, shutil.disk_usage(runs).free
        words = f"{count} checkpoints of about {human_bytes(each)} need {human_bytes(needed)}"
        if needed > free:
            fix = "lower checkpoint.keep_last, or use another disk for runs"
            raise StageFailure(f"{words}, and {runs} has {human_bytes(free)} free: {fix}", f"df -h {runs}")
        more = ", more by checkpoint.keep_every" if self.spec.checkpoint.keep_every is not None else ""
        return f"{words}{more}; {human_bytes(free)} are free"

    def check_store(self) -> str:
        """The remote tier takes a file, gives it back and deletes it."""
        url = self.spec.checkpoint.remote
        if url is None:
            return "no checkpoint.remote"
        from fsspec.core import url_to_fs

        name, content = f"rehearsal-{os.getpid()}.txt", b"bessemer train --rehearse"
        try:
            files, root = url_to_fs(url)
            files.makedirs(root, exist_ok=True)
            files.pipe_file(f"{root}/{name}", content)
            same = files.cat_file(f"{root}/{name}") == content
            files.rm_file(f"{root}/{name}")
        except Exception as error:  # each storage library has its own
            text = " ".join(f"{type(error).__name__}: {error}".split())
            fix = "correct the address or the credentials in the environment"
            raise StageFailure(f"checkpoint.remote: {url} cannot be written: {text}: {fix}") from None
        if not same:
            raise StageFailure(f"checkpoint.remote: {url} returned other bytes than were written")
        return f"{url} takes, returns and deletes a file"

    def check_tokenizer(self) -> str:
        path = self.spec.tokenizer.path
        if path is None:
            return "will be trained from the data, as here from the sample"
        try:
            tokenizer = Tokenizer.load(Path(path), self.spec.tokenizer.eos)
            count = len(tokenizer.encode("Steel is made from iron."))
        except (UserError, OSError) as error:
            raise StageFailure(f"tokenizer.path: {str(error).splitlines()[0]}") from None
        return f"{path}: {tokenizer.vocab_size:,} tokens, {count} for a short sentence"

    def check_family(self) -> str:
        """Hugging Face can represent the full model."""
        if self.spec.model.hf is not None:
            return f"that of {self.spec.model.hf}"
        try:
            family = choose_family(with_label_head(self.spec, self._shape()), None)
        except UserError as error:
            fix = "change the model, or train it knowing that only `export --to pt` may take it"
            raise StageFailure(f"{error}: {fix}", "bessemer export --help") from None
        return f"{family.name} of Hugging Face represents the full model"

    def _shape(self) -> ModelShape:
        source = open_source(self.spec)
        if source is not None:
            return source.shape
        vocab = self.spec.tokenizer.vocab
        width = model_shape(self.spec.model, vocab=0).width
        return model_shape(self.spec.model, vocab if isinstance(vocab, int) else vocab_limit(width))

    def _checkpoint_bytes(self) -> int:
        shape = self._shape()
        precision = "bf16" if self.spec.precision == "auto" else self.spec.precision
        each = parameter_bytes(self.spec, shape, precision)
        return int((each.held + each.moments + each.host) * shape.parameters)

    # The small run.

    def prepare(self) -> str:
        """Writes the small spec, and prepares its data."""
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / MARK).exists():
            raise StageFailure(f"{self.folder}: exists and is no rehearsal: move it away", f"ls {self.folder}")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            (self.folder / MARK).write_text("of bessemer train --rehearse, which may replace this folder\n")
        except OSError as error:
            raise StageFailure(f"{self.folder}: cannot be written: {error.strerror}") from None
        notes: list[str] = []
        try:
            most = self.gpus or PROCESSES_PER_CORE * (os.cpu_count() or 1)
            small = complete_spec(rehearsal_spec(self.spec, self.folder, self.gpus, most, notes))
        except UserError as error:
            raise StageFailure(str(error).splitlines()[0]) from None
        self.processes = count_processes(small.parallel, self.gpus)
        self.spec_file.write_text(dump_spec(small))
        if self.spec.objective not in RL_OBJECTIVES:
            self._command("prepare", "data", "prepare", str(self.spec_file))
        shape = "" if small.model.hf else f"{small.model.layers} layers of width {small.model.width}, "
        return "; ".join([f"{shape}{STEPS} steps in {self.folder}", *notes])

    @property
    def spec_file(self) -> Path:
        return self.folder / "rehearsal.yaml"

    @property
    def small_run(self) -> Run:
        return Run(self.folder / "runs" / self.spec.name)

    def train(self) -> str:
        """Trains until SIGKILL ends every process."""
        command = ["-m"]
        if self.processes > 1:
            command += ["bessemer.parallel.agent", "--standalone", f"--nproc-per-node={self.processes}", "-m"]
        command += ["bessemer.chaos.rehearsal_worker", str(self.spec_file), str(KILL_AT)]
        code = self._start("train", command)
        killed = code == -signal.SIGKILL or (self.processes > 1 and code != 0)
        losses = [record["loss"] for record in self.small_run.metrics()] if self.spec_file.exists() else []
        if not killed or len(losses) < KILL_AT - 1:
            raise self._failure("train", f"ended with code {code} after {len(losses)} of {KILL_AT} steps")
        return f"{KILL_AT} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, then killed with SIGKILL"

    def save(self) -> str:
        """The checkpoints that the killed run left verify."""
        self._command("save", "checkpoints", "verify", str(self.small_run.folder))
        folders = sorted(path.parent for path in self.small_run.checkpoints.glob("*/manifest.json"))
        if not folders:
            raise self._failure("train", "the killed run left no complete checkpoint")
        size = _bytes_in(folders[-1])
        return f"{len(folders)} checkpoints verify, the newest {folders[-1].name} of {human_bytes(size)}"

    def resume(self) -> str:
        """`bessemer train` continues the run, and repeats the steps after the checkpoint with the same numbers."""
        before = {record["step"]: record for record in self.small_run.metrics()}
        self._command("resume", "train", str(self.spec_file), "--plain")
        started = list(self.small_run.events("started"))
        first = int(started[-1].get("step", 0))
        after = {record["step"]: record for record in self.small_run.metrics()}
        repeated = sorted(step for step in before if step >= first)
        if not first or not repeated or sorted(after) != list(range(STEPS)):
            raise self._failure("resume", f"it continued at step {first} and has {len(after)} of {STEPS} steps")
        difference, step, column = max(_differences(before, after, repeated))
        limit = GPU_TOLERANCE if started[-1].get("device") == "cuda" else 0.0
        if difference > limit:
            values = f"{before[step].get(column)} before the kill and {after[step].get(column)} after it"
            raise self._failure("resume", f"step {step} differs: {column} was {values}")
        same = "bit for bit" if difference == 0 else f"within {difference:.1e}"
        return f"from step {first}; steps {repeated[0]} to {repeated[-1]} repeated {same}; all {STEPS} steps done"

    def evaluate(self) -> str:
        if not self.spec.data.validation and not self.spec.evaluate.tasks:
            return "data.validation is 0: the run has no evaluations"
        records = list(self.small_run.validations())
        losses = [record["loss"] for record in records if isinstance(record.get("loss"), float)]
        if not records or (losses and not all(loss == loss and abs(loss) < float("inf") for loss in losses)):
            raise self._failure("resume", f"{len(records)} evaluations, losses {losses}")
        rise = f", held-out loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
        return f"{len(records)} evaluations{rise}"

    def export(self) -> str:
        """The model, or its adapter, opens in transformers or PEFT with the same outputs."""
        kind = "peft" if self.spec.adapter is not None else "hf"
        out = self.folder / "export"
        self._command("export", "export", str(self.small_run.folder), "--to", kind, "--out", str(out), "--overwrite")
        return f"to {kind}: opened and compared, {human_bytes(_bytes_in(out))}"

    def _command(self, name: str, *arguments: str) -> None:
        """Run a command of Bessemer; its output goes to a log."""
        if code := self._start(name, ["-m", "bessemer", *arguments]):
            raise self._failure(name, f"`bessemer {shlex.join(arguments)}` ended with code {code}")

    def _start(self, name: str, arguments: list[str]) -> int:
        environment = child_environment(PET_MAX_RESTARTS="0")
        if self.processes > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.processes)))
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log, env=environment)
            try:
                return process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise

    def _failure(self, name: str, reason: str) -> StageFailure:
        """The reason with the last line of the stage's log, and the command that shows what went before it."""
        log = self.folder / f"{name}.log"
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {lines[-1][:300]}" if lines else ""
        return StageFailure(f"{reason}{last}", f"bessemer diagnose {log}" if lines else "")


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _differences(
    before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]], steps: list[int]
) -> Iterator[tuple[float, int, str]]:
    """Relative differences of the compared columns."""
    for step in steps:
        for column in COMPARED:
            old, new = before[step].get(column), after[step].get(column)
            if old == new:
                yield 0.0, step, column
            elif old is None or new is None:
                yield float("inf"), step, column
            else:
                yield abs(old - new) / max(abs(old), abs(new)), step, column


def _play(name: str, action: Callable[[], str], report: Report) -> RehearsalStage:
    began, look = time.monotonic(), ""
    try:
        state, text = "ok", action()
    except StageFailure as failure:
        state, text, look = "failed", str(failure), failure.look
    except UserError as error:
        state, text = "failed", str(error).splitlines()[0]
    stage = RehearsalStage(name, state, time.monotonic() - began, text, look)
    report(stage)
    return stage


def _skip(name: str, broken: str, report: Report) -> RehearsalStage:
    stage = RehearsalStage(name, "skipped", 0.0, f"{broken} failed")
    report(stage)
    return stage


def conclusion(stages: list[RehearsalStage]) -> str:
    """The last line."""
    failed = [stage.name for stage in stages if stage.state == "failed"]
    seconds = human_time(sum(stage.seconds for stage in stages))
    if failed:
        return f"{', '.join(failed)} failed, after {seconds}: do not start the full run yet"
    return f"every stage is ok, after {seconds}: the full run can start"
