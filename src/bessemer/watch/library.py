"""The runs of a folder as the page sees them: their columns, their events, and answers that many viewers share."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bessemer.errors import UserError
from bessemer.observe.watched import describe_event
from bessemer.run.directory import Run, RunSummary, summarize
from bessemer.run.journal import Record, last_record, parse_record, to_number
from bessemer.watch.rollup import SAMPLED_BYTES, Floats, Rollup, bin_column, bin_edges, encode

Value = TypeVar("Value")
X_AXES = ("step", "tokens", "time")
JOURNALS = ("steps", "validation", "ranks", "layers", "system")
MAX_BINS, MAX_NAMES = 4000, 256
# Quantities of the heat-maps that are drawn first; bins of them all.
LAYER_QUANTITIES, LAYER_BINS = ("grad_norm", "update_ratio", "dead"), 400
STEP_BYTES = 32 << 20  # of a journal read in one go; the lock is free in between
NEWEST_EVENTS = 20_000
# Events that a report follows: the next report belongs to them.
REPORTED = ("veto", "alarm", "rollback", "trial", "exclude", "lower_lr", "stop", "reopen", "skip", "scene_saved")
POLL_S = 1.0
MOST_RUNS = 2000


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bessemer" / "watch"


class Shared:
    """Values that several viewers ask for within a moment are computed once."""

    def __init__(self, most: int = 64) -> None:
        self._values: dict[Any, tuple[Any, float, Any]] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._guard, self._most = threading.Lock(), most

    def get(self, key: Any, version: Any, compute: Callable[[], Value], seconds: float = math.inf) -> Value:
        """The value of a key, computed if its version changed or it is older than `seconds`."""
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            known = self._values.get(key)
            if known and known[0] == version and time.monotonic() - known[1] < seconds:
                return known[2]
            value = compute()
            with self._guard:
                self._values.pop(key, None)
                self._values[key] = version, time.monotonic(), value
                while len(self._values) > self._most:
                    oldest = next(iter(self._values))
                    del self._values[oldest]
                    self._locks.pop(oldest, None)
        return value


class EventTail:
    """The events of a run, read on from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.events = path, list[Record]()
        self.first = 0  # number of the oldest event that is kept
        self._consumed, self._inode, self._lock = 0, 0, threading.Lock()

    def read(self) -> list[Record]:
        with self._lock, contextlib.suppress(OSError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < self._consumed or status.st_ino != self._inode:
                self.events, self.first, self._consumed, self._inode = [], 0, 0, status.st_ino
            file.seek(self._consumed)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._consumed += len(complete)
            self.events = self.events + [r for line in complete.splitlines() if (r := parse_record(line)) is not None]
            if (excess := len(self.events) - NEWEST_EVENTS) > 0:
                self.events, self.first = self.events[excess:], self.first + excess
        return self.events


class WatchedRun:
    """One run: its roll-ups, opened when they are first asked for, and its events."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.run, self.cache = Run(folder), cache
        self.events = EventTail(self.run.events_path)
        self.shared = Shared()
        self._rollups: dict[str, Rollup] = {}
        self._opening, self._building = threading.Lock(), threading.Lock()

    def rollup(self, journal: str) -> Rollup:
        path = self.run.folder / "metrics" / f"{journal}.jsonl"
        with self._opening:
            if journal not in self._rollups:
                key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
                try:
                    self._rollups[journal] = Rollup(path, self.cache / key)
                except OSError:  # another viewer holds it, or the cache cannot be written
                    self._rollups[journal] = Rollup(path, Path(tempfile.mkdtemp(prefix="bessemer-watch-")))
            return self._rollups[journal]

    def refresh(self, wait: bool = False) -> bool:
        """Read what was appended; True if all is read. A long journal is read in a thread meanwhile, unless `wait`."""
        steps = self.rollup("steps")
        if steps.unread_bytes > SAMPLED_BYTES and not wait:
            if self._building.acquire(blocking=False):
                threading.Thread(target=self._build, args=(steps,), daemon=True).start()
            return False
        self.shared.get("refresh", None, lambda: [self.rollup(journal).refresh() for journal in JOURNALS], POLL_S / 5)
        return True

    def _build(self, rollup: Rollup) -> None:
        try:
            while rollup.unread_bytes and rollup.refresh(STEP_BYTES):
                time.sleep(0.005)  # let requests in
        finally:
            self._building.release()

    @property
    def version(self) -> tuple[int, int]:
        """Generation and rows of the steps, the `generation:row` of the stream."""
        steps = self.rollup("steps")
        return steps.generation, steps.rows

    def names(self) -> dict[str, list[str]]:
        return {journal: self.rollup(journal).names for journal in JOURNALS}

    def x_of_steps(self, axis: str) -> tuple[Floats, Floats]:
        """Steps and their places on the axis, ascending: the step itself, the tokens, or the seconds of training."""

        def compute() -> tuple[Floats, Floats]:
            steps = self.rollup("steps")
            numbers = ascending(steps.column("step"))
            if axis == "step":
                return numbers, numbers
            if axis == "tokens":
                return numbers, ascending(steps.column("tokens"))
            return numbers, np.cumsum(np.nan_to_num(steps.column("step_s"), nan=0.0, posinf=0.0))

        return self.shared.get(("x", axis), self.version, compute)

    def place(self, steps: Floats, axis: str) -> Floats:
        """Where steps lie on the axis."""
        if axis == "step" or not len(steps):
            return steps
        known, places = self.x_of_steps(axis)
        return np.interp(steps, known, places) if len(known) else np.full(len(steps), np.nan)

    def series(self, names: list[str], axis: str, low: float | None, high: float | None, bins: int) -> dict[str, Any]:
        """Columns in bins. A name is `loss`, or of another journal `validation:loss`. Values of a journal share x."""
        key = (tuple(names), axis, low, high, bins)
        sampled = not self.refresh()
        if sampled:
            compute = lambda: self._sampled_series(names, axis, low, high)  # noqa: E731
            return self.shared.get(("sampled", *key), None, compute, 2.0)
        versions = tuple((r.generation, r.rows) for r in map(self.rollup, JOURNALS))
        return self.shared.get(key, versions, lambda: self._series(names, axis, low, high, bins))

    def _series(self, names: list[str], axis: str, low: float | None, high: float | None, bins: int) -> dict[str, Any]:
        groups = []
        for journal in JOURNALS:
            wanted = [name for name in names if (name.partition(":")[0] if ":" in name else "steps") == journal]
            if not wanted or not self.rollup(journal).rows:
                continue
            columns = {name: name.partition(":")[2] or name for name in wanted}
            x, edges, values = self._columns(journal, list(columns.values()), axis, low, high, bins)
            groups.append(
                {
                    "journal": journal, "rows": int(edges[-1] - edges[0]), "x": x,
                    "series": {name: bins_json(values[column], edges) for name, column in columns.items()},
                }
            )  # fmt: skip
        return {"generation": self.version[0], "rows": self.version[1], "sampled": False, "groups": groups}

    def _columns(
        self, journal: str, names: list[str], axis: str, low: float | None, high: float | None, bins: int
    ) -> tuple[list[float], npt.NDArray[np.int64], dict[str, Floats]]:
        """Columns over a part of the axis, with the edges of its bins and their places."""
        rollup = self.rollup(journal)
        with rollup._lock:  # a cut between two columns would mix generations
            x = self.x_of_steps(axis)[1] if journal == "steps" else None
            x = self.place(ascending(rollup.column("step")), axis) if x is None else x
            start = 0 if low is None else max(0, int(np.searchsorted(x, low)) - 1)
            stop = len(x) if high is None else min(len(x), int(np.searchsorted(x, high, "right")) + 1)
            edges = bin_edges(start, stop, bins)
            columns = {name: rollup.column(name, start, stop) for name in names}
        return bin_column(x[start:stop], edges).mean.tolist() if stop > start else [], edges, columns

    def layers(
        self, axis: str, low: float | None, high: float | None, quantities: Sequence[str] = LAYER_QUANTITIES
    ) -> dict[str, Any]:
        """The guard's layer samples: of each quantity a row for each layer. A bin is its highest value, so that one
        bad sample stays visible; `bad` holds the row and bin of values that were not finite."""
        self.refresh()
        rollup = self.rollup("layers")
        key = ("layers", axis, low, high, tuple(quantities))
        version = rollup.generation, rollup.rows
        return self.shared.get(key, version, lambda: self._layers(axis, low, high, quantities))

    def _layers(self, axis: str, low: float | None, high: float | None, quantities: Sequence[str]) -> dict[str, Any]:
        by_quantity: dict[str, list[str]] = {}
        for name in self.rollup("layers").names:
            quantity, _, layer = name.partition(".")
            if layer:
                by_quantity.setdefault(quantity, []).append(name)
        present = [quantity for quantity in quantities if quantity in by_quantity]
        names = [name for quantity in present for name in by_quantity[quantity]]
        x, edges, columns = self._columns("layers", names, axis, low, high, LAYER_BINS)
        maps = {}
        for quantity in present:
            rows = [bin_column(columns[name], edges) for name in by_quantity[quantity]]
            bad = [[i, int(j)] for i, row in enumerate(rows) for j in np.flatnonzero(row.bad)]
            layers = [name.partition(".")[2] for name in by_quantity[quantity]]
            maps[quantity] = {"layers": layers, "rows": [row.high.tolist() for row in rows], "bad": bad}
        return {"x": x, "available": list(by_quantity), "maps": maps}

    def _sampled_series(self, names: list[str], axis: str, low: float | None, high: float | None) -> dict[str, Any]:
        steps = self.rollup("steps")
        records = steps.sample()
        read, size = steps.consumed, max(1, steps.consumed + steps.unread_bytes)
        key = "tokens" if axis == "tokens" else "step"
        x = encode([to_number(record.get(key)) for record in records])
        if axis == "time":  # from the times of the sampled steps
            seconds = np.nan_to_num(encode([to_number(record.get("step_s")) for record in records]), posinf=0.0)
            x = np.cumsum(seconds * np.diff(x, prepend=0.0))
        inside = (x >= (-math.inf if low is None else low)) & (x <= (math.inf if high is None else high))
        edges = np.arange(int(inside.sum()) + 1)
        series = {}
        for name in names:
            if ":" not in name:
                column = encode([to_number(record.get(name)) for record in records])[inside]
                series[name] = bins_json(column, edges)
        group = {"journal": "steps", "rows": len(records), "x": x[inside].tolist(), "series": series}
        return {"generation": 0, "rows": 0, "sampled": True, "read": read / size, "groups": [group]}

    def described_events(self, axis: str = "step") -> dict[str, Any]:
        """The newest events, each with its line, its place on the axis, and the report that was written about it."""
        self.refresh()
        events, first = self.events.read(), self.events.first
        reports: dict[int, str] = {}
        waiting: list[int] = []
        for i, event in enumerate(events):
            if event.get("kind") in REPORTED:
                waiting.append(i)
            elif event.get("kind") == "report":
                reports |= dict.fromkeys([*waiting, i], str(event.get("file", "")))
                waiting = []
        places = self.place(encode([to_number(event.get("step")) for event in events]), axis).tolist()
        described = [
            {
                **_short(event),
                "line": describe_event(event),
                "place": place,
                **({"report": reports[i]} if i in reports else {}),
            }
            for i, (event, place) in enumerate(zip(events, places, strict=True))
        ]
        return {"count": first + len(events), "events": described}

    def pulse(self) -> dict[str, Any]:
        """What the stream sends: state, newest numbers, and how many rows and events there are. At most once a second,
        whatever the number of viewers."""

        def compute() -> dict[str, Any]:
            done = self.refresh()
            generation, rows = self.version
            events = self.events.read()
            return {
                "generation": generation, "rows": rows, "events": self.events.first + len(events), "reading": not done,
                "validations": self.rollup("validation").rows, "summary": summary_json(summarize(self.run)),
                "last": last_record(self.run.steps_path), "system": last_record(self.run.system_path),
            }  # fmt: skip

        return self.shared.get("pulse", None, compute, POLL_S * 0.9)

    def close(self) -> None:
        for rollup in self._rollups.values():
            rollup.close()


class Library:
    """The runs of one folder."""

    def __init__(self, root: Path, cache: Path | None = None) -> None:
        self.root, self.cache = root.resolve(), cache or cache_folder()
        self.shared, self._runs, self._lock = Shared(MOST_RUNS), dict[str, WatchedRun](), threading.Lock()

    def summaries(self) -> list[dict[str, Any]]:
        """All runs, newest first. Runs behind links that lead out of the folder are left out."""

        def compute() -> list[dict[str, Any]]:
            paths = [path.parent for path in self.root.glob("*/events.jsonl") if self._inside(path)]
            summaries = [summary for path in paths[:MOST_RUNS] if (summary := self._summary(path)) is not None]
            return sorted(summaries, key=lambda summary: (-summary["newest"], summary["name"]))

        return self.shared.get("list", None, compute, 2 * POLL_S)

    def _summary(self, folder: Path) -> dict[str, Any] | None:
        """The summary of a run, computed again if its files changed, or if its process may have died."""
        run = Run(folder)
        try:
            files = (run.events_path, run.steps_path, run.validation_path, folder / "owner.json")
            states = [path.stat() for path in files if path.exists()]
            version = tuple((state.st_size, state.st_mtime_ns) for state in states)
            seconds = math.inf if not (folder / "owner.json").exists() else 2 * POLL_S
            return self.shared.get(folder.name, version, lambda: summary_json(summarize(run)), seconds)
        except OSError:  # no permission, a stale mount, or just deleted
            return None

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)

    def run(self, name: str) -> WatchedRun:
        """A run by the name of its folder. KeyError for any other name: nothing outside the folder is opened."""
        folder = self.root / name
        if not name or name != folder.name or name in (".", "..") or "\0" in name:
            raise KeyError(name)
        if not self._inside(folder) or not (folder / "events.jsonl").is_file():
            raise KeyError(name)
        with self._lock:
            if name not in self._runs:
                self._runs[name] = WatchedRun(folder, self.cache)
            return self._runs[name]

    def close(self) -> None:
        for run in self._runs.values():
            run.close()


def open_library(folder: Path) -> tuple[Library, str]:
    """The runs in a folder; of the folder of one run, all beside it, and the run's name."""
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {problem}; name the folder that holds the runs, or one run")
    if (folder / "events.jsonl").is_file():
        resolved = folder.resolve()
        return Library(resolved.parent), resolved.name
    return Library(folder), ""


def ascending(values: Floats) -> Floats:
    """Missing and falling values take the highest one before."""
    return np.maximum.accumulate(np.where(np.isfinite(values), values, 0.0)) if len(values) else values


def bins_json(column: Floats, edges: Any) -> dict[str, Any]:
    """Bins as lists. Where each holds one row, its minimum and maximum are left out."""
    bins = bin_column(column, edges)
    answer: dict[str, Any] = {"mean": bins.mean.tolist()}
    if len(column) > len(bins.mean):
        answer |= {"low": bins.low.tolist(), "high": bins.high.tolist()}
    if bins.bad.any():
        answer["bad"] = bins.bad.tolist()
    return answer


def _short(event: Record) -> Record:
    """An event without what makes it long: the page shows details from the report."""
    return {key: value for key, value in event.items() if key not in ("statistics", "evidence", "changes")}


def summary_json(summary: RunSummary) -> dict[str, Any]:
    """JSON has no infinity: an unknown number is null."""
    values = asdict(summary)
    del values["folder"]  # a path of this machine
    values["newest"] = round(time.time() - values.pop("age_s"), 1)
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
