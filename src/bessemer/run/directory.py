"""The run folder: one writer, many readers.

    runs/NAME/
      spec.yaml  plan.json           the spec and the planner's decisions
      metrics/steps.jsonl            one record per step
      metrics/validation.jsonl       one record per evaluation
      metrics/ranks.jsonl            with several processes: the speed of each, every few steps
      metrics/layers.jsonl           one record per layer sample of the guard
      metrics/system.jsonl           readings of the machine, every few seconds
      layout.json                    with several processes: what each holds
      events.jsonl                   every decision, when it was made
      control/                       requests to the live run, see control.py
      profiles/                      traces of steps that were profiled by request
      checkpoints/  reports/  logs/rank-N.log

The state of a run is not stored: it follows from the last life-cycle event and from whether the owner is alive, so that
it is right even after a kill.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.run.journal import Journal, Record, find_end, last_record, last_records, read_records, to_number
from bessemer.run.lock import Lock, is_alive, read_owner
from bessemer.run.snapshot import Snapshot, restore_journal, restore_journal_start
from bessemer.storage import write_atomic

LOSS_WINDOW = 32  # steps over which a displayed loss is averaged
LAYOUT = "layout.json"
FORECAST = "forecast.json"  # of the final loss, while the run trains
STATE_AFTER = {"started": "running"} | {kind: kind for kind in ("finished", "failed", "interrupted", "stopped")}


def _state_after(event: Record) -> str | None:
    """The state of the run after a life-cycle event; None for other events."""
    kind = event.get("kind")
    return STATE_AFTER.get(kind) if isinstance(kind, str) else None


def _step(record: Record) -> float:
    step = to_number(record.get("step"))
    return math.inf if step is None else step


class Run:
    """A run folder, for reading. RunWriter writes it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def existing(cls, folder: str | Path) -> Run:
        run = cls(folder)
        if not (run.folder / "events.jsonl").exists():
            raise UserError(f"{folder}: not a run (no events.jsonl); `bessemer runs` lists runs")
        return run

    @classmethod
    def open(cls, run: str | Path, runs: str | Path = "runs") -> Run:
        """A run by its folder, or by its name in `runs`."""
        for folder in (Path(run), Path(runs) / run):
            if (folder / "events.jsonl").exists():
                return cls(folder)
        raise UserError(f"{run}: no such run, neither as a folder nor in {runs}/; `bessemer runs` lists runs")

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
    def layers_path(self) -> Path:
        return self.folder / "metrics" / "layers.jsonl"

    @property
    def system_path(self) -> Path:
        return self.folder / "metrics" / "system.jsonl"

    @property
    def profiles(self) -> Path:
        return self.folder / "profiles"

    @property
    def events_path(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def metrics(self) -> Iterator[Record]:
        """Records of steps, each step once, in order."""
        return read_records(self.steps_path)

    def validations(self) -> Iterator[Record]:
        return read_records(self.validation_path)

    def ranks(self) -> Iterator[Record]:
        """Records of the speed of each process, every few steps."""
        return read_records(self.ranks_path)

    def events(self, kind: str | None = None) -> Iterator[Record]:
        return (event for event in read_records(self.events_path) if kind is None or event.get("kind") == kind)

    def columns(self, *names: str) -> dict[str, list[Any]]:
        """The records of steps as columns of one length, for tables and plots. None where a step lacks the metric.
        Without names: every metric."""
        records = list(self.metrics())
        known = dict.fromkeys(key for record in records for key in record)
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"{unknown[0]}: no such metric in {self.folder}; there are {', '.join(known) or 'none'}")
        return {name: [record.get(name) for record in records] for name in names or known}

    @property
    def plan(self) -> dict[str, dict[str, Any]]:
        """The planner's decisions by key, each with value, reason, source and basis. Empty before the first start."""
        path = self.folder / "plan.json"
        decisions = json.loads(path.read_text())["decisions"] if path.exists() else []
        return {decision["key"]: decision for decision in decisions}

    @property
    def complete_checkpoints(self) -> list[Path]:
        """The folders of complete checkpoints, oldest first."""
        manifests = self.checkpoints.glob("step-*/manifest.json")
        return sorted((path.parent for path in manifests), key=lambda folder: folder.name)

    @property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Results of `bessemer evaluate` by checkpoint, in the shape of results.json."""
        paths = sorted(self.folder.glob("evaluations/*/results.json"))
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted, stopped (by the guard) or new."""
        state, event_s = "new", 0.0
        for event in self.events():
            if (new_state := _state_after(event)) is not None:
                state, event_s = new_state, to_number(event.get("time")) or 0.0
        owner = read_owner(self.folder)
        if owner is not None and is_alive(owner, self.folder):
            # A new writer is preparing until its first event; the last event is still of the previous start.
            earlier = event_s + 0.001 <= owner.since  # events round their time to milliseconds
            return "running" if state == "running" or earlier else state
        # Killed: the last life-cycle event is missing, or even the first.
        return "interrupted" if state == "running" or (state == "new" and owner is not None) else state


