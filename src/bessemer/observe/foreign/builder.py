"""Collects the points of a foreign run and makes its series: one value a step, restarts resolved, names and units set.

A run that is started again from a checkpoint writes some steps twice. The later start is what went into the weights, so
all points of those steps that were written before it are dropped. Costs 24 bytes a point.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.observe.foreign.names import standard_names, unit_factor
from bessemer.observe.foreign.series import ForeignRun, Series

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MOST_RESTARTS = 0.05  # share of the points of a series that may go back in steps; more is a file out of order
MEANS = ("loss", "step_s", "tokens_per_s", "reward")  # metrics that frameworks average since the last line


@dataclass
class _Column:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lines: array[int] = field(default_factory=lambda: array("q"))


class StepCounter:
    """Steps since the start, for sources whose steps begin again in each epoch."""

    def __init__(self) -> None:
        self.counts_on = False  # whether steps did begin again
        self._offsets: dict[int, int] = {}
        self._epoch, self._step, self._interval = 0, -1, 1

    def __call__(self, epoch: float | None, step: int, per_epoch: int | None = None) -> int:
        number = self._epoch if epoch is None or not np.isfinite(epoch) else int(epoch)
        if number not in self._offsets:
            offset = self._offsets.get(self._epoch, 0)
            if self._offsets and number > self._epoch and step < self._step:
                offset += per_epoch or self._step + self._interval - step
                self.counts_on = True
            self._offsets[number] = offset
        if number == self._epoch and step > self._step >= 0:
            self._interval = step - self._step
        self._epoch, self._step = number, step
        return step + self._offsets[number]


class RunBuilder:
    """Points of one run, in the order in which they were written. `means` tells that values are means of all steps
    since the point before; `increments` are keys that count since the point before, and become running sums."""

    def __init__(self, format: str, name: str, *, means: bool = False, increments: Iterable[str] = ()) -> None:
        self.format, self.name, self.means, self.increments = format, name, means, frozenset(increments)
        self.settings: dict[str, Any] = {}
        self.notes: list[str] = []
        self.starts: list[int] = []  # first steps of later starts that the files tell
        self.total_steps: int | None = None
        self._columns: dict[str, _Column] = {}
        self._cuts: list[tuple[int, dict[str, int]]] = []  # first step, and how many points each column had before

    def restart(self, step: int) -> None:
        """From here on a later start writes, whose first step is `step`: earlier points from there on are dropped."""
        self.starts.append(step)
        self._cuts.append((step, {key: len(column.steps) for key, column in self._columns.items()}))

    def add(self, key: str, step: int, value: float, line: int = -1) -> None:
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = _Column()
        column.steps.append(step)
        column.values.append(value)
        column.lines.append(line)

    def add_row(self, step: int, row: Mapping[str, float], line: int = -1) -> None:
        columns = self._columns
        for key, value in row.items():
            column = columns.get(key)
            if column is None:
                column = columns[key] = _Column()
            column.steps.append(step)
            column.values.append(value)
            column.lines.append(line)

    def __bool__(self) -> bool:
        return bool(self._columns)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def finish(self, paths: list[Path], names: Mapping[str, str] | None = None) -> ForeignRun:
        """The run. `names` says which key is which of NAMES where the tables of names.py do not."""
        arrays = {key: _arrays(column) for key, column in self._columns.items()}
        chosen = standard_names(arrays) | {name: key for name, key in (names or {}).items() if key in arrays}
        main = _main_key(arrays, chosen)
        restarts = self._restarts(arrays, main)
        self._columns = {}
        series: dict[str, Series] = {}
        standard = {key: name for name, key in chosen.items()}
        for key, (steps, values, lines) in arrays.items():
            name = standard.get(key, key)
            order = self._order(key, steps, lines, restarts)
            steps, values, lines = steps[order], values[order], lines[order]
            if key in self.increments:
                values = np.nancumsum(values)
            if name in standard.values():
                values = self._in_units(name, key, values)
            mean_of = _interval(steps) if self.means and name in MEANS else 1
            series[name] = Series(name, steps, values, lines, mean_of)
        first_steps = sorted({*self.starts, *(int(step) for step, _ in restarts)})
        return ForeignRun(
            self.format, self.name, paths, series, self.settings, first_steps, self.total_steps, self.notes
        )

    def _restarts(self, arrays: Mapping[str, tuple[Ints, Floats, Ints]], main: str | None) -> list[tuple[int, int]]:
        """The first step of each later start, and its line."""
        if main is None:
            return []
        steps, _, lines = arrays[main]
        back = np.flatnonzero(np.diff(steps) < 0) + 1
        if len(back) > max(3, MOST_RESTARTS * len(steps)):
            self.note(f"{main}: the steps are not in order; they were sorted")
            return []
        # Also a start that died before it reached a step that an earlier one had logged.
        return [(int(steps[i]), int(lines[i])) for i in back]

    def _order(self, key: str, steps: Ints, lines: Ints, restarts: list[tuple[int, int]]) -> Ints:
        """The points that stay, in ascending steps: a step that was written again keeps its last value."""
        valid = np.ones(len(steps), bool)
        for first, line in restarts:
            if line >= 0:
                valid &= (steps < first) | (lines >= line)
        for first, sizes in self._cuts:
            valid[: sizes.get(key, 0)] &= steps[: sizes.get(key, 0)] < first
        back = int((np.diff(steps) < 0).sum())
        index = np.flatnonzero(valid)
        if back > max(3, MOST_RESTARTS * len(steps)):
            index = index[np.argsort(steps[index], kind="stable")]
            steps = steps[index]
            return index[np.append(steps[1:] > steps[:-1], True)] if len(index) else index
        later = np.minimum.accumulate(steps[index][::-1])[::-1]  # the lowest step from each point on
        return index[np.append(steps[index][:-1] < later[1:], True)] if len(index) else index

    def _in_units(self, name: str, key: str, values: Floats) -> Floats:
        values = values * unit_factor(name, key)
        if name == "mfu":
            if np.nanmax(values, initial=0.0) > 1.0:
                self.note(f"{key}: values above 1 were read as percent")
                values = values / 100
            values = np.where(values < 0, np.nan, values)  # nanoGPT prints -100 % until it has measured
        return values


def _arrays(column: _Column) -> tuple[Ints, Floats, Ints]:
    steps, lines = np.frombuffer(column.steps, np.int64), np.frombuffer(column.lines, np.int64)
    return steps, np.frombuffer(column.values, np.float64), lines


def _main_key(arrays: Mapping[str, tuple[Ints, Floats, Ints]], chosen: Mapping[str, str]) -> str | None:
    """The metric whose steps tell restarts: the training loss, else the longest."""
    if "loss" in chosen:
        return chosen["loss"]
    return max(arrays, key=lambda key: len(arrays[key][0]), default=None)


def _interval(steps: Ints) -> int:
    return max(1, int(np.median(np.diff(steps)))) if len(steps) > 1 else max(1, int(steps[0]) if len(steps) else 1)
