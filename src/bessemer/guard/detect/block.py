"""Sixteen steps at a time: what the slow detectors see, and robust statistics over it.

Medians of blocks are nearly normal whatever the tails of single steps. Plain Python: for lists this short numpy's calls
cost more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = 16
SIGMA = 1.4826  # times the median absolute deviation is the standard deviation of a normal distribution
Record = dict[str, Any]


@dataclass
class Block:
    """Finite steps in a row: `attempts` are all of them, `losses` those of the accepted ones."""

    attempts: list[Record]

    def __post_init__(self) -> None:
        self.accepted = [record for record in self.attempts if record["veto"] is None]
        self.enough = 2 * len(self.accepted) >= BLOCK  # to say what is usual
        self.step: int = self.attempts[-1]["step"]
        self.losses: list[float] = [record["loss"] for record in self.accepted]
        self.log_norms = [log_norm(record) for record in self.accepted]
        if self.enough:
            self.loss, self.loss_spread = median(self.losses), spread(self.losses)


def log_norm(record: Record) -> float:
    return math.log(max(record["grad_norm"], 1e-30))


def relative(level: float) -> float:
    """What a rise of the loss is measured against; losses near zero are memorised data, not a small scale."""
    return max(abs(level), 0.1)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def spread(values: Sequence[float]) -> float:
    """The robust standard deviation around the median."""
    center = median(values)
    return SIGMA * median([abs(value - center) for value in values])


def spread_around_line(values: Sequence[float]) -> float:
    """The same around a line through the medians of the two halves, so that a trend is not taken for noise."""
    n = len(values)
    half = n // 2
    old, new = median(values[:half]), median(values[half:])
    slope = (new - old) / (n / 2)
    start = old - slope * (half - 1) / 2
    return SIGMA * median([abs(value - start - slope * i) for i, value in enumerate(values)])


def theil_sen(values: Sequence[float]) -> tuple[float, float]:
    """Slope per point (the median over all pairs), and Kendall's tau with the time: 1 where every pair rises."""
    n = len(values)
    slopes = [(values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
    rising = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
    return median(slopes), rising / len(slopes)