class RunWriter(Run):
    """Writes a run folder and holds its lock until close().

    Records that the disk refuses wait in memory (`unwritten` gives the reason) until they can be written; saves fail
    until then.
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
            self._layers, self._system = Journal(self.layers_path), Journal(self.system_path)
        except OSError as error:
            self.lock.release()
            path = error.filename or self.folder
            if isinstance(error, IsADirectoryError):
                raise UserError(f"{path}: is a folder, but the run needs a file of this name; move it away") from error
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; set `runs` in the spec to a writable folder"
            ) from error

    @property
    def _journals(self) -> dict[str, Journal]:
        """Journals that checkpoints hold a copy of, by their path in the run folder."""
        journals = [self._steps, self._validation, self._events, *([self._ranks] if self._ranks else [])]
        return {self._key(journal.path): journal for journal in journals}

    @property
    def _all_journals(self) -> list[Journal]:
        return [*self._journals.values(), self._layers, self._system]

    def _append(self, journal: Journal, record: Record) -> None:
        with contextlib.suppress(OSError):  # the record waits in the journal; see `unwritten`
            journal.append(record)

    @property
    def unwritten(self) -> str:
        """Why records wait in memory; empty if none do."""
        return next((journal.fault for journal in self._all_journals if journal.fault), "")

    def step(self, record: Record) -> None:
        self._append(self._steps, record)

    def validation(self, record: Record) -> None:
        self._append(self._validation, record)

    def rank_record(self, record: Record) -> None:
        self._ranks = self._ranks or Journal(self.ranks_path)  # runs of one process have none
        self._append(self._ranks, record)

    def layer_record(self, record: Record) -> None:
        self._append(self._layers, record)

    def system_record(self, record: Record) -> None:
        """Readings of the machine. They stay when the run goes back: the time was spent."""
        self._append(self._system, record)

    def event(self, kind: str, **details: Any) -> Record:
        """Record an event with the current time."""
        record = {"kind": kind, "time": round(time.time(), 3), **details}
        self._append(self._events, record)
        return record

    def remove_metrics_from(self, step: int) -> int:
        """Remove metrics of steps from `step` on, which a checkpoint at `step` does not contain; their number."""
        removed = self._steps.cut(lambda record: _step(record) < step)
        self._validation.cut(lambda record: step > 0 and _step(record) <= step)
        if self._ranks:
            self._ranks.cut(lambda record: _step(record) < step)
        self._layers.cut(lambda record: _step(record) < step)
        self._log_cut(step, removed)
        return removed

    def _log_cut(self, step: int, removed: int) -> None:
        if removed:
            self.event(
                "metrics_cut", from_step=step, steps=removed, reason="they are trained again from the checkpoint"
            )

    def snapshot(self) -> Snapshot:
        """The snapshot of this run for a checkpoint that is saved now."""
        return Snapshot(self.folder, {name: (journal, journal.size_bytes) for name, journal in self._journals.items()})

    def go_back(self, step: int, saved: Mapping[str, bytes]) -> list[Record]:
        """Restore metrics and the start of the events to a checkpoint at `step`, whose snapshot holds `saved`.
        Journals with lost or altered records are rewritten; returns the events about them."""
        if not saved:
            self.remove_metrics_from(step)
            return self._log_missing(step)
        removed = find_end(self.steps_path, lambda record: _step(record) < step)[1]
        self._layers.cut(lambda record: _step(record) < step)
        repairs = []
        if self._ranks is None and self._key(self.ranks_path) in saved:
            self._ranks = Journal(self.ranks_path)
        for name, journal in self._journals.items():
            restore = restore_journal_start if journal is self._events else restore_journal
            if fault := restore(journal, saved.get(name, b"")):
                repairs.append((name, fault))
        self._log_cut(step, removed)
        return [
            self.event("records_repaired", file=name, step=step, reason=f"{self.folder / name}: {fault}; restored")
            for name, fault in repairs
        ]

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _log_missing(self, step: int) -> list[Record]:
        """A checkpoint of an earlier version has no copy of the metrics, so missing records can only be reported."""
        missing = step - len({record.get("step") for record in self.metrics()})
        if missing <= 0:
            return []
        reason = f"{self.steps_path}: {missing:,} of {step:,} steps have no record, and the checkpoint has no copy"
        return [self.event("records_missing", file=self._key(self.steps_path), step=step, reason=reason)]

    def write_file(self, name: str, text: str) -> None:
        write_atomic(self.folder / name, text)

    def sync(self) -> None:
        """Make all records survive a power cut. OSError if a record cannot be written."""
        for journal in self._all_journals:
            journal.sync()

    def close(self) -> None:
        for journal in self._all_journals:
            journal.close()
        self.lock.release()

    def remove(self) -> None:
        """Delete the folder of a run that was refused before it started, and release the lock."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunReader(RunWriter):
    """RunWriter for ranks other than 0: the same methods, but nothing is written."""

    def __init__(self, folder: str | Path) -> None:
        Run.__init__(self, folder)
        self.lock = Lock(self.folder)
        self.created = False

    def step(self, record: Record) -> None: ...
    def validation(self, record: Record) -> None: ...
    def rank_record(self, record: Record) -> None: ...
    def layer_record(self, record: Record) -> None: ...
    def system_record(self, record: Record) -> None: ...
    def write_file(self, name: str, text: str) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...
    def remove(self) -> None: ...

    @property
    def unwritten(self) -> str:
        return ""

    def event(self, kind: str, **details: Any) -> Record:
        return {"kind": kind, "time": round(time.time(), 3), **details}

    def remove_metrics_from(self, step: int) -> int:
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
    mean_loss: float | None  # of the last MEAN_OF steps
    validation_loss: float | None
    age_s: float
    reason: str
    forecast: dict[str, float] | None = None  # final loss with its interval, of a run that is not over


