"""Whether a run came back to its trend after an incident: the proof that a repair worked."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SPAN = 8  # accepted steps whose median must be back
NEAR = 3.0  # scales above the centre before the incident


@dataclass
class Recovering:
    """Watches accepted losses after an incident until their median over SPAN steps is near the former centre.

    `told` is called once, with the step from which they were and the median, or with None after `patience` steps.
    """

    since: int
    center: float
    scale: float
    patience: int
    told: Callable[[int | None, float | None], None]
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SPAN))

    def step(self, record: dict[str, Any]) -> bool:
        """One more step; True once the answer is known."""
        if record["step"] < self.since:
            return False
        if record["veto"] is None:
            self.recent.append((record["step"], record["loss"]))
        if len(self.recent) == SPAN:
            median = statistics.median(loss for _, loss in self.recent)
            if median <= self.center + NEAR * self.scale:
                self.told(self.recent[0][0], median)
                return True
        if record["step"] - self.since >= self.patience:
            self.told(None, None)
            return True
        return False
