"""Forecasts the final loss of a run from a part of its curve and its learning-rate schedule.

The multi-power law (Luo et al. 2025, arXiv:2503.12811): L = L0 + A S^-a - B D. S is the sum of the learning rates so
far; D is the share of the loss that the decay of the rate has set free, which depends on the schedule alone. Three
numbers follow from the curve by least squares, weighted over exponents `a`; the shape of D and the prior of B are from
published runs. A power law of the steps alone is 3 % off at 30 % of a run that decays later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bessemer.statistics import Z_95

# D: mean of the fits to 25M, 100M and 400M models. C is for rates as AdamW has them, in absolute units.
DROP_C, DROP_BETA, DROP_GAMMA = 2.07, 0.59, 0.64
DROP_SHARE, DROP_SPREAD = 0.045, 0.3  # B times the peak rate as a share of the loss; its relative uncertainty
FLOOR_SHARE, FLOOR_SPREAD = 0.7, 0.2  # L0 as a share of the loss so far
EXPONENT, EXPONENT_SPREAD = 0.47, 0.12
EXPONENTS = [0.1 + 0.02 * i for i in range(46)]
KNOTS = 240  # steps at which the schedule is read
POINTS = 160  # means over which the curve is fitted
SKIP = 0.4  # share of the curve that is left out at its beginning, which is no power law
LEAST_POINTS = 24
MODEL_ERROR = 0.006  # of the loss: how far the law itself is off, at the end of a run seen to 30 %
FLAT_RATE = 0.02  # decays below this share of the peak count as this

Rate = Callable[[int], float]


@dataclass(frozen=True)
class Forecast:
    """The expected mean loss of the last steps, with a 95 % interval, and the fitted law."""

    final: float
    low: float
    high: float
    seen: float  # share of the run
    floor: float  # L0
    scale: float  # A
    exponent: float
    drop: float  # B times the peak rate
    work: float  # S at the end, in steps at the peak rate

    def longer(self, factor: float) -> float:
        """The final loss of a run that is so many times as long, with the same shape of its schedule."""
        return self.final - self.scale * self.work**-self.exponent * (1 - factor**-self.exponent)

    def text(self) -> str:
        return f"{self.final:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Annealing:
    """S and D of a schedule, with rates as shares of the peak; S is in steps at the peak rate."""

    knots: list[int]
    rates: list[float]
    sums: list[float]
    strength: float

    @classmethod
    def of(cls, rate: Rate, total: int) -> Annealing:
        stride = max(1, total // KNOTS)
        knots = sorted({*range(0, total, stride), total - 1})
        rates = [rate(step) for step in knots]
        peak = max(rates) or 1.0
        sums, before, so_far = list[float](), 0, 0.0
        for i, (step, value) in enumerate(zip(knots, rates, strict=True)):
            so_far += (step - before if i else 1) * 0.5 * (value + rates[max(0, i - 1)]) / peak
            before = step
            sums.append(so_far)
        return cls(knots, [value / peak for value in rates], sums, DROP_C * peak ** (1 - DROP_GAMMA))

    def at(self, step: int) -> tuple[float, float]:
        """S and D after a step."""
        last = max(i for i, knot in enumerate(self.knots) if knot <= step)
        after = min(last + 1, len(self.knots) - 1)
        gap = self.knots[after] - self.knots[last]
        share = (step - self.knots[last]) / gap if gap else 0.0
        total = self.sums[last] + share * (self.sums[after] - self.sums[last])
        return max(total, 1e-3), self._drop(last, total) * (1 - share) + share * self._drop(after, total)

    def _drop(self, last: int, total: float) -> float:
        drop = 0.0
        for k in range(1, last + 1):
            fall = self.rates[k - 1] - self.rates[k]
            if fall > 0:  # a warm-up sets nothing free
                spent = max(0.0, total - self.sums[k - 1])
                push = self.strength * max(self.rates[k], FLAT_RATE) ** -DROP_GAMMA * spent
                drop += fall * (1 - (1 + push) ** -DROP_BETA)
        return drop


def forecast(losses: Iterable[tuple[int, float]], rate: Rate, total: int, warmup: int = 0) -> Forecast | None:
    """The forecast from (step, loss) pairs of accepted steps; None if they are too few."""
    pairs = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    begin = max(warmup, int(SKIP * (pairs[-1][0] + 1))) if pairs else 0
    pairs = [(step, loss) for step, loss in pairs if step >= begin]
    if len(pairs) < LEAST_POINTS or total <= pairs[-1][0]:
        return None
    points, noise = _means(pairs)
    annealing = Annealing.of(rate, total)
    inputs = [annealing.at(round(step)) for step, _ in points]
    end = annealing.at(total - 1)
    values = [loss for _, loss in points]
    recent = sum(values[-5:]) / len(values[-5:])
    fits = [_fit(inputs, values, exponent, noise, recent, end) for exponent in EXPONENTS]
    best = min(fit.cost for fit in fits)
    weights = [math.exp((best - fit.cost) / 2) for fit in fits]
    total_weight = sum(weights)

    def mean(numbers: Sequence[float]) -> float:
        return sum(w * n for w, n in zip(weights, numbers, strict=True)) / total_weight

    final = mean([fit.final for fit in fits])
    spread = mean([fit.variance + (fit.final - final) ** 2 for fit in fits])
    seen = (pairs[-1][0] + 1) / total
    model = MODEL_ERROR * final * math.sqrt((1 - seen) / 0.7)
    width = Z_95 * math.sqrt(spread + model**2)
    floor, _, drop = (mean([fit.numbers[i] for fit in fits]) for i in range(3))
    exponent = mean(EXPONENTS)
    scale = mean([fit.numbers[1] * end[0] ** (exponent - a) for fit, a in zip(fits, EXPONENTS, strict=True)])
    return Forecast(final, final - width, final + width, seen, floor, scale, exponent, drop, end[0])


def _means(pairs: Sequence[tuple[int, float]]) -> tuple[list[tuple[float, float]], float]:
    """Means of groups of steps, spaced evenly in the logarithm of the step, and the variance of one step."""
    first, last = pairs[0][0] + 1, pairs[-1][0] + 1
    groups: dict[int, list[tuple[int, float]]] = {}
    for step, loss in pairs:
        key = int(POINTS * math.log((step + 1) / first) / max(1e-9, math.log(last / first)))
        groups.setdefault(min(key, POINTS - 1), []).append((step, loss))
    points = [(sum(s for s, _ in g) / len(g), sum(x for _, x in g) / len(g)) for g in groups.values()]
    differences = [(b[1] - a[1]) ** 2 / 2 for a, b in zip(pairs, pairs[1:], strict=False)]
    noise = sorted(differences)[len(differences) // 2] / 0.4549  # the median of chi-squared
    return points, max(noise, 1e-8)


@dataclass(frozen=True)
class _Fit:
    cost: float
    numbers: tuple[float, float, float]  # L0, A, B
    final: float
    variance: float


def _fit(
    inputs: Sequence[tuple[float, float]], values: Sequence[float], exponent: float, noise: float, recent: float,
    end: tuple[float, float],
) -> _Fit:  # fmt: skip
    """Least squares for one exponent, with priors of L0, B and the exponent."""
    unit = inputs[-1][0]  # so that A is the excess at the last point
    rows = [(1.0, (s / unit) ** -exponent, -d) for s, d in inputs]
    precision = [[sum(a[i] * a[j] for a in rows) / noise for j in range(3)] for i in range(3)]
    right = [sum(a[i] * y for a, y in zip(rows, values, strict=True)) / noise for i in range(3)]
    priors = (
        (0, FLOOR_SHARE * recent, FLOOR_SPREAD * recent),
        (2, DROP_SHARE * recent, DROP_SPREAD * DROP_SHARE * recent),
    )
    for i, center, width in priors:
        precision[i][i] += width**-2
        right[i] += center * width**-2
    covariance = _inverse(precision)
    numbers = [sum(c * r for c, r in zip(row, right, strict=True)) for row in covariance]
    law = [sum(n * a for n, a in zip(numbers, row, strict=True)) for row in rows]
    misfit = sum((y - x) ** 2 for x, y in zip(law, values, strict=True))
    cost = misfit / noise + sum(((numbers[i] - center) / width) ** 2 for i, center, width in priors)
    cost += ((exponent - EXPONENT) / EXPONENT_SPREAD) ** 2
    last = (1.0, (end[0] / unit) ** -exponent, -end[1])
    variance = sum(last[i] * covariance[i][j] * last[j] for i in range(3) for j in range(3))
    return _Fit(
        cost, (numbers[0], numbers[1] * unit**exponent, numbers[2]),
        sum(n * a for n, a in zip(numbers, last, strict=True)), variance,
    )  # fmt: skip


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The inverse of a positive definite 3 x 3 matrix."""
    (a, b, c), (d, e, f), (g, h, i) = matrix
    minors = [[e * i - f * h, c * h - b * i, b * f - c * e], [f * g - d * i, a * i - c * g, c * d - a * f],
              [d * h - e * g, b * g - a * h, a * e - b * d]]  # fmt: skip
    determinant = a * minors[0][0] + b * minors[1][0] + c * minors[2][0]
    return [[minor / determinant for minor in row] for row in minors]
