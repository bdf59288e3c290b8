"""The learning rate as a closed-form function of the step: no state to save or restore."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then cosine or linear decay to `floor * peak`, which holds past the end."""

    peak: float
    warmup: int
    total: int
    kind: str = "cosine"
    floor: float = 0.1

    def lr(self, step: int) -> float:
        """The rate of a step, counted from 0: the first one is peak / warmup, never zero."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        share = min(1.0, (step - self.warmup) / max(1, self.total - 1 - self.warmup))
        fall = 0.5 * (1 + math.cos(math.pi * share)) if self.kind == "cosine" else 1 - share
        return self.peak * (self.floor + (1 - self.floor) * fall)
