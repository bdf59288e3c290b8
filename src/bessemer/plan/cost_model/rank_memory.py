"""Memory of the processes of a layout: of the stage that holds most, from the model's own structure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from bessemer.plan.cost_model.memory import Passes, activation_bytes, head_bytes, layer_bytes
from bessemer.plan.search.layout import Layout
from bessemer.spec.optimizer import ParameterBytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.shape import ModelShape, parts

BUCKET = 25 << 20  # of DDP, sent and being filled
GATHERED = 2  # layers of a divided model that are whole at a time: the present one and the next
# Beside what torch's allocator counts: the CUDA context, NCCL's buffers and cuBLAS workspaces.
CONTEXT, CHANNEL = 600 << 20, 64 << 20
FRAGMENTS = 0.02  # of what is allocated, lost between blocks with expandable segments


@dataclass(frozen=True)
class RankNeeds:
    """Bytes on the fullest process at its peak. `outside` is not seen by torch's allocator."""

    weights: int
    gradients: int
    moments: int
    gathered: int  # layers made whole for computing, and copies in the type of the passes
    activations: int
    head: int
    workspace: int
    communication: int
    fragments: int
    outside: int
    stage: int = 0

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` would say."""
        return self.total - self.outside - self.fragments

    @property
    def total(self) -> int:
        return sum(getattr(self, key) for key in _SIZES)

    def words(self) -> str:
        """What takes it, the largest first."""
        found = sorted(((key, size) for key, size in asdict(self).items() if key != "stage"), key=lambda item: -item[1])
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in found if size)


_SIZES = tuple(field.name for field in fields(RankNeeds) if field.name != "stage")


@dataclass(frozen=True)
class Weights:
    """Parameters of a model where a layout puts them apart."""

    block: float  # of a layer, without experts
    experts: float  # of a layer
    before: int  # embeddings
    behind: int  # head and last norm

    @staticmethod
    @lru_cache(maxsize=64)  # a search asks thousands of times
    def of(shape: ModelShape) -> Weights:
        found = parts(shape)
        before = sum(found.get(key, 0) for key in ("embedding", "positions", "token types"))
        behind = found.get("head", 0)
        experts = found.get("experts", 0)
        layers = shape.layers + shape.decoder_layers
        inner = sum(found.values()) - before - behind - experts
        return Weights(inner / layers, experts / layers, before, behind)


def rank_needs(
    shape: ModelShape, layout: Layout, each: ParameterBytes, passes: Passes, micro_batches: int = 1,
    interleaved: int = 1, gpipe: bool = False,
) -> RankNeeds:  # fmt: skip
    """Of the fullest stage. `passes.context` is a whole row's; `passes.shards` is not read."""
    held = Weights.of(shape)
    found = [
        _stage(shape, held, layout, each, passes, stage, micro_batches, interleaved, gpipe)
        for stage in sorted({0, layout.pp // 2, layout.pp - 1})
    ]
    return max(found, key=lambda needs: needs.total)


def _stage(
    shape: ModelShape, held: Weights, layout: Layout, each: ParameterBytes, passes: Passes, stage: int,
    micro_batches: int, interleaved: int, gpipe: bool,
) -> RankNeeds:  # fmt: skip
    pp, tp = layout.pp, layout.tp
    first, last = stage == 0, stage == pp - 1
    layers = -(-(shape.layers + shape.decoder_layers) // pp)
    ends = held.before * first + held.behind * last + held.before * (last and pp > 1 and shape.tied)
    dense, experts = (held.block * layers + ends) / tp, held.experts * layers
    divided = layout.dp_shard * layout.cp
    own = dense / divided + experts / (layout.ep if layout.ep > 1 else divided)
    whole = divided == 1 and layout.ep == 1
    # Gradients of a divided model are whole one layer at a time, then added up and divided, in fp32.
    block = held.block / tp + (0 if layout.ep > 1 else held.experts)
    half = 2 if passes.bytes == 2 else 4
    if whole:
        gathered = each.working * own
    else:
        several = layers if pp > 1 else min(layers, GATHERED)  # a pipeline keeps its layers gathered
        gathered = half * (block * several + ends / tp) + 2 * half * block
    lean = replace(passes, context=passes.context // layout.cp) if layout.cp > 1 else passes
    kept = activation_bytes(shape, lean) / (shape.layers + shape.decoder_layers) * layers / tp
    flights = micro_batches if gpipe else min(micro_batches, pp - stage)
    kept *= max(1, flights) * (1 + (pp - 1) / (pp * interleaved) if interleaved > 1 else 1)
    gradients = (4.0 if passes.several and each.gradients else each.gradients) * own
    standing = {
        "weights": each.weights * own, "moments": each.moments * own, "gathered": gathered,
        "communication": 2 * BUCKET * (layout.dp_replicate > 1)
        + 4 * lean.tokens * shape.width * passes.bytes * (pp > 1),
    }  # fmt: skip
    at_loss = {
        "gradients": gradients if passes.several else 0.0, "activations": kept,
        "head": head_bytes(shape, lean, each.weights, tp) if last else 0,
        "workspace": 0 if last else layer_bytes(shape, lean) / tp,
    }  # fmt: skip
    again = layer_bytes(shape, lean) - activation_bytes(shape, lean) / (shape.layers + shape.decoder_layers)
    at_last = at_loss | {"head": 0, "workspace": max(0.0, again) / tp}
    at_end = {"gradients": gradients, "activations": 0.0, "head": 0, "workspace": layer_bytes(shape, lean) / tp}
    sums = standing | max(at_loss, at_last, at_end, key=lambda moment: sum(moment.values()))
    meetings = sum(degree > 1 for degree in (layout.dp_replicate, divided, tp, pp, layout.ep))
    return RankNeeds(
        **{key: int(value) for key, value in sums.items()},
        fragments=int(FRAGMENTS * sum(sums.values())), outside=CONTEXT + CHANNEL * meetings, stage=stage,
    )  # fmt: skip
