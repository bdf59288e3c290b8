"""Forwarder: sends a run's journals to one tracker, while the run trains or after it.

It runs outside of the training process and only reads files, so that no tracker slows or stops a run. What was
delivered is a position in `trackers/NAME.json` of the run folder, written after the tracker took a batch: after a
failure, a kill or a lost network the same batch is sent again, and none is skipped.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO, Any, Protocol

from bessemer.errors import UserError
from bessemer.observe.tail import JournalTail
from bessemer.observe.trackers.tracker import RunInfo, Tracker, make_row, make_tracker, read_config
from bessemer.observe.watched import describe_event, has_ended
from bessemer.run.directory import Run
from bessemer.run.journal import Record, to_number
from bessemer.spec.observers import ENDS, TrackerSpec
from bessemer.storage import backoff_s, lock_file, write_atomic

FOLDER = "trackers"  # in the run folder
RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
ROWS = 1000  # in a batch
NOTED = ("started", "veto", "rollback", "trial", "alarm", "control", "died", *ENDS)  # events that are sent as text


class Observer(Protocol):
    """What follows a run: a Forwarder, or the alerts."""

    name: str
    interval_s: float

    def acquire(self) -> bool: ...
    def forward(self) -> int: ...
    def fail(self) -> None: ...
    def finish(self, state: str) -> None: ...
    def release(self) -> None: ...


class Forwarder:
    """Sends the records of one run to one tracker. `make` builds the tracker from its name."""

    def __init__(self, run: Run, spec: TrackerSpec, make: Callable[[str], Tracker] = make_tracker) -> None:
        self.run, self.spec, self._make = run, spec, make
        self.name, self.interval_s = spec.to, spec.every
        self.path = run.folder / FOLDER / f"{spec.to}.json"
        self._tracker: Tracker | None = None
        self._lock: IO[str] | None = None
        self._load()

    def _load(self) -> None:
        saved = json.loads(self.path.read_text()) if self.path.exists() else {}
        marks = saved.get("marks", {})
        self.steps = JournalTail(self.run.steps_path, marks.get("steps"))
        self.validation = JournalTail(self.run.validation_path, marks.get("validation"))
        self.events = JournalTail(self.run.events_path, marks.get("events"))
        self.state: dict[str, Any] = saved.get("state", {})  # of the tracker, such as the run's id
        self.clock: float = saved.get("clock", 0.0)  # time of the next step: steps have durations, events have times
        self._ended: str = saved.get("ended", "")
        self._cut: int | None = saved.get("cut")  # a rollback that the tracker has not heard of

    def _save(self) -> None:
        tails = {"steps": self.steps, "validation": self.validation, "events": self.events}
        content = {
            "marks": {name: tail.marks for name, tail in tails.items()}, "state": self.state, "clock": self.clock,
            "cut": self._cut, "ended": self._ended,
        }  # fmt: skip
        write_atomic(self.path, json.dumps(content), durable=False)

    def acquire(self) -> bool:
        """Become the only process that forwards this run to this tracker; False if another one does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self.path.with_suffix(".lock").open("w")
        if lock_file(self._lock, wait=False):
            self._load()  # another process may have moved the position
            return True
        self._lock.close()
        return False

    def forward(self) -> int:
        """Send what is new; the number of rows. Raises what the tracker raises; then all of it is sent again."""
        if self.steps.was_cut():
            self._cut = min(self.steps.steps, self.steps.steps if self._cut is None else self._cut)
            step = self._cut
            self.validation.go_to(lambda record: (to_number(record.get("step")) or 0) < step)
        self.validation.was_cut()
        self.events.was_cut()
        events = self.events.read()
        if not events and not self.steps.unread and not self.validation.unread and self._cut is None:
            return 0
        tracker, self._ended = self._open(), ""
        if self._cut is not None:
            tracker.cut(self._cut)
            self._cut = None
            self._delivered(tracker)
        sent = self._send_rows(tracker, self.steps, "train", start_times(events))
        sent += self._send_rows(tracker, self.validation, "validation", {})
        while events:
            for event in events:
                self._send_event(tracker, event)
            self.events.advance()
            self._delivered(tracker)
            events = self.events.read()
        return sent

    def _open(self) -> Tracker:
        if self._tracker is None:
            tracker = self._make(self.spec.to)
            tracker.check(self.spec)
            tracker.open(RunInfo(self.run, self.spec, read_config(self.run), self.state))
            self._tracker = tracker
            self._save()  # the id that the run has there
        return self._tracker

    def _delivered(self, tracker: Tracker) -> None:
        tracker.flush()
        self._save()

    def _send_rows(self, tracker: Tracker, tail: JournalTail, prefix: str, starts: dict[int, float]) -> int:
        sent = 0
        while records := tail.read():
            rows, clock = [], self.clock
            for record in records:
                step = to_number(record.get("step"))
                clock = max(clock, starts.get(int(step), 0.0) if step is not None else 0.0)
                clock += to_number(record.get("step_s")) or 0.0
                if row := make_row(record, prefix, round(clock, 3)):
                    rows.append(row)
            for i in range(0, len(rows), ROWS):
                tracker.rows(rows[i : i + ROWS])
            tail.advance()
            self.clock = clock
            self._delivered(tracker)
            sent += len(rows)
        return sent

    def _send_event(self, tracker: Tracker, event: Record) -> None:
        kind, step = str(event.get("kind")), int(to_number(event.get("step")) or 0)
        if kind == "started":
            self.clock = max(self.clock, to_number(event.get("time")) or 0.0)
        if kind == "samples":
            tracker.text("sample", step, f"{event.get('prompt', '')}{event.get('text', '')}")
        elif kind == "report":
            tracker.text(kind, step, describe_event(event))
            for path in sorted(self.run.folder.glob(f"reports/{Path(str(event.get('file'))).stem}.*")):
                tracker.report(path)
        elif kind == "saved":
            tracker.checkpoint(step, self.run.checkpoints / str(event.get("checkpoint")))
        elif kind in NOTED:
            tracker.text(kind, step, describe_event(event))

    def fail(self) -> None:
        """Drop the tracker after an error; the next call opens it again, at the saved position."""
        tracker, self._tracker = self._tracker, None
        if tracker:
            with contextlib.suppress(Exception):  # it has failed already, and this error adds nothing
                tracker.close("")
        self._load()

    def finish(self, state: str) -> None:
        """Close the tracker after the last record; `state` is how the run ended."""
        if self._tracker or self._ended != state:
            self._open().close(state)
            self._tracker, self._ended = None, state
            self._save()

    def release(self) -> None:
        if self._lock:
            self._lock.close()


