"""Which layers each stage of a pipeline holds, by what they cost on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bessemer.model.sight import Sight
from bessemer.model.transformer import build
from bessemer.parallel.world import World
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.plan.layout import stages_each
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import synchronize
from bessemer.train.loss import linear_cross_entropy
from bessemer.train.precision import compute_in

REPEATS = 3
TOKENS = 8192  # of a measurement: enough to fill a device


def cut_layers(costs: Sequence[float], stages: int, before: float = 0.0, behind: float = 0.0) -> list[range]:
    """Which layers each stage holds such that the dearest stage is as cheap as can be; every stage has one at least.
    `before` and `behind` are what the first and the last stage pay besides (embedding, head)."""
    layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(first: int, last: int, stage: int) -> float:
        return sums[last] - sums[first] + before * (stage == 0) + behind * (stage == stages - 1)

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        left = stages - stage - 1
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (worst, ends) in best.items():
            for last in range(first + 1, layers - left + 1):
                dearest = max(worst, price(first, last, stage))
                if last not in found or dearest < found[last][0]:
                    found[last] = (dearest, (*ends, last))
        best = found
    ends = best[layers][1]
    return [range(first, last) for first, last in zip((0, *ends), ends, strict=False)]


def decide_stages(spec: RunSpec, shape: ModelShape, training: TrainPlan, world: World, plan: Plan) -> tuple[range, ...]:
    """Cut where the dearest stage is cheapest; the first process measures, for all."""
    if world.layout.pp == 1:
        return ()
    kinds = [(shape.mixer(layer), shape.has_experts(layer)) for layer in range(shape.layers)]
    found = world.agree(_measure(shape, kinds, training, world.device) if world.main else None)
    assert found is not None
    costs, behind = found
    cuts = cut_layers([costs[kind] for kind in kinds], world.layout.pp * stages_each(spec), behind=behind)
    layer = max(costs.values())
    reason = f"a layer takes {layer * 1e3:.1f} ms forward and back, the head {behind * 1e3:.1f} ms"
    plan.add("parallel.pipeline.layers", ", ".join(str(len(cut)) for cut in cuts), reason, "measured")
    return tuple(cuts)


def _measure(
    shape: ModelShape, kinds: list[tuple[str, bool]], training: TrainPlan, device: torch.device
) -> tuple[dict[tuple[str, bool], float], float]:
    """Seconds of a forward and backward pass through a layer of each kind, and through the head."""
    rows = max(1, min(training.micro_rows, TOKENS // training.context))
    costs: dict[tuple[str, bool], float] = {}
    behind = 0.0
    for kind in dict.fromkeys(kinds):
        model = build(_alone(shape, kinds.index(kind)), device, 0)
        x_BTW = torch.randn(rows, training.context, shape.width, device=device, requires_grad=True)
        targets_R = torch.zeros(rows * training.context, dtype=torch.int64, device=device)
        place, block = model.place(x_BTW, Sight(causal=shape.causal)), model.blocks[-1]

        def layer() -> Tensor:
            out: Tensor = block(x_BTW, place, None)  # noqa: B023  called in this round alone
            return out.float().sum()

        def head() -> Tensor:
            weights_R = torch.ones_like(targets_R, dtype=torch.float32)  # noqa: B023
            hidden_RW = x_BTW.flatten(0, 1)  # noqa: B023
            return linear_cross_entropy(hidden_RW, model.head_weight, targets_R, weights_R, 1.0)[0]  # noqa: B023

        with compute_in(training.precision, device):
            costs[kind] = _fastest(layer, device)
            behind = behind or _fastest(head, device)
    return costs, behind


def _alone(shape: ModelShape, layer: int) -> ModelShape:
    """A model of layers up to this one has it last; most models have but one kind, and the first is it."""
    assert layer == 0 or not shape.decoder_layers
    return replace(shape, layers=layer + 1)


def _fastest(run, device: torch.device) -> float:  # type: ignore[no-untyped-def]
    best = float("inf")
    for _ in range(REPEATS):
        synchronize(device)
        began = time.perf_counter()
        run().backward()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
