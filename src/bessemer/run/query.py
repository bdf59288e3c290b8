"""Answers a question about a run's metrics: their values over a range of steps, thinned, with the extremes of all
its steps, so that thinning hides no spike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.run.journal import Record, to_number

DEFAULT_NAMES = ("loss", "lr", "grad_norm")
VALIDATION = "validation."  # prefix of the metrics of evaluations
MOST_ROWS = 200  # of an answer without --every


@dataclass
class MetricSummary:
    """Over every step of the range. Extremes and mean are of finite values; None if there are none."""

    count: int = 0
    nonfinite: int = 0
    first: float | None = None
    last: float | None = None
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None
    mean: float | None = None

    def add(self, step: int, value: float) -> None:
        self.count += 1
        self.first = value if self.count == 1 else self.first
        self.last = value
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        finite = self.count - self.nonfinite
        self.mean = value if self.mean is None else self.mean + (value - self.mean) / finite
        if self.min is None or value < self.min:
            self.min, self.min_step = value, step
        if self.max is None or value > self.max:
            self.max, self.max_step = value, step


@dataclass(frozen=True)
class MetricAnswer:
    """`rows` holds every `every`-th step; `summary` every step."""

    run: str
    steps: int
    every: int
    rows: list[dict[str, Any]]
    summary: dict[str, MetricSummary]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def query_metrics(
    run: Run, names: Sequence[str] = (), first: int = 0, last: int | None = None, every: int | None = None
) -> MetricAnswer:
    """The metrics `names` of the steps `first` to `last`, both included. Without `every` at most 200 rows."""
    available = metric_names(run)
    if not available:
        raise UserError(f"{run.folder}: no step is recorded yet")
    if unknown := [name for name in names if name not in available]:
        raise UserError(f"{unknown[0]}: no such metric in {run.folder}; there are {', '.join(available)}")
    chosen = list(names) or [name for name in DEFAULT_NAMES if name in available]
    rows: dict[int, dict[str, Any]] = {}
    summary = {name: MetricSummary() for name in chosen}
    for step, name, value in _values(run, chosen):
        if step >= first and (last is None or step <= last):
            rows.setdefault(step, {"step": step})[name] = value
            summary[name].add(step, value)
    steps = sorted(rows)
    stride = every or max(1, math.ceil(len(steps) / MOST_ROWS))
    evaluated = [name for name in chosen if name.startswith(VALIDATION)]
    # An evaluation is rare: its step is always shown.
    shown = [s for i, s in enumerate(steps) if i % stride == 0 or any(name in rows[s] for name in evaluated)]
    return MetricAnswer(str(run.folder), len(steps), stride, [rows[step] for step in shown], summary)


def metric_names(run: Run) -> list[str]:
    """The numeric metrics of the run's steps, then those of its evaluations."""
    names: dict[str, None] = {}
    for prefix, records in (("", run.metrics()), (VALIDATION, run.validations())):
        for record in records:
            names.update(dict.fromkeys(prefix + key for key, value in record.items() if _is_metric(key, value)))
    return list(names)


def _is_metric(key: str, value: Any) -> bool:
    return key not in ("step", "time") and not isinstance(value, bool) and to_number(value) is not None


def _values(run: Run, names: Sequence[str]) -> Iterator[tuple[int, str, float]]:
    sources: tuple[tuple[Iterator[Record], list[tuple[str, str]]], ...] = (
        (run.metrics(), [(name, name) for name in names if not name.startswith(VALIDATION)]),
        (run.validations(), [(name, name.removeprefix(VALIDATION)) for name in names if name.startswith(VALIDATION)]),
    )
    for records, columns in sources:
        for record in records if columns else ():
            step = to_number(record.get("step"))
            for name, key in columns if step is not None and math.isfinite(step) else ():
                if (value := to_number(record.get(key))) is not None:
                    yield int(step or 0), name, value
