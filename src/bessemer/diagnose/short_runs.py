"""What short runs say about settings that a spec leaves open: whether the best learning rate stays when the width
grows, and how long a warm-up has to be.

A short run warms up and then holds its rate, so that lengths compare. Its loss is the mean of its last quarter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bessemer.diagnose.report import InspectionReport
from bessemer.observe.figure import LineChart

WARMUP = 10  # steps of the runs of different widths
CALM_FROM, CALM_WINDOW, CALM = 10, 50, 5.0  # a gradient norm above 5 x its running median is not calm
NEAR_BEST = 0.01  # of the loss


@dataclass(frozen=True)
class ShortRun:
    """Losses and gradient norms of consecutive steps."""

    losses: list[float]
    norms: list[float]

    @property
    def loss(self) -> float:
        """Of the last quarter; NaN if the run diverged."""
        part = self.losses[-max(1, len(self.losses) // 4) :]
        return statistics.fmean(part) if all(map(math.isfinite, part)) else math.nan

    @property
    def largest_norm(self) -> float:
        """The largest gradient norm after step 10, over the running median before it."""
        norms = self.norms
        ratios = [
            norms[i] / (statistics.median(norms[max(0, i - CALM_WINDOW) : i]) or math.inf)
            for i in range(CALM_FROM, len(norms))
        ]
        return max(ratios, default=math.nan) if all(map(math.isfinite, norms)) else math.inf


def short_run(attempt: Callable[[int, float], tuple[float, float]], rate: float, steps: int, warmup: int) -> ShortRun:
    """`attempt(i, rate)` makes the i-th update and returns loss and gradient norm before it. Ends early at NaN."""
    losses, norms = list[float](), list[float]()
    for i in range(steps):
        loss, norm = attempt(i, rate * min(1.0, (i + 1) / max(1, warmup)))
        losses.append(loss)
        norms.append(norm)
        if not math.isfinite(loss):
            break
    return ShortRun(losses, norms)


def transfer_report(runs: dict[int, dict[float, ShortRun]], init: str) -> InspectionReport:
    """`runs` are by width and rate."""
    rates = sorted(next(iter(runs.values())))
    losses = {f"width {width}": [by_rate[rate].loss for rate in rates] for width, by_rate in runs.items()}
    best: dict[str, float] = {}
    for name, values in losses.items():
        finite = [(loss, rate) for loss, rate in zip(values, rates, strict=True) if math.isfinite(loss)]
        if finite:
            best[name] = min(finite)[1]
    at = [rates.index(rate) for rate in best.values()]
    conclusions = [f"{name}: best at {rate:.2g}." for name, rate in best.items()]
    if len(best) < len(losses):
        conclusions.append("A width diverged at every rate: lower --rates.")
    elif {0, len(rates) - 1} & set(at):
        conclusions.append("A best rate is at an end of --rates: the best may be outside.")
    if len(at) > 1:
        apart = max(at) - min(at)
        verb = "stays" if apart <= 1 else "moves"
        advice = "" if apart <= 1 or init == "mup" else "; with model.init: mup it should stay"
        conclusions.append(
            f"With init {init} the best rate {verb}: {apart} steps of --rates between the widths{advice}."
        )
    rows = [[f"{rate:.2g}", *(f"{values[i]:.4f}" for values in losses.values())] for i, rate in enumerate(rates)]
    figure = LineChart("Loss by learning rate and width", rates, losses, "learning rate", log_x=True)
    data = {"rates": rates, "losses": losses, "best": best, "init": init}
    return InspectionReport("Transfer over the width", conclusions, data, ["rate", *losses], rows, [figure])


def choose_warmup(runs: dict[int, ShortRun]) -> int | None:
    """The shortest warm-up without a gradient norm above 5 times its running median, whose loss is within 1 % of the
    best calm run's; None if no run is calm."""
    calm = {warmup: run.loss for warmup, run in runs.items() if run.largest_norm <= CALM and math.isfinite(run.loss)}
    best = min(calm.values(), default=math.nan)
    return min((warmup for warmup, loss in calm.items() if loss <= best * (1 + NEAR_BEST)), default=None)


def warmup_report(runs: dict[int, ShortRun], rate: float, planned: int) -> InspectionReport:
    chosen = choose_warmup(runs)
    conclusions = [f"Suggested warm-up: {chosen} steps at a rate of {rate:.2g}; the run has {planned}."]
    if chosen is None:
        conclusions = [
            f"No warm-up kept the gradient norms below {CALM:g} times their median: lower the rate {rate:.2g}."
        ]
    columns = ("warm-up", "loss", "largest norm over median")
    rows = [(warmup, f"{run.loss:.4f}", f"{run.largest_norm:.2f}") for warmup, run in runs.items()]
    length = max(len(run.losses) for run in runs.values())
    curves = {f"{warmup} steps": run.losses + [math.nan] * (length - len(run.losses)) for warmup, run in runs.items()}
    figure = LineChart("Loss by warm-up", list(range(length)), curves, "step")
    data = {
        "suggested": chosen, "rate": rate, "planned": planned,
        "runs": {warmup: asdict(run) | {"loss": run.loss, "largest_norm": run.largest_norm}
                 for warmup, run in runs.items()},
    }  # fmt: skip
    return InspectionReport("Warm-up calibration", conclusions, data, columns, rows, [figure])


def spread_rates(first: float, last: float, points: int) -> Sequence[float]:
    """Rates evenly spaced in the logarithm."""
    return [float(f"{first * (last / first) ** (i / (points - 1)):.3g}") for i in range(points)]
