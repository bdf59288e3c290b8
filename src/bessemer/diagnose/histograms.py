"""Distributions of weights, gradients and activations of every layer: the largest weight, zero gradients, units that
never fire, updates that bf16 weights would lose to rounding.

Costs a training step and one more copy of the weights, after the activations are freed. Histograms are counted on the
device, one tensor at a time: with 70B parameters that takes a few times the largest tensor in fp32. Histograms of
activations are of the first micro-batch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.diagnose.landscape import preserve_weights
from bessemer.diagnose.report import InspectedModel, InspectionReport, backward_step
from bessemer.observe.figure import Histogram
from bessemer.observe.format import sparkline

BINS = 32
DEAD = 1e-3  # of the layer's rms: a unit that never exceeds it on any token is dead


@dataclass(frozen=True)
class Distribution:
    """The histogram of a tensor and its key figures. Gradients are counted by log10 |g|."""

    name: str
    kind: str  # weight, gradient, activation
    low: float
    high: float
    counts: list[int]
    mean: float
    std: float
    largest: float  # |value|
    zeros: float  # share of exact zeros
    nonfinite: float  # share
    lost: float | None = None  # of a weight: share of its non-zero updates that bf16 rounding loses
    dead: int | None = None  # of an activation: units
    units: int | None = None


@torch.no_grad()
def measure_distribution(name: str, kind: str, tensor: Tensor, **more: Any) -> Distribution:
    """Reads the device once for the numbers and once for the counts."""
    values = tensor.detach().float().flatten()
    finite = values[values.isfinite()]
    if not finite.numel():
        return Distribution(name, kind, 0.0, 0.0, [], 0.0, 0.0, 0.0, 0.0, 1.0 if values.numel() else 0.0, **more)
    counted = finite[finite != 0].abs().log10() if kind == "gradient" else finite
    counted = counted if counted.numel() else finite
    ends, sizes = counted.aminmax(), finite.abs().amax()
    facts = (ends.min, ends.max, finite.mean(), finite.std(correction=0), sizes, (values == 0).sum())
    low, high, mean, std, largest, zeros = torch.stack(facts).tolist()
    counts = torch.histc(counted, BINS, min=low, max=high) if high > low else counted.new_tensor([counted.numel()])
    bad = 1 - finite.numel() / values.numel()
    bins = [int(count) for count in counts.tolist()]
    return Distribution(name, kind, low, high, bins, mean, std, largest, zeros / values.numel(), bad, **more)


def lost_to_bf16(weight: Tensor, update: Tensor) -> Tensor:
    """True where bf16(weight) + update, rounded to the nearest bf16 (ties to even), equals bf16(weight). An update of
    zero is not lost.

    The update is compared with half the distance to the neighbour on its side, which fp32 represents exactly. Adding in
    fp32 and rounding again would be wrong near ties.
    """
    rounded, change = weight.detach().to(torch.bfloat16), update.float()
    size = rounded.abs()
    bits = size.view(torch.int16)
    at = size.float()
    outer, inner = (bits + 1).view(torch.bfloat16).float() - at, at - (bits - 1).view(torch.bfloat16).float()
    # Zero has no smaller neighbour and the largest number no larger one: the other side is as far.
    inner = torch.where(bits == 0, outer, inner)
    outer = torch.where(outer.isfinite(), outer, inner)
    grows = (change > 0) == (rounded > 0)
    half = torch.where(grows, outer, inner) / 2
    even = bits % 2 == 0
    return (change != 0) & ((change.abs() < half) | ((change.abs() == half) & even))


@contextmanager
def watch_inputs(model: nn.Module, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `see(name, input)` for every module with own parameters and a floating-point input."""
    handles = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:

            def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                    see(name, inputs[0].detach())

            handles.append(module.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure_distributions(subject: InspectedModel, step: int, update: Callable[[], None]) -> list[Distribution]:
    """`update()` runs the optimizer's step; afterwards the weights are restored bit by bit."""
    first: dict[str, Distribution] = {}
    peaks: dict[str, Tensor] = {}  # largest |value| of every unit, over all tokens

    def see(name: str, value: Tensor) -> None:
        peak = value.abs().reshape(-1, value.shape[-1]).amax(0).float()
        peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak
        if name not in first:
            first[name] = measure_distribution(name, "activation", value)

    with watch_inputs(subject.model, see):
        backward_step(subject, step)
    distributions = []
    for name, one in first.items():
        scale = (one.mean**2 + one.std**2) ** 0.5
        dead = int((peaks[name] <= DEAD * scale).sum())
        distributions.append(replace(one, dead=dead, units=peaks[name].numel()))
    named = subject.trainable()
    distributions += [measure_distribution(name, "gradient", p.grad) for name, p in named if p.grad is not None]
    with preserve_weights(subject) as weights:
        update()
        for name, parameter in named:
            before = weights[name]
            change = parameter.detach().float() - before.float()
            lost, moved = int(lost_to_bf16(before, change).sum()), int((change != 0).sum())
            distributions.append(measure_distribution(name, "weight", before, lost=lost / moved if moved else None))
    subject.model.zero_grad(set_to_none=True)
    return distributions


def histogram_report(distributions: list[Distribution], label: str) -> InspectionReport:
    weights, gradients, activations = (
        [one for one in distributions if one.kind == kind] for kind in ("weight", "gradient", "activation")
    )
    largest = max(weights, key=lambda one: one.largest)
    conclusions = [f"Largest weight: {largest.largest:.4g} in {largest.name}."]
    zero = max(gradients, key=lambda one: one.zeros)
    conclusions.append(f"Zero gradients: at most {zero.zeros:.1%} of a tensor's, in {zero.name}.")
    if lost := [one for one in weights if one.lost is not None]:
        worst = max(lost, key=lambda one: one.lost or 0.0)
        mean = sum(one.lost or 0.0 for one in lost) / len(lost)
        conclusions.append(
            f"Were the weights kept in bf16, rounding would lose {mean:.1%} of the updates on average over tensors, "
            f"most in {worst.name} ({worst.lost:.1%}). Weights in fp32 lose none of these."
        )
    dead = [one for one in activations if one.dead]
    conclusions += [f"Dead units: {one.dead} of {one.units} inputs of {one.name} stay at zero." for one in dead[:8]]
    conclusions += [] if dead else ["No dead units."]
    bad = [one for one in distributions if one.nonfinite]
    conclusions += [f"! {one.nonfinite:.2%} of the {one.kind} of {one.name} is not finite." for one in bad]
    rows = [
        (
            f"{one.kind} {one.name}", one.largest, one.mean, one.std, f"{one.zeros:.1%}",
            None if one.lost is None else f"{one.lost:.1%}", one.dead, sparkline(one.counts, BINS),
        )
        for one in distributions
    ]  # fmt: skip
    columns = ("tensor", "max |x|", "mean", "std", "zero", "lost in bf16", "dead", "histogram")
    axis = {"weight": "weight", "gradient": "log10 |g|", "activation": "input of the module"}
    figures = [Histogram(f"{x.kind} {x.name}", x.low, x.high, x.counts, axis[x.kind]) for x in distributions]
    data = {"tensors": [asdict(one) for one in distributions]}
    return InspectionReport(f"Histograms, {label}", conclusions, data, columns, rows, figures, terminal_figures=0)
