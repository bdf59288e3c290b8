"""The run beside its plan: an alarm when speed or memory leave the plan's error bar."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bessemer.guard.detect.alarm import Alarm, fires
from bessemer.guard.detect.block import Record
from bessemer.plan.actual import WARM_UP, Surroundings, actual, findings, memory_gap, speed_gap
from bessemer.plan.expect import Expected

WINDOW = 32  # steps that are compared
REARM = 4  # windows within the bar, after which the same gap is told of again


class PlanGap:
    """Fed with every record. `look` says how the machine is, and is asked only when something is to be told."""

    def __init__(self, expected: Expected, look: Callable[[], Surroundings]) -> None:
        self.expected, self.look = expected, look
        self.seen = 0
        self._window: deque[Record] = deque(maxlen=WINDOW)
        self._gaps: dict[str, int] = {}

    def step(self, record: Record) -> list[Alarm]:
        self.seen += 1
        if self.seen > WARM_UP:
            self._window.append(record)
        if self.seen <= WARM_UP or (self.seen - WARM_UP) % WINDOW:
            return []
        found = actual(self._window, skip=0)
        if found is None:
            return []
        gaps = {"plan_speed": speed_gap(self.expected, found), "plan_memory": memory_gap(self.expected, found)}
        if (ratio := gaps["plan_speed"]) is not None and ratio < 1:  # nothing to do about a run that is faster
            gaps["plan_speed"] = None
        new = [kind for kind, gap in gaps.items() if fires(self._gaps, kind, gap is not None, REARM)]
        told = findings(self.expected, found, self.look) if new else {}
        return [Alarm(kind, int(record["step"]), "note", told[kind]) for kind in new]
