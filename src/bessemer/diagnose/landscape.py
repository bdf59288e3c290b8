"""How the loss reacts to moves of the weights (a slice of the loss landscape) and to the learning rate (range test).

The slice follows random directions, filter-normalised (Li et al. 2018), so that models compare. Each point costs a
forward pass over the steps. A copy of the weights takes the memory that training has for gradients; directions are
drawn from their seed for every point, one tensor at a time, and need no memory. The learning-rate range test (Smith
2015) trains while the rate rises exponentially, until the loss goes up again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import xxhash
from torch import Tensor

from bessemer.diagnose.report import InspectedModel, InspectionReport, mean_step_loss
from bessemer.observe.figure import Figure, Heatmap, LineChart


@dataclass(frozen=True)
class LossSlice:
    """Loss at w + a d1 (`line`) and at w + a d1 + b d2 (`grid[j][i]` at a = offsets[i], b = offsets[j])."""

    offsets: list[float]
    line: list[float]
    grid_offsets: list[float]
    grid: list[list[float]]
    centre: float
    curvature: float | None  # second derivative along d1 at the centre; None if the loss is not finite there


def direction(weight: Tensor, name: str, seed: int) -> Tensor:
    """Random, each row as long as the weight's row. Vectors (norms, biases) do not move."""
    if weight.ndim < 2:
        return torch.zeros_like(weight, dtype=torch.float32)
    generator = torch.Generator(device=weight.device)
    generator.manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)
    drawn = torch.randn(weight.shape, generator=generator, device=weight.device)
    rows, lengths = drawn.flatten(1), weight.detach().float().flatten(1).norm(dim=1, keepdim=True)
    return (rows * (lengths / rows.norm(dim=1, keepdim=True).clamp_min(1e-30))).view_as(drawn)


@contextmanager
def preserve_weights(subject: InspectedModel) -> Iterator[dict[str, Tensor]]:
    """Yields a copy of the weights and restores exactly these bits at the end, also after an error."""
    copies = {name: p.detach().clone() for name, p in subject.trainable()}
    try:
        yield copies
    finally:
        with torch.no_grad():
            for name, parameter in subject.trainable():
                parameter.copy_(copies[name])


@torch.no_grad()
def slice_loss(
    subject: InspectedModel, steps: list[int], reach: float = 1.0, points: int = 21, grid: int = 11, seed: int = 0
) -> LossSlice:
    """`reach` 1 moves as far as the weights are long. An odd number of points includes the centre."""
    line_at, grid_at = _offsets(reach, points), _offsets(reach, grid)
    with preserve_weights(subject) as weights:

        def loss_at(a: float, b: float) -> float:
            for name, parameter in subject.trainable():
                weight = weights[name]
                moved = weight.float() + a * direction(weight, name, 2 * seed)
                if b:
                    moved += b * direction(weight, name, 2 * seed + 1)
                parameter.copy_(moved if a or b else weight)
            return mean_step_loss(subject, steps)

        centre = loss_at(0.0, 0.0)
        line = [loss_at(a, 0.0) for a in line_at]
        surface = [[loss_at(a, b) for a in grid_at] for b in grid_at]
        small = 0.05 * reach
        curvature = (loss_at(small, 0.0) - 2 * centre + loss_at(-small, 0.0)) / small**2
    return LossSlice(line_at, line, grid_at, surface, centre, curvature if math.isfinite(curvature) else None)


def _offsets(reach: float, points: int) -> list[float]:
    return [reach * (2 * i - (points - 1)) / max(1, points - 1) for i in range(points)]


def landscape_report(loss_slice: LossSlice, label: str) -> InspectionReport:
    values = [*loss_slice.line, *(value for row in loss_slice.grid for value in row)]
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=loss_slice.centre)
    conclusions = [
        f"Loss {loss_slice.centre:.4f} at the weights, {low:.4f} to {max(finite, default=low):.4f} around them."
    ]
    if loss_slice.curvature is not None:
        conclusions.append(f"Curvature along the first direction: {loss_slice.curvature:.3g}.")
    if low < loss_slice.centre - 0.01 * abs(loss_slice.centre):
        conclusions.append("A random direction leads downhill: the weights are not at the bottom of a valley yet.")
    if bad := len(values) - len(finite):
        conclusions.append(f"{bad} of {len(values)} points are not finite and are left out.")
    x_label = "offset, in lengths of each row of the weights"
    figures: list[Figure] = [
        LineChart("Loss along one direction", loss_slice.offsets, {"loss": loss_slice.line}, x_label)
    ]
    if loss_slice.grid:
        at = loss_slice.grid_offsets
        figures.append(Heatmap("Loss over two directions", at, at, loss_slice.grid, x_label))
    return InspectionReport(f"Loss landscape, {label}", conclusions, asdict(loss_slice), figures=figures)


@dataclass(frozen=True)
class LrSweep:
    """Rates with the loss before each update, and the suggested rate; a point that does not exist is None."""

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
    means = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        means.append(sum(values[i - side : i + side + 1]) / (2 * side + 1))
    return means


def divergence_limit(smoothed: list[float]) -> float:
    """Above it the run has diverged: a quarter of the gain is lost again, and a tenth of the best loss."""
    best = min(smoothed)
    return best + max(0.25 * (smoothed[0] - best), 0.1 * abs(best))


def run_lr_range_test(
    attempt: Callable[[int, float], float],
    first: float = 1e-6,
    last: float = 10.0,
    steps: int = 200,
    reach: int | None = None,
) -> LrSweep:
    """`attempt(i, rate)` runs the i-th update with that rate and returns the loss before it.

    Costs at most `steps` training steps: it stops once the loss stays above the limit or is not finite.
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
        above = above + 1 if i > 2 * reach and settled[-1] > divergence_limit(settled) else 0
        if above > 2 * reach:
            break
    return _evaluate_sweep(rates, losses, reach)


def _evaluate_sweep(rates: list[float], losses: list[float], reach: int) -> LrSweep:
    finite = [loss for loss in losses if math.isfinite(loss)]
    smoothed = smooth(finite, reach)
    if len(smoothed) < 3:
        return LrSweep(rates, losses, smoothed, None, rates[-1], None, "the loss is not finite at the lowest rates")
    lowest = smoothed.index(min(smoothed))
    beyond = [i for i in range(lowest, len(smoothed)) if smoothed[i] > divergence_limit(smoothed)]
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


def lr_range_report(sweep: LrSweep, planned: float) -> InspectionReport:
    """`planned` is the rate of the spec or the plan."""
    conclusions = [f"No suggestion: {sweep.reason}."]
    if sweep.suggested is not None:
        conclusions = [f"Suggested peak learning rate: {sweep.suggested:.2g} ({sweep.reason})."]
    beyond = sweep.diverged is not None and planned >= sweep.diverged
    conclusions.append(
        f"The run has {planned:.2g}" + (": above the rate at which this test diverged." if beyond else ".")
    )
    points = {"steepest": sweep.steepest, "suggested": sweep.suggested, "diverged": sweep.diverged}
    marks = {name: value for name, value in points.items() if value is not None}
    count = len(sweep.smoothed)
    series = {"loss": sweep.losses[:count], "smoothed": sweep.smoothed}
    figure = LineChart("Loss", sweep.rates[:count], series, "learning rate", log_x=True, marks=marks)
    return InspectionReport(
        "Learning-rate range test", conclusions, {**asdict(sweep), "asked": planned}, figures=[figure]
    )
