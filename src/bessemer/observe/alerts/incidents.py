"""Incidents: what comes back within the quiet time is one; and the rules on metrics, which make some."""

from __future__ import annotations

import math
import operator
from collections import deque
from dataclasses import dataclass
from typing import Any

from bessemer.run.journal import Record, to_number
from bessemer.spec.observers import SLOW, AlertRuleSpec

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class AlertIncident:
    """Something to tell. `kinds` are the names under which routes ask for it; `metric` is drawn."""

    kinds: tuple[str, ...]
    title: str
    text: str
    step: int
    time: float
    metric: str = "loss"

    @property
    def key(self) -> str:
        """What comes back under this key within the quiet time is the same incident."""
        return f"finished {self.step}" if self.kinds[0] == "finished" else self.kinds[0]


class Incidents:
    """The open incidents by key: when each was last seen, and how often. `open` is saved with the position."""

    def __init__(self, saved: dict[str, list[float]]) -> None:
        self.open = saved

    def is_new(self, key: str, now_s: float, quiet_s: float) -> bool:
        """Count an occurrence; True if it begins an incident."""
        last_s, count = self.open.get(key, (-math.inf, 0))
        new = now_s - last_s >= quiet_s
        self.open[key] = [now_s, 1 if new else count + 1]
        return new


class MetricRule:
    """A rule over the records of steps or evaluations."""

    def __init__(self, spec: AlertRuleSpec) -> None:
        self.spec = spec
        metric, comparison, self.limit = spec.condition
        self.validation = metric.startswith("validation:")
        self.metric = metric.removeprefix("validation:")
        self._holds = COMPARE[comparison]
        self._upward = comparison in (">", ">=")
        self._window: deque[float] = deque(maxlen=spec.window)

    def holds(self, record: Record) -> float | None:
        """The mean of the window if the condition holds after this record. A value that is not finite is above every
        limit."""
        value = _number(record, self.metric)
        if value is None:
            return None
        self._window.append(value if math.isfinite(value) else math.inf)
        if len(self._window) < self.spec.window:
            return None
        mean = sum(self._window) / len(self._window)
        return mean if self._holds(mean, self.limit) else None

    def clear(self) -> None:
        """Forget the window: the run went back."""
        self._window.clear()

    def incident(self, record: Record, mean: float, now_s: float) -> AlertIncident:
        step = int(to_number(record.get("step")) or 0)
        over = f", mean of {self.spec.window} records" if self.spec.window > 1 else ""
        text = f"{self.metric} is {mean:.6g}{over}; the rule is {self.spec.when}"
        metric = f"validation:{self.metric}" if self.validation else self.metric
        return AlertIncident((f"rule {self.spec.when}", "rules"), self.spec.when, text, step, now_s, metric)


def _number(record: Record, name: str) -> float | None:
    """A field, or a part of one: `per_source.code`."""
    value: Any = record
    for part in [name] if name in record else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return to_number(value)


def event_incident(event: Record, line: str) -> AlertIncident:
    """The incident that an event of the journal is."""
    kind, step = str(event.get("kind", "")), int(to_number(event.get("step")) or 0)
    kinds: tuple[str, ...] = (kind,)
    if kind == "alarm":
        name = str(event.get("alarm", ""))
        kinds = (name, kind, *(["throughput"] if name in SLOW else []))
    title = kinds[0].replace("_", " ")
    return AlertIncident(kinds, title, line, step, to_number(event.get("time")) or 0.0)
