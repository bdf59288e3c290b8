"""Where in the model the trouble starts: outputs of the modules and gradients of the parameters, bad against normal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.data.stream.batches import Batch
from bessemer.optim.low_memory import place_of
from bessemer.parallel.shard import local
from bessemer.train.engine import Engine
from bessemer.trial.case import LayerEvidence
from bessemer.trial.measure import run_pass

NOTABLE = 1.5  # times the normal value
MOST = 5


@dataclass(frozen=True)
class LayerSample:
    """One pass seen from inside: (rms, largest, non-finite) of each module's output in the order they ran first, and
    the gradient norm of each parameter."""

    outputs: dict[str, tuple[float, float, float]]
    gradients: dict[str, float]


@contextmanager
def _watching(model: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Collects (sum of squares, finite, largest, non-finite) of each module's output, still on the device."""

    def hook(name: str) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.is_floating_point():
                values = local(output.detach()).float()
                finite = values.isfinite()
                clean, count = torch.where(finite, values, 0.0), finite.sum().float()
                numbers = (clean.square().sum(), count, clean.abs().max(), values.numel() - count)
                seen.setdefault(name, []).append(torch.stack(numbers))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def look(engine: Engine, batches: Sequence[Batch]) -> LayerSample:
    """One pass over the batches with eyes open. Inner modules come before those that hold them."""
    seen: dict[str, list[Tensor]] = {}
    engine.discard_gradients()
    try:
        with _watching(engine.model, seen):
            run_pass(engine, batches)
        named = [(name, p.grad) for name, p in engine.model.named_parameters() if p.grad is not None]
        norms = {name: torch.linalg.vector_norm(local(gradient).float()).item() for name, gradient in named}
    finally:
        engine.discard_gradients()
    sums: dict[str, list[float]] = {}
    # Of several processes each saw its own rows: a line for each of their micro-batches.
    for lines in engine.world.gather({name: torch.stack(notes).tolist() for name, notes in seen.items()}):
        for name, table in lines.items():
            for squares, count, largest, bad in table:
                known = sums.setdefault(name, [0.0, 0.0, 0.0, 0.0])
                sums[name] = [known[0] + squares, known[1] + count, max(known[2], largest), known[3] + bad]
    outputs = {name: (math.sqrt(s / max(1.0, count)), largest, bad) for name, (s, count, largest, bad) in sums.items()}
    squares_of = {name: norm**2 for name, norm in norms.items()}
    return LayerSample(outputs, {name: math.sqrt(square) for name, square in sum_of_parts(engine, squares_of).items()})


def sum_of_parts(engine: Engine, numbers: Mapping[str, float]) -> dict[str, float]:
    """Sums over whole parameters of what each process has summed over its part; what several hold counts once."""
    places = {name: place_of(parameter).first for name, parameter in engine.model.named_parameters()}
    parts: dict[str, dict[int, float]] = {}
    for found in engine.world.gather({(name, places[name]): number for name, number in numbers.items()}):
        for (name, first), number in found.items():
            parts.setdefault(name, {})[first] = number
    return {name: sum(known.values()) for name, known in parts.items()}


def _ratio(value: float, normal: float) -> float:
    if not math.isfinite(value):
        return math.inf
    return value / normal if normal > 0 and math.isfinite(normal) else math.inf if value > 0 else 0.0


def compare(bad: LayerSample, normal: LayerSample) -> list[LayerEvidence]:
    """The first module with non-finite outputs, or the first that is notably off and the one that is most; then the
    parameters whose gradients grew most."""
    layers = []
    for name, (_, _, count) in bad.outputs.items():
        if count:
            usual = normal.outputs.get(name, (0.0, 0.0, 0.0))[2]
            layers.append(LayerEvidence(name, "non-finite outputs", count, usual))
            break
    for place, quantity in enumerate(("output rms", "largest output")):
        ratios = {
            name: _ratio(values[place], normal.outputs[name][place])
            for name, values in bad.outputs.items()
            if name in normal.outputs
        }
        worst = max(ratios, key=lambda name: ratios[name], default="")
        if layers or not worst or ratios[worst] < NOTABLE:
            continue
        first = next(name for name in ratios if ratios[name] >= max(NOTABLE, ratios[worst] ** 0.5))
        for name in dict.fromkeys((first, worst)):
            layers.append(LayerEvidence(name, quantity, bad.outputs[name][place], normal.outputs[name][place]))
    growth = {name: _ratio(norm, normal.gradients.get(name, 0.0)) for name, norm in bad.gradients.items()}
    for name in sorted(growth, key=lambda name: -growth[name])[:MOST]:
        if growth[name] >= NOTABLE:
            layers.append(LayerEvidence(name, "gradient norm", bad.gradients[name], normal.gradients.get(name, 0.0)))
    return layers


def damaged_weights(engine: Engine) -> list[LayerEvidence]:
    """Tensors that hold NaN or Inf, with how many."""
    named = [(name, local(parameter.detach())) for name, parameter in engine.model.named_parameters()]
    counts = torch.stack([(~weight.isfinite()).sum() for _, weight in named]).tolist()
    found = sum_of_parts(engine, {name: float(count) for (name, _), count in zip(named, counts, strict=True)})
    return [LayerEvidence(name, "non-finite weights", count, 0.0) for name, count in found.items() if count]