def mean_loss(records: Sequence[Record]) -> float | None:
    """Mean loss of the accepted steps, or of all if none was accepted; None without a loss."""
    accepted = [record for record in records if record.get("veto") is None] or records
    losses = [loss for record in accepted if (loss := to_number(record.get("loss"))) is not None]
    return sum(losses) / len(losses) if losses else None


def _to_int(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None


def summarize(run: Run) -> RunSummary:
    """The summary of a run, from the records that can be read."""
    recent, validation = last_records(run.steps_path, LOSS_WINDOW), last_record(run.validation_path) or {}
    last = recent[-1] if recent else {}
    total, reason, newest = None, "", 0.0
    for event in run.events():
        newest = max(newest, to_number(event.get("time")) or 0.0)
        total = _to_int(to_number(event.get("total_steps"))) or total
        if _state_after(event) is not None or event.get("kind") == "refused":
            reason = str(event.get("reason", ""))
    newest = newest or run.events_path.stat().st_mtime
    if run.steps_path.exists():
        newest = max(newest, run.steps_path.stat().st_mtime)
    step = _to_int(to_number(last.get("step")))
    return RunSummary(
        name=run.name,
        folder=str(run.folder),
        state=run.state,
        step=None if step is None else step + 1,
        total_steps=total,
        loss=to_number(last.get("loss")),
        mean_loss=mean_loss(recent),
        validation_loss=to_number(validation.get("loss")),
        age_s=max(0.0, time.time() - newest),
        reason=reason,
        forecast=None if run.state == "finished" else _read_forecast(run),
    )


def _read_forecast(run: Run) -> dict[str, float] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or of another version
        numbers = json.loads((run.folder / FORECAST).read_text())
        return {key: float(numbers[key]) for key in ("final", "low", "high")}
    return None


def _summarize_safely(run: Run) -> RunSummary:
    try:
        return summarize(run)
    except OSError as error:  # no permission or a stale mount: still list the other runs
        reason = error.strerror or str(error)
        return RunSummary(run.name, str(run.folder), "unreadable", None, None, None, None, None, math.inf, reason)


def list_runs(folder: str | Path) -> list[RunSummary]:
    """All runs in a folder, newest first. A damaged or unreadable run is listed with what is known of it."""
    root = Path(folder)
    runs = [Run(path.parent) for path in root.glob("*/events.jsonl")] if root.is_dir() else []
    return sorted((_summarize_safely(run) for run in runs), key=lambda summary: (summary.age_s, summary.name))