def start_times(events: list[Record]) -> dict[int, float]:
    """Times at which the run started, by the first step of the start."""
    return {
        int(to_number(event.get("step")) or 0): to_number(event.get("time")) or 0.0
        for event in events
        if event.get("kind") == "started"
    }


@dataclass
class Following:
    """How the forwarding of one observer goes: what its loop prints and returns."""

    sent: int = 0
    error: str = ""


def follow(observer: Observer, run: Run, patience_s: float, stop: Event, say: Callable[[str], None]) -> Following:
    """Forward until the run has ended and all is delivered. An error is tried again with growing pauses; after the
    run's end for `patience_s`."""
    result, attempt, ended_s = Following(), 0, 0.0
    while not stop.is_set():
        state = has_ended(run)  # before reading: what was written until now is then read
        ended_s = ended_s or (time.monotonic() if state else 0.0)
        if not state:
            ended_s = 0.0
        try:
            result.sent += observer.forward()
            if attempt:
                say(f"{observer.name}: delivered again after {attempt} failed attempts")
            if state:
                observer.finish(state)
                return result
            result.error, attempt, pause_s = "", 0, observer.interval_s
        except UserError:
            raise
        except Exception as error:
            observer.fail()
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            pause_s = backoff_s(attempt, RETRY_S, LONGEST_RETRY_S)
            if reason != result.error or not attempt:
                say(f"{observer.name}: {reason}; trying again")
            result.error, attempt = reason, attempt + 1
            if state and time.monotonic() - ended_s > patience_s:
                result.error = f"{observer.name}: {reason}; nothing is lost: bessemer watch forward {run.folder}"
                return result
        stop.wait(pause_s)
    return result
