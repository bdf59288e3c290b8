"""Intervals and tests for measured rates: Wilson intervals, the bootstrap, the exact sign test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution
DRAWS = 2_000  # of the bootstrap

Interval = tuple[float, float]


@dataclass(frozen=True)
class Rate:
    """A share of independent cases, with its 95 % Wilson interval."""

    hits: int
    total: int

    @classmethod
    def of(cls, cases: Iterable[bool]) -> Rate:
        values = list(cases)
        return cls(sum(values), len(values))

    @property
    def share(self) -> float:
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> Interval:
        return wilson_interval(self.hits, self.total)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {"hits": self.hits, "total": self.total, "rate": self.share if self.total else None,
                "low": low, "high": high}  # fmt: skip

    def __str__(self) -> str:
        if not self.total:
            return "no cases"
        return f"{self.share:.1%} ({self.interval[0]:.1%} to {self.interval[1]:.1%}), {self.hits:,} of {self.total:,}"


@dataclass(frozen=True)
class PairedChange:
    """The same cases measured twice. `interval` is the 95 % bootstrap interval of the mean difference, `p` that of the
    exact sign test over the cases that differ, which for yes and no is McNemar's test."""

    difference: float
    interval: Interval
    rises: int
    falls: int
    p: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float], seed: int = 0) -> PairedChange:
        differences = [float(late) - float(early) for early, late in zip(before, after, strict=True)]
        rises, falls = (sum(sign * difference > 0 for difference in differences) for sign in (1, -1))
        mean = sum(differences) / len(differences) if differences else math.nan
        return cls(mean, bootstrap_interval(differences, seed), rises, falls, sign_test(rises, falls))

    def to_json(self) -> dict[str, Any]:
        return {"difference": self.difference, "low": self.interval[0], "high": self.interval[1], "rises": self.rises,
                "falls": self.falls, "p": self.p}  # fmt: skip

    def __str__(self) -> str:
        low, high = (f"{100 * bound:+.1f}" for bound in self.interval)
        return f"{100 * self.difference:+.1f} points ({low} to {high}), p {format_p(self.p)}"


def wilson_interval(hits: float, total: float, z: float = Z_95) -> Interval:
    """Wilson's score interval of a binomial rate; 0 to 1 without cases."""
    if not total:
        return 0.0, 1.0
    rate, spread = hits / total, z * z / total
    centre = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / total + spread / (4 * total)) / (1 + spread)
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == total else centre + half)


def sign_test(wins: int, losses: int) -> float:
    """The two-sided p-value of `wins` against `losses` if both were equally likely."""
    total = wins + losses
    tail = sum(math.comb(total, count) for count in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**total)


def bootstrap_interval(values: Sequence[float], seed: int = 0, draws: int = DRAWS) -> Interval:
    """The 95 % percentile interval of the mean of per-case values, with resampled cases. The same for a seed."""
    import numpy as np

    if not len(values):
        return math.nan, math.nan
    array, draw = np.asarray(values, np.float64), np.random.default_rng(seed)
    means = [array[draw.integers(0, len(array), len(array))].mean() for _ in range(draws)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def format_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
