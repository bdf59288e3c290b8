"""A slice of the loss landscape along random directions, filter-normalised (Li et al. 2018): comparable between models.

Each point costs a forward pass over the steps. The weights are kept once more, in the place that gradients have in
training; directions are drawn anew from their seed for every point, one tensor at a time, and cost no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import xxhash
from torch import Tensor

from bessemer.diagnose.report import InspectedModel, InspectionReport, loss_of
from bessemer.observe.figure import Figure, Heat, Lines


@dataclass(frozen=True)
class LossSlice:
    """Loss at w + a d1 (`line`) and at w + a d1 + b d2 (`grid[j][i]` at a = offsets[i], b = offsets[j])."""

    offsets: list[float]
    line: list[float]
    grid_offsets: list[float]
    grid: list[list[float]]
    centre: float
    curvature: float | None  # second derivative along d1 at the centre; None where the loss there is not finite


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
def kept_weights(subject: InspectedModel) -> Iterator[dict[str, Tensor]]:
    """A copy of the weights; the model has exactly these bits again at the end, also after a failure."""
    kept = {name: p.detach().clone() for name, p in subject.named()}
    try:
        yield kept
    finally:
        with torch.no_grad():
            for name, parameter in subject.named():
                parameter.copy_(kept[name])


@torch.no_grad()
def cut(
    subject: InspectedModel, steps: list[int], reach: float = 1.0, points: int = 21, grid: int = 11, seed: int = 0
) -> LossSlice:
    """`reach` 1 goes as far as the weights are long. An odd number of points has the centre among them."""
    line_at, grid_at = _offsets(reach, points), _offsets(reach, grid)
    with kept_weights(subject) as kept:

        def loss_at(a: float, b: float) -> float:
            for name, parameter in subject.named():
                weight = kept[name]
                moved = weight.float() + a * direction(weight, name, 2 * seed)
                if b:
                    moved += b * direction(weight, name, 2 * seed + 1)
                parameter.copy_(moved if a or b else weight)
            return loss_of(subject, steps)

        centre = loss_at(0.0, 0.0)
        line = [loss_at(a, 0.0) for a in line_at]
        surface = [[loss_at(a, b) for a in grid_at] for b in grid_at]
        small = 0.05 * reach
        curvature = (loss_at(small, 0.0) - 2 * centre + loss_at(-small, 0.0)) / small**2
    return LossSlice(line_at, line, grid_at, surface, centre, curvature if math.isfinite(curvature) else None)


def _offsets(reach: float, points: int) -> list[float]:
    return [reach * (2 * i - (points - 1)) / max(1, points - 1) for i in range(points)]


def report(found: LossSlice, where: str) -> InspectionReport:
    values = [*found.line, *(value for row in found.grid for value in row)]
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=found.centre)
    said = [f"Loss {found.centre:.4f} at the weights, {low:.4f} to {max(finite, default=low):.4f} around them."]
    if found.curvature is not None:
        said.append(f"Curvature along the first direction: {found.curvature:.3g}.")
    if low < found.centre - 0.01 * abs(found.centre):
        said.append("A random direction leads downhill: the weights are not at the bottom of a valley yet.")
    if bad := len(values) - len(finite):
        said.append(f"{bad} of {len(values)} points are not finite and are left out.")
    label = "offset, in lengths of each row of the weights"
    figures: list[Figure] = [Lines("Loss along one direction", found.offsets, {"loss": found.line}, label)]
    if found.grid:
        at = found.grid_offsets
        figures.append(Heat("Loss over two directions", at, at, found.grid, label))
    return InspectionReport(f"Loss landscape, {where}", said, asdict(found), figures=figures)
