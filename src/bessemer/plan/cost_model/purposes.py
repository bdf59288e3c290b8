"""Memory of what a model is used for: training, adapters (LoRA, QLoRA), preferences (DPO), PPO's four models, and
inference with its cache. Each is the arithmetic of `per_rank.py` for the model that learns, and what stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, layer_bytes
from bessemer.plan.cost_model.rank_memory import CHANNEL, CONTEXT, FRAGMENTS, GATHERED, RankNeeds, Weights, rank_needs
from bessemer.plan.hardware import Cluster, parse_cluster
from bessemer.plan.recipe.fine_tuning import MODULES, NF4_BYTES, lora_parameters, matrix_sides
from bessemer.plan.search.layout import Layout
from bessemer.plan.search.search import USABLE
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec, ParameterBytes, optimizer_bytes
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape, cache_bytes

Use = Literal["training", "lora", "qlora", "dpo", "ppo", "inference"]
HALF = 2.0  # bytes of a weight that is only read
RANK = 32  # of adapters, as usual for instructions
FROZEN = ParameterBytes(HALF, 0.0, 0.0, 0.0, 0.0)
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
MOST_ROWS = 1024
PREFILL = 8192  # tokens of prompts that an engine reads at a time, as vLLM does
SERVED: dict[str, float] = {"bf16": HALF, "fp16": HALF, "fp8": 1.0, "int4": NF4_BYTES}


@dataclass(frozen=True)
class Purpose:
    """What one GPU holds at the fullest moment, by name; `notes` say what the numbers rest on."""

    use: Use
    parts: dict[str, int]
    moment: str
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def words(self) -> str:
        found = sorted(self.parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in found if size)


def purpose_needs(
    use: Use, shape: ModelShape, layout: Layout, passes: Passes, rank: int = RANK, served: str = "bf16",
    each: ParameterBytes | None = None,
) -> Purpose:  # fmt: skip
    """Of a GPU of the layout. A row of DPO is a pair, of PPO a rollout, of inference a conversation; each is as long as
    the context. `served` is how weights are kept for inference."""
    each = each or optimizer_bytes(OptimizerSpec(), MemorySpec(), passes.precision)
    if use == "training":
        return _of(use, rank_needs(shape, layout, each, passes))
    if use in ("lora", "qlora"):
        return _adapters(use, shape, layout, passes, rank, each)
    if use == "dpo":
        pairs = replace(passes, rows=2 * passes.rows)
        policy = _of(use, rank_needs(shape, layout, each, pairs), "a row is a pair: chosen and rejected pass together")
        note = "a reference whose numbers are computed before leaves this room free"
        return _beside(policy, {"reference": _frozen(shape, layout)}, note)
    if use == "ppo":
        return _ppo(shape, layout, passes, each)
    return _inference(shape, layout, passes, served)


def _of(use: Use, needs: RankNeeds, *notes: str) -> Purpose:
    beside = needs.head + needs.workspace + needs.communication + needs.fragments + needs.outside
    parts = {
        "weights": needs.weights, "gradients": needs.gradients, "moments": needs.moments,
        "gathered": needs.gathered, "activations": needs.activations, "the rest": beside,
    }  # fmt: skip
    return Purpose(use, parts, "at the loss" if needs.activations else "at the end of the backward pass", notes)


def _beside(one: Purpose, more: dict[str, int], *notes: str) -> Purpose:
    return replace(one, parts=one.parts | more, notes=(*one.notes, *notes))


def _frozen(shape: ModelShape, layout: Layout) -> int:
    """A model that is only read, in 16 bits, divided as the others are; it is gathered in its turn."""
    held = Weights.of(shape)
    whole = HALF * GATHERED * (held.block + held.experts) / layout.tp if layout.dp_shard * layout.cp > 1 else 0.0
    return int(HALF * shape.parameters / layout.held + whole)


def _adapters(
    use: Use, shape: ModelShape, layout: Layout, passes: Passes, rank: int, each: ParameterBytes
) -> Purpose:  # fmt: skip
    """Frozen weights in 16 or 4 bits; only adapters have gradients and moments. Inputs of every adapted matrix are kept
    as in training, and of each adapter its narrow middle."""
    found = rank_needs(shape, layout, FROZEN, passes)
    size = lora_parameters(shape, rank)
    adapters = (each.weights + max(4.0, each.gradients) + each.moments + each.working) * size
    middle = rank * len(MODULES) * (shape.layers + shape.decoder_layers) * passes.tokens * passes.bytes
    if passes.activations == "full":
        middle //= shape.layers + shape.decoder_layers  # of the one layer that is computed again
    embedding = shape.vocab * shape.width // layout.tp
    needs = replace(
        found, head=max(0, found.head - embedding * (4 + 2 * (passes.bytes == 2))),  # its weight has no gradient
        activations=found.activations + middle // (layout.tp * layout.cp),
    )  # fmt: skip
    notes = [f"adapters of rank {rank}: {human_count(size)} parameters ({size / shape.parameters:.1%})"]
    more = {"adapters": int(adapters / layout.held)}
    if use == "qlora":
        ends = Weights.of(shape)
        inner = (shape.parameters - ends.before - ends.behind) / layout.held
        largest = max(into * out for into, out in matrix_sides(shape).values())
        saved = int((HALF - NF4_BYTES) * inner)
        needs = replace(needs, weights=needs.weights - saved, workspace=needs.workspace + int(HALF * largest))
        notes.append("layers in NF4 with double quantisation, 0.516 bytes each (Dettmers et al. 2023); ends in 16 bits")
    return _beside(_of(use, needs, *notes), more)


def _ppo(shape: ModelShape, layout: Layout, passes: Passes, each: ParameterBytes) -> Purpose:
    """Policy and critic learn, reference and reward model are read. The fullest moment is an update, or a rollout with
    its cache, when nobody has activations or gradients."""
    update = _of("ppo", rank_needs(shape, layout, each, passes))
    frozen = {"reference": _frozen(shape, layout), "reward model": _frozen(shape, layout)}
    standing = int((each.weights + each.moments) * shape.parameters / layout.held)
    note = "four models of one size; policy and critic are updated in turn, so that one of them has gradients"
    updating = _beside(update, {"critic": standing} | frozen, note)
    cache = passes.rows * cache_bytes(shape, passes.context) // layout.tp
    written = int(HALF * shape.parameters / layout.tp)  # what generates is whole on each replica
    rolling = Purpose(
        "ppo", {"weights": standing, "generating": written, "cache": cache, "critic": standing, **frozen,
                "the rest": CONTEXT + CHANNEL + layer_bytes(shape, replace(passes, activations="none"))},
        "while it answers", (note,),
    )  # fmt: skip
    return max(updating, rolling, key=lambda one: one.total)


def _inference(shape: ModelShape, layout: Layout, passes: Passes, served: str) -> Purpose:
    """Weights divided by tensors, the cache up to the number of key-value heads, and one layer of a prompt's chunk."""
    tp = layout.tp
    weights = SERVED[served] * shape.parameters
    if served == "int4":  # ends stay in 16 bits
        ends = Weights.of(shape)
        weights += (HALF - NF4_BYTES) * (ends.before + ends.behind)
    shared = min(tp, shape.kv_heads) if shape.mla is None else 1  # a latent waist is whole on each
    cache = passes.rows * cache_bytes(shape, passes.context) // shared
    chunk = replace(passes, rows=1, context=min(PREFILL, passes.rows * passes.context), activations="none")
    logits = passes.rows * shape.vocab * 4 // tp
    own = {"weights": int(weights / tp), "cache": cache, "a layer": layer_bytes(shape, chunk) // tp, "logits": logits}
    rest = int(FRAGMENTS * sum(own.values())) + CONTEXT + CHANNEL * (tp > 1)
    each = cache_bytes(shape, passes.context)
    note = f"a conversation of {passes.context:,} tokens keeps {human_bytes(each)}; weights in {served}"
    return Purpose("inference", own | {"the rest": rest}, "while a prompt is read", (note,))


@dataclass(frozen=True)
class PurposeFit:
    """The most rows that fit, with the least that is computed again; `fits` is False where not even one does."""

    shape: ModelShape
    cluster: Cluster
    layout: Layout
    rows: int
    context: int
    activations: str
    needs: Purpose
    fits: bool


def check_use(use: str) -> Use:
    if use not in get_args(Use):
        raise UserError(f"--for {use}: write {', '.join(get_args(Use))}")
    return use  # type: ignore[return-value]


def fit_purpose(
    use: Use, shape: ModelShape, gpus: str | Cluster, context: int, rank: int = RANK, precision: str = "bf16"
) -> PurposeFit:  # fmt: skip
    """On these GPUs: whole on each if it fits, else divided among all of them. Serving takes what holds the most
    conversations for each GPU."""
    known = tuple(SERVED) if use == "inference" else ("bf16", "fp16", "fp8", "tf32", "fp32")
    if precision not in known:
        raise UserError(f"--precision {precision}: for {use} write {', '.join(known)}")
    cluster = parse_cluster(gpus) if isinstance(gpus, str) else gpus
    limit = USABLE * cluster.gpu.memory_bytes
    served = precision if precision in SERVED else "bf16"
    computed = "bf16" if precision == "int4" else precision
    smallest: PurposeFit | None = None
    held: list[PurposeFit] = []
    for layout in _layouts(use, shape, cluster):
        for how in MODES[:1] if use == "inference" else MODES:
            best: PurposeFit | None = None
            rows = 1
            while rows <= MOST_ROWS:
                passes = Passes(context, rows, computed, how, not (shape.moe or shape.mamba), "cuda", several=True)
                needs = purpose_needs(use, shape, layout, passes, rank, served)
                found = PurposeFit(shape, cluster, layout, rows, context, how, needs, needs.total <= limit)
                if smallest is None or needs.total < smallest.needs.total:
                    smallest = found
                if not found.fits:
                    break
                best, rows = found, rows * 2
            if best and use != "inference":
                return best
            held += [best] if best else []
    assert smallest is not None
    return max(held, key=lambda one: one.rows / one.layout.tp, default=smallest)


def _layouts(use: Use, shape: ModelShape, cluster: Cluster) -> Iterator[Layout]:
    if use == "inference":
        for split in (1, 2, 4, 8, 16):
            if split <= cluster.count and shape.heads % split == 0:
                yield Layout(tp=split)
        return
    yield Layout(dp_replicate=cluster.count)
    if cluster.count > 1:
        yield Layout(dp_shard=cluster.count)


def purpose_lines(found: PurposeFit) -> list[str]:
    needs, gpu = found.needs, found.cluster.gpu
    divided = found.layout.dp_shard * found.layout.tp
    how = f"divided among {divided}" if divided > 1 else "whole on each"
    rows = {"dpo": "pairs", "ppo": "rollouts", "inference": "conversations"}.get(needs.use, "rows")
    again = "" if needs.use == "inference" else f", recompute {found.activations}"
    head = f"{human_count(found.shape.parameters)} parameters for {needs.use} on {found.cluster}"
    size = f"{human_bytes(needs.total)} of {human_bytes(gpu.memory_bytes)} on each GPU, {needs.moment}"
    shown = [head, "", f"  layout  {how}, {found.rows} {rows} of {found.context:,} tokens at a time{again}"]
    shown.append(f"  memory  {size}")
    shown.append(f"          {needs.words()}")
    shown += [f"  note    {note}" for note in needs.notes]
    if not found.fits:
        lack = needs.total - USABLE * gpu.memory_bytes
        shown.append(f"  short   by {human_bytes(lack)} at one row: {_instead(found)}")
    return shown


def _instead(found: PurposeFit) -> str:
    ways = {
        "training": "lora, qlora or more GPUs", "dpo": "lora (its base is the reference) or more GPUs",
        "ppo": "more GPUs, or a smaller critic and reward model", "lora": "qlora or more GPUs",
        "qlora": "a larger GPU or a shorter --context", "inference": "--precision int4, or more GPUs",
    }  # fmt: skip
    return f"take {ways[found.needs.use]}"


def purpose_json(found: PurposeFit) -> dict[str, Any]:
    return {
        "for": found.needs.use, "parameters": found.shape.parameters, "gpus": str(found.cluster),
        "context": found.context, "rows": found.rows, "activations": found.activations, "fits": found.fits,
        "layout": {"dp_replicate": found.layout.dp_replicate, "dp_shard": found.layout.dp_shard, "tp": found.layout.tp},
        "memory_bytes": found.needs.parts | {"total": found.needs.total}, "moment": found.needs.moment,
        "notes": list(found.needs.notes),
    }  # fmt: skip
