"""Finding: what is wrong and what to do. Guard, trial and diagnose all speak it.

Run: one directory, one writer, many readers.

    runs/NAME/
      spec.yaml  plan.json           what was asked, what was decided
      metrics/steps.jsonl            one record a step; metrics/validation.jsonl one an evaluation
      metrics/ranks.jsonl            of several processes every few steps how each keeps up; layout.json what each holds
      events.jsonl                   every decision as it was taken
      checkpoints/  reports/  logs/rank-N.log

The run's state is not stored, it follows from the last life-cycle event and whether the owner is alive: a killed
process cannot lie about itself.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.run.journal import Journal, Record, last_record, last_records, number, read_records
from bessemer.run.lock import Lock, is_alive, read_owner
from bessemer.run.snapshot import Snapshot, put_back, put_back_start
from bessemer.storage import write_atomic


@dataclass(frozen=True)
class Finding:
    """A symptom with its evidence. `confidence` is between 0 and 1; `cause` may be empty when it is not known."""

    symptom: str
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    confidence: float = 0.0
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


MEAN_OF = 32  # steps over which a shown loss is averaged
LAYOUT = "layout.json"  # of a run of several processes
LIFE = {"started": "running"} | {kind: kind for kind in ("finished", "failed", "interrupted", "stopped")}


def _life(event: Record) -> str | None:
    """The state that an event puts its run into, if it is one of those."""
    kind = event.get("kind")
    return LIFE.get(kind) if isinstance(kind, str) else None


def _step(record: Record) -> float:
    step = number(record.get("step"))
    return math.inf if step is None else step


class Run:
    """A run's directory, for reading. RunWriter is the writing end."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def existing(cls, folder: str | Path) -> Run:
        run = cls(folder)
        if not (run.folder / "events.jsonl").exists():
            raise UserError(f"{folder}: not a run (no events.jsonl); `bessemer runs` lists the runs here")
        return run

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def steps_path(self) -> Path:
        return self.folder / "metrics" / "steps.jsonl"

    @property
    def validation_path(self) -> Path:
        return self.folder / "metrics" / "validation.jsonl"

    @property
    def ranks_path(self) -> Path:
        return self.folder / "metrics" / "ranks.jsonl"

    @property
    def events_path(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def metrics(self) -> Iterator[Record]:
        """Per-step records, every step once, in order."""
        return read_records(self.steps_path)

    def validations(self) -> Iterator[Record]:
        return read_records(self.validation_path)

    def ranks(self) -> Iterator[Record]:
        """How each of several processes keeps up, every few steps."""
        return read_records(self.ranks_path)

    def events(self, kind: str | None = None) -> Iterator[Record]:
        return (event for event in read_records(self.events_path) if kind is None or event.get("kind") == kind)

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted, stopped (by the guard) or new."""
        state, told = "new", 0.0
        for event in self.events():
            if (life := _life(event)) is not None:
                state, told = life, number(event.get("time")) or 0.0
        owner = read_owner(self.folder)
        if owner is not None and is_alive(owner, self.folder):
            # Until it speaks, a new writer is preparing; the last word is still that of the start before.
            earlier = told + 0.001 <= owner.since  # events round their time to milliseconds
            return "running" if state == "running" or earlier else state
        # Killed: no last word in the events, or not even a first one.
        return "interrupted" if state == "running" or (state == "new" and owner is not None) else state


class RunWriter(Run):
    """The writing end of a run: holds its lock until close().

    A record that the disk refuses waits in memory (`unwritten` says why) and is written when there is room; a save
    fails until then.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.lock = Lock(self.folder)
        self.created = not self.folder.exists()
        try:
            for name in ("metrics", "checkpoints", "reports", "logs"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
            self._steps = Journal(self.steps_path)
            self._validation = Journal(self.validation_path)
            self._events = Journal(self.events_path)
            self._ranks = Journal(self.ranks_path) if self.ranks_path.exists() else None
        except OSError as error:
            self.lock.release()
            place = error.filename or self.folder
            if isinstance(error, IsADirectoryError):
                raise UserError(f"{place}: is a folder, where the run keeps a file; move it away") from error
            raise UserError(
                f"{place}: cannot be written: {error.strerror}; "
                "set `runs` in the spec to a folder of yours with room on its disk"
            ) from error

    @property
    def _journals(self) -> dict[str, Journal]:
        """By their path in the run's folder."""
        journals = [self._steps, self._validation, self._events, *([self._ranks] if self._ranks else [])]
        return {self._key(journal.path): journal for journal in journals}

    def _append(self, journal: Journal, record: Record) -> None:
        with contextlib.suppress(OSError):  # it waits in the journal, and `unwritten` says so
            journal.append(record)

    @property
    def unwritten(self) -> str:
        """Why records wait in memory; empty if none does."""
        return next((journal.fault for journal in self._journals.values() if journal.fault), "")

    def step(self, record: Record) -> None:
        self._append(self._steps, record)

    def validation(self, record: Record) -> None:
        self._append(self._validation, record)

    def rank_numbers(self, record: Record) -> None:
        self._ranks = self._ranks or Journal(self.ranks_path)  # most runs are of one process, and have none
        self._append(self._ranks, record)

    def event(self, kind: str, **details: Any) -> Record:
        """Write down a decision, with the time."""
        record = {"kind": kind, "time": round(time.time(), 3), **details}
        self._append(self._events, record)
        return record

    def cut_after(self, step: int) -> int:
        """Drop metrics of steps the checkpoint at `step` does not hold (it holds steps < `step`); how many."""
        removed = self._steps.cut(lambda record: _step(record) < step)
        self._validation.cut(lambda record: step > 0 and _step(record) <= step)
        if self._ranks:
            self._ranks.cut(lambda record: _step(record) < step)
        self._tell_cut(step, removed)
        return removed

    def _tell_cut(self, step: int, removed: int) -> None:
        if removed:
            reason = "they are trained again from the checkpoint"
            self.event("metrics_cut", from_step=step, steps=removed, reason=reason)

    def snapshot(self) -> Snapshot:
        """What a checkpoint that is saved now keeps of this run."""
        return Snapshot(self.folder, {name: (journal, journal.size_bytes) for name, journal in self._journals.items()})

    def go_back(self, step: int, saved: Mapping[str, bytes]) -> list[Record]:
        """Make the metrics those of a checkpoint at `step`, which kept the journals `saved`, and the events begin as
        they did. A journal that had lost or altered records is written again from them; the events that tell of it."""
        if not saved:
            self.cut_after(step)
            return self._tell_missing(step)
        removed = sum(_step(record) >= step for record in self.metrics())
        repairs = []
        if self._ranks is None and self._key(self.ranks_path) in saved:
            self._ranks = Journal(self.ranks_path)
        for name, journal in self._journals.items():
            restore = put_back_start if journal is self._events else put_back
            if fault := restore(journal, saved.get(name, b"")):
                repairs.append((name, fault))
        self._tell_cut(step, removed)
        return [
            self.event("records_repaired", file=name, step=step, reason=f"{self.folder / name}: {fault}; put back")
            for name, fault in repairs
        ]

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _tell_missing(self, step: int) -> list[Record]:
        """A checkpoint of an earlier version has no copy of the metrics: what is missing can only be told."""
        missing = step - len({record.get("step") for record in self.metrics()})
        if missing <= 0:
            return []
        reason = f"{self.steps_path}: {missing:,} of {step:,} steps have no record, and the checkpoint has no copy"
        return [self.event("records_missing", file=self._key(self.steps_path), step=step, reason=reason)]

    def write_file(self, name: str, text: str) -> None:
        write_atomic(self.folder / name, text)

    def sync(self) -> None:
        """Make everything written so far survive a power cut. Raises OSError if a record cannot be written."""
        for journal in self._journals.values():
            journal.sync()

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self.lock.release()

    def remove(self) -> None:
        """Delete the folder of a run that was refused before it began, and give the lock back."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunReader(RunWriter):
    """For the processes beside the first, which alone writes: the same calls, and nothing is written."""

    def __init__(self, folder: str | Path) -> None:
        Run.__init__(self, folder)
        self.lock = Lock(self.folder)
        self.created = False

    def step(self, record: Record) -> None: ...
    def validation(self, record: Record) -> None: ...
    def rank_numbers(self, record: Record) -> None: ...
    def write_file(self, name: str, text: str) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...
    def remove(self) -> None: ...

    @property
    def unwritten(self) -> str:
        return ""

    def event(self, kind: str, **details: Any) -> Record:
        return {"kind": kind, "time": round(time.time(), 3), **details}

    def cut_after(self, step: int) -> int:
        return 0

    def snapshot(self) -> Snapshot:
        return Snapshot(self.folder, {})

    def go_back(self, step: int, saved: Mapping[str, bytes]) -> list[Record]:
        return []


@dataclass(frozen=True)
class RunSummary:
    """One line of `bessemer runs`. `step` counts steps done; a loss may be NaN."""

    name: str
    folder: str
    state: str
    step: int | None
    total_steps: int | None
    loss: float | None  # of the last step
    mean_loss: float | None  # of the last MEAN_OF steps, as the progress of a run shows it
    validation_loss: float | None
    age_s: float
    reason: str


def mean_loss(records: Sequence[Record]) -> float | None:
    """Of the steps that were accepted, or of all if none was; None without a loss."""
    accepted = [record for record in records if record.get("veto") is None] or records
    losses = [loss for record in accepted if (loss := number(record.get("loss"))) is not None]
    return sum(losses) / len(losses) if losses else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None


def summarize(run: Run) -> RunSummary:
    """How a run stands, from whatever of its records can be read."""
    recent, validation = last_records(run.steps_path, MEAN_OF), last_record(run.validation_path) or {}
    last = recent[-1] if recent else {}
    total, reason, newest = None, "", 0.0
    for event in run.events():
        newest = max(newest, number(event.get("time")) or 0.0)
        total = _whole(number(event.get("total_steps"))) or total
        if _life(event) is not None or event.get("kind") == "refused":
            reason = str(event.get("reason", ""))
    newest = newest or run.events_path.stat().st_mtime
    if run.steps_path.exists():
        newest = max(newest, run.steps_path.stat().st_mtime)
    step = _whole(number(last.get("step")))
    return RunSummary(
        name=run.name,
        folder=str(run.folder),
        state=run.state,
        step=None if step is None else step + 1,
        total_steps=total,
        loss=number(last.get("loss")),
        mean_loss=mean_loss(recent),
        validation_loss=number(validation.get("loss")),
        age_s=max(0.0, time.time() - newest),
        reason=reason,
    )


def _summary(run: Run) -> RunSummary:
    try:
        return summarize(run)
    except OSError as error:  # no permission, a stale mount: the other runs are still worth listing
        reason = error.strerror or str(error)
        return RunSummary(run.name, str(run.folder), "unreadable", None, None, None, None, None, math.inf, reason)


def list_runs(folder: str | Path) -> list[RunSummary]:
    """Every run under a folder, newest first. One that is damaged or cannot be read is listed as far as it goes."""
    root = Path(folder)
    runs = [Run(path.parent) for path in root.glob("*/events.jsonl")] if root.is_dir() else []
    return sorted((_summary(run) for run in runs), key=lambda summary: (summary.age_s, summary.name))
