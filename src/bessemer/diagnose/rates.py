"""The learning-rate range test (Smith 2015): train while the rate rises exponentially, until the loss goes up again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bessemer.diagnose.report import InspectionReport
from bessemer.observe.figure import Lines


@dataclass(frozen=True)
class LrSweep:
    """Rates with the loss before each update, and what they suggest; a point that was not found is None."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    steepest: float | None
    diverged: float | None
    suggested: float | None
    reason: str


def smooth(values: list[float], reach: int) -> list[float]:
    """Mean over `reach` neighbours on both sides, fewer at the ends. A running mean would shift every point to the
    right, and the rate with it: by a factor of four at the usual decay of 0.9."""
    found = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        found.append(sum(values[i - side : i + side + 1]) / (2 * side + 1))
    return found


def limit(smoothed: list[float]) -> float:
    """Above it the run has diverged: a quarter of what was gained is lost again, and a tenth of the best loss."""
    best = min(smoothed)
    return best + max(0.25 * (smoothed[0] - best), 0.1 * abs(best))


def sweep(
    attempt: Callable[[int, float], float],
    first: float = 1e-6,
    last: float = 10.0,
    steps: int = 200,
    reach: int | None = None,
) -> LrSweep:
    """`attempt(i, rate)` makes the i-th update with that rate and returns the loss from before it.

    Costs `steps` training steps at most: it stops once the loss stays above the limit, or is not finite.
    """
    reach = max(1, steps // 50) if reach is None else reach
    rates, losses, above = [], [], 0
    for i in range(steps):
        rate = first * (last / first) ** (i / max(1, steps - 1))
        loss = attempt(i, rate)
        rates.append(rate)
        losses.append(loss)
        if not math.isfinite(loss):
            break
        settled = smooth(losses, reach)
        above = above + 1 if i > 2 * reach and settled[-1] > limit(settled) else 0
        if above > 2 * reach:
            break
    return _judge(rates, losses, reach)


def _judge(rates: list[float], losses: list[float], reach: int) -> LrSweep:
    finite = [loss for loss in losses if math.isfinite(loss)]
    smoothed = smooth(finite, reach)
    if len(smoothed) < 3:
        return LrSweep(rates, losses, smoothed, None, rates[-1], None, "the loss is not finite at the lowest rates")
    lowest = smoothed.index(min(smoothed))
    beyond = [i for i in range(lowest, len(smoothed)) if smoothed[i] > limit(smoothed)]
    beyond += [len(finite)] if len(finite) < len(losses) else []
    diverged = rates[beyond[0]] if beyond else None
    # Steps are equal in log(rate), so the steepest fall over a step is the steepest over log(rate).
    fall, at = min((smoothed[i + 1] - smoothed[i - 1], i) for i in range(1, max(2, lowest)))
    steepest = rates[at] if fall < 0 else None
    suggested = min((rate for rate in (steepest, diverged and diverged / 10) if rate), default=None)
    if suggested is None:
        reason = "the loss neither fell nor rose: raise --last or --steps"
    elif diverged is None:
        reason = "the loss falls fastest there; it never rose: raise --last to see where it does"
    elif suggested == steepest:
        reason = f"the loss falls fastest there; it rises again from {diverged:.2g}"
    else:
        reason = f"one tenth of {diverged:.2g}, where the loss rises again"
    return LrSweep(rates, losses, smoothed, steepest, diverged, suggested, reason)


def report(found: LrSweep, asked: float) -> InspectionReport:
    """`asked` is the rate that the spec or the plan has."""
    said = [f"No suggestion: {found.reason}."]
    if found.suggested is not None:
        said = [f"Suggested peak learning rate: {found.suggested:.2g} ({found.reason})."]
    beyond = found.diverged is not None and asked >= found.diverged
    said.append(f"The run has {asked:.2g}" + (": above the rate at which this test diverged." if beyond else "."))
    points = {"steepest": found.steepest, "suggested": found.suggested, "diverged": found.diverged}
    marks = {name: value for name, value in points.items() if value is not None}
    shown = len(found.smoothed)
    series = {"loss": found.losses[:shown], "smoothed": found.smoothed}
    figure = Lines("Loss", found.rates[:shown], series, "learning rate", log_x=True, marks=marks)
    return InspectionReport("Learning-rate range test", said, {**asdict(found), "asked": asked}, figures=[figure])
