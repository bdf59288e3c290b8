"""Estimates the memory of the fullest process of a parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from bessemer.plan.cost_model.memory import Passes, activation_bytes, head_bytes, layer_bytes
from bessemer.plan.search.layout import Layout
from bessemer.spec.optimizer import ParameterBytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.shape import ModelShape, parts

BUCKET = 25 << 20  # of DDP: one is sent while another fills
GATHERED = 2  # layers of a sharded model that are gathered at a time: the current one and the next
# Not counted by torch's allocator: the CUDA context, NCCL's buffers and cuBLAS workspaces.
CONTEXT, CHANNEL = 600 << 20, 64 << 20
FRAGMENTS = 0.02  # of the allocated memory, lost to fragmentation with expandable segments


@dataclass(frozen=True)
class RankNeeds:
    """Bytes on the fullest process at its peak. torch's allocator does not count `outside`."""

    weights: int
    gradients: int
    moments: int
    gathered: int  # gathered layers, and copies of weights in the compute precision
    activations: int
    head: int
    workspace: int
    communication: int
    fragments: int
    outside: int
    stage: int = 0

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` reports."""
        return self.total - self.outside - self.fragments

    @property
    def total(self) -> int:
        return sum(getattr(self, key) for key in _SIZES)

    def words(self) -> str:
        """The parts, largest first."""
        parts = sorted(((key, getattr(self, key)) for key in _SIZES), key=lambda item: -item[1])
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in parts if size)


_SIZES = tuple(field.name for field in fields(RankNeeds) if field.name != "stage")


@dataclass(frozen=True)
class Weights:
    """Parameter counts of the parts of a model that a layout places separately."""

    block: float  # per layer, without experts
    experts: float  # per layer
    before: int  # embeddings
    behind: int  # head and last norm

    @staticmethod
    @lru_cache(maxsize=64)  # a search calls it thousands of times
    def of(shape: ModelShape) -> Weights:
        counts = parts(shape)
        before = sum(counts.get(key, 0) for key in ("embedding", "positions", "token types"))
        behind = counts.get("head", 0)
        experts = counts.get("experts", 0)
        layers = shape.layers + shape.decoder_layers
        inner = sum(counts.values()) - before - behind - experts
        return Weights(inner / layers, experts / layers, before, behind)


def rank_needs(
    shape: ModelShape, layout: Layout, each: ParameterBytes, passes: Passes, micro_batches: int = 1,
    interleaved: int = 1,
) -> RankNeeds:  # fmt: skip
    """Memory of the fullest pipeline stage. `passes.context` is that of a full row; `passes.shards` is ignored."""
    weights = Weights.of(shape)
    stages = [
        _stage_needs(shape, weights, layout, each, passes, stage, micro_batches, interleaved)
        for stage in sorted({0, layout.pp // 2, layout.pp - 1})
    ]
    return max(stages, key=lambda needs: needs.total)


def _stage_needs(
    shape: ModelShape, weights: Weights, layout: Layout, each: ParameterBytes, passes: Passes, stage: int,
    micro_batches: int, interleaved: int,
) -> RankNeeds:  # fmt: skip
    pp, tp = layout.pp, layout.tp
    first, last = stage == 0, stage == pp - 1
    layers = -(-(shape.layers + shape.decoder_layers) // pp)
    ends = weights.before * first + weights.behind * last + weights.before * (last and pp > 1 and shape.tied)
    dense, experts = (weights.block * layers + ends) / tp, weights.experts * layers
    divided = layout.dp_shard * layout.cp
    held = dense / divided + experts / (layout.ep if layout.ep > 1 else divided)
    # A sharded model has the full gradients of one layer at a time, which are then reduced and scattered in fp32.
    block = weights.block / tp + (0 if layout.ep > 1 else weights.experts)
    half = 2 if passes.bytes == 2 else 4
    if divided == 1 and layout.ep == 1:
        gathered = each.working * held
    else:
        at_once = layers if pp > 1 else min(layers, GATHERED)  # a pipeline keeps its layers gathered
        gathered = half * (block * at_once + ends / tp) + 2 * half * block
    local = replace(passes, context=passes.context // layout.cp) if layout.cp > 1 else passes
    saved = activation_bytes(shape, local) / (shape.layers + shape.decoder_layers) * layers / tp
    saved *= max(1, min(micro_batches, pp - stage)) * (1 + (pp - 1) / (pp * interleaved) if interleaved > 1 else 1)
    gradients = (4.0 if passes.several and each.gradients else each.gradients) * held
    constant = {
        "weights": each.weights * held, "moments": each.moments * held, "gathered": gathered,
        "communication": 2 * BUCKET * (layout.dp_replicate > 1)
        + 4 * local.tokens * shape.width * passes.bytes * (pp > 1),
    }  # fmt: skip
    at_loss = {
        "gradients": gradients if passes.several else 0.0, "activations": saved,
        "head": head_bytes(shape, local, each.weights, tp) if last else 0,
        "workspace": 0 if last else layer_bytes(shape, local) / tp,
    }  # fmt: skip
    recomputed = layer_bytes(shape, local) - activation_bytes(shape, local) / (shape.layers + shape.decoder_layers)
    at_last = at_loss | {"head": 0, "workspace": max(0.0, recomputed) / tp}
    at_end = {"gradients": gradients, "activations": 0.0, "head": 0, "workspace": layer_bytes(shape, local) / tp}
    sums = constant | max(at_loss, at_last, at_end, key=lambda moment: sum(moment.values()))
    groups = sum(degree > 1 for degree in (layout.dp_replicate, divided, tp, pp, layout.ep))
    return RankNeeds(
        **{key: int(value) for key, value in sums.items()},
        fragments=int(FRAGMENTS * sum(sums.values())), outside=CONTEXT + CHANNEL * groups, stage=stage,
    )  # fmt: skip
