"""What the rules measure on a curve: its noise, level, trend, jumps and outliers.

All of it is robust, from medians and absolute deviations: one spike does not move the scale that it is compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.observe.foreign.series import Series

Values = npt.NDArray[np.float64]
NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Curve:
    """The finite points of a series. `bad_steps` are the steps whose value was not finite."""

    name: str
    steps: npt.NDArray[np.int64]
    values: Values
    bad_steps: npt.NDArray[np.int64]
    mean_of: int = 1

    @staticmethod
    def of(series: Series) -> Curve:
        finite = np.isfinite(series.values)
        return Curve(series.name, series.steps[finite], series.values[finite], series.steps[~finite], series.mean_of)

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, start: int, stop: int | None = None) -> Curve:
        """Points from index `start` to `stop`."""
        return Curve(self.name, self.steps[start:stop], self.values[start:stop], self.bad_steps, self.mean_of)

    def before(self, step: float) -> Curve:
        return self.part(0, int(np.searchsorted(self.steps, step)))

    def since(self, step: float) -> Curve:
        return self.part(int(np.searchsorted(self.steps, step)))

    def level(self, share: float, end: bool = True, least: int = 3) -> float:
        """Median of the last (or first) share of the points, of at least `least` of them."""
        count = max(least, round(share * len(self)))
        return float(np.median(self.values[-count:] if end else self.values[:count]))

    def noise(self) -> float:
        """Standard deviation of a point around the trend, from the differences of neighbours."""
        if len(self) < 4:
            return 0.0
        differences = np.diff(self.values)
        return float(NORMAL * np.median(np.abs(differences - np.median(differences))) / math.sqrt(2))

    def smooth(self, reach: int) -> Values:
        """Running median over `reach` points on both sides, fewer at the ends."""
        n = len(self)
        return np.array([np.median(self.values[max(0, i - reach) : i + reach + 1]) for i in range(n)])

    def chunks(self, count: int) -> Values:
        """Medians of `count` equal parts."""
        return np.array([np.median(part) for part in np.array_split(self.values, count) if len(part)])

    def at(self, step: float) -> float:
        """The value of the last point up to a step, or of the first point."""
        return float(self.values[max(0, int(np.searchsorted(self.steps, step, side="right")) - 1)])

    def interval(self) -> int:
        """Usual distance of two points in steps."""
        return max(1, int(np.median(np.diff(self.steps)))) if len(self) > 1 else 1


@dataclass(frozen=True)
class Outlier:
    """A rise above the recent level. `deviations` are robust standard deviations; `left` is the share of the rise that
    remains a few points later, and `built` whether earlier points had risen too."""

    index: int
    step: int
    value: float
    usual: float
    deviations: float
    left: float
    built: bool

    @property
    def rise(self) -> float:
        return (self.value - self.usual) / max(abs(self.usual), 1e-9)


def find_outliers(curve: Curve, sigmas: float = 8.0, least_rise: float = 0.15, window: int = 64) -> list[Outlier]:
    """Upward outliers, the first point of each. The limit grows with the tails that the run shows elsewhere."""
    outliers: list[Outlier] = []
    n, skip_until = len(curve), -1
    scale = np.zeros(n)
    for i in range(8, n):
        scale[i] = curve.part(max(0, i - window), i).noise()
    floor = max(0.01 * float(np.median(np.abs(curve.values))), 0.7 * curve.noise()) if n else 0.0
    unit = 0.05 * float(np.median(np.abs(curve.values[:4]))) if n else 0.0  # a loss of almost zero has no spikes
    deviations = np.zeros(n)
    usual = np.zeros(n)
    for i in range(8, n):
        recent = curve.values[max(0, i - 16) : i]
        usual[i] = np.median(recent)
        deviations[i] = (curve.values[i] - usual[i]) / max(scale[i], floor, 1e-12)
    ordinary = deviations[8:]
    # Heavy-tailed curves have to clear a higher bar; a slow return of up to a seventh of the run does not raise it.
    limit = max(sigmas, 5 * float(np.quantile(ordinary, 0.85))) if len(ordinary) >= 32 else 1.5 * sigmas
    for i in range(8, n):
        rise = curve.values[i] - usual[i]
        if i <= skip_until or deviations[i] <= limit or rise < least_rise * max(abs(usual[i]), unit):
            continue
        peak = i + int(np.argmax(curve.values[i : i + 8]))
        after = curve.values[peak + 1 : peak + 6]
        top = float(curve.values[peak] - usual[i])
        left = float(np.median(after) - usual[i]) / top if len(after) >= 2 else float("nan")
        built = peak - i >= 2 or (i >= 2 and deviations[i - 1] > 4 and deviations[i - 2] > 2)
        outliers.append(
            Outlier(
                i, int(curve.steps[i]), float(curve.values[peak]), float(usual[i]), float(deviations[i]), left, built
            )
        )
        skip_until = max(i + 8, peak + 4)
    return outliers


def find_period(steps: list[int] | npt.NDArray[np.int64], tolerance: float = 0.1) -> int | None:
    """The distance of events that recur regularly: at least four, with nine of ten distances multiples of one."""
    if len(steps) < 4:
        return None
    gaps = np.diff(np.asarray(steps, np.float64))
    period = float(np.median(gaps))
    multiples = np.maximum(1, np.round(gaps / period))
    regular = np.abs(gaps / multiples - period) <= max(1.0, tolerance * period)
    return round(period) if period >= 2 and np.mean(regular) >= 0.9 and np.mean(multiples <= 3) > 0.9 else None


def find_cycle(curve: Curve, longest: int = 64) -> tuple[int, float, float] | None:
    """A pattern that repeats: its period in points, the share of the variance that it explains, its swing. The means
    of the phases must agree between two halves of the curve."""
    n = len(curve)
    reach = min(longest, n // 6)
    trend_line = np.convolve(
        np.pad(curve.values, reach, mode="edge"), np.full(2 * reach + 1, 1 / (2 * reach + 1)), "valid"
    )
    limit = 5 * max(curve.noise(), 1e-12)
    rest = np.clip(curve.values - trend_line, -limit, limit)[reach : n - reach]
    best: tuple[int, float, float] | None = None
    for period in range(3, reach + 1):
        cycles = len(rest) // period
        if cycles < 4:
            break
        folded = rest[: cycles * period].reshape(cycles, period)
        means = folded.mean(0)
        total = float(folded.var()) or 1e-30
        explained = 1 - float((folded - means).var()) / total * cycles / (cycles - 1)
        halves = folded[: cycles // 2].mean(0), folded[cycles // 2 :].mean(0)
        agree = float(np.corrcoef(*halves)[0, 1]) if np.ptp(halves[0]) > 0 and np.ptp(halves[1]) > 0 else 0.0
        if explained > 0.35 and agree > 0.75 and (best is None or explained > best[1] + 0.05):
            best = period, explained, float(np.ptp(means))
    return best


def find_level_shift(curve: Curve, least: int = 8) -> tuple[int, float, float] | None:
    """The index at which the level changes most, with the medians before and after, if they are well apart."""
    n = len(curve)
    if n < 2 * least:
        return None
    values = np.log(np.maximum(curve.values, 1e-12))
    best, at = 0.0, 0
    for i in range(least, n - least + 1, max(1, n // 200)):
        gap = abs(float(np.median(values[i:]) - np.median(values[:i])))
        if gap > best:
            best, at = gap, i
    before, after = curve.values[:at], curve.values[at:]
    spread = max(float(NORMAL * np.median(np.abs(part - np.median(part)))) for part in (before, after)) if at else 0.0
    low, high = float(np.median(before)), float(np.median(after))
    return (at, low, high) if at and abs(high - low) > 3 * spread else None


def trend(curve: Curve) -> float:
    """Spearman's correlation of the medians of ten parts with time: 1 rises in every part."""
    parts = curve.chunks(10)
    if len(parts) < 5:
        return 0.0
    ranks = np.argsort(np.argsort(parts)).astype(np.float64)
    if np.ptp(parts) == 0:
        return 0.0
    return float(np.corrcoef(ranks, np.arange(len(parts)))[0, 1])
