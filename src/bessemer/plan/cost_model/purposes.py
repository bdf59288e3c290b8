"""Memory of a model in training, LoRA, QLoRA, DPO, PPO and inference: that of the trained model (rank_memory.py) and
of what each use adds. For `bessemer plan memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import (
    CHANNEL,
    CONTEXT,
    FRAGMENTS,
    GATHERED,
    Passes,
    RankNeeds,
    Weights,
    layer_bytes,
    rank_needs,
)
from bessemer.plan.hardware import Cluster, parse_cluster
from bessemer.plan.search.layout import Layout
from bessemer.plan.search.search import USABLE
from bessemer.spec.adapter import MODULES, NF4_BYTES, lora_parameters, matrix_sides
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec, ParameterBytes, optimizer_bytes
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape, cache_bytes

Use = Literal["training", "lora", "qlora", "dpo", "ppo", "inference"]
HALF = 2.0  # bytes of a frozen weight
RANK = 32  # of adapters, as usual for instruction tuning
FROZEN = ParameterBytes(HALF, 0.0, 0.0, 0.0, 0.0)
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
MOST_ROWS = 1024
PREFILL = 8192  # prompt tokens per step, as in vLLM
SERVED: dict[str, float] = {"bf16": HALF, "fp16": HALF, "fp8": 1.0, "int4": NF4_BYTES}


@dataclass(frozen=True)
class Purpose:
    """Bytes on one GPU at its peak, by part; `notes` state the assumptions."""

    use: Use
    parts: dict[str, int]
    moment: str
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def words(self) -> str:
        """The parts, largest first."""
        parts = sorted(self.parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in parts if size)


def purpose_needs(
    use: Use, shape: ModelShape, layout: Layout, passes: Passes, rank: int = RANK, served: str = "bf16",
    each: ParameterBytes | None = None,
) -> Purpose:  # fmt: skip
    """Memory of one GPU of the layout. A row is a pair for DPO, a rollout for PPO, a conversation for inference; each
    has `context` tokens. `served` is the weight format of inference."""
    each = each or optimizer_bytes(OptimizerSpec(), MemorySpec(), passes.precision)
    if use == "training":
        return _purpose(use, rank_needs(shape, layout, each, passes))
    if use in ("lora", "qlora"):
        return _adapters(use, shape, layout, passes, rank, each)
    if use == "dpo":
        pairs = replace(passes, rows=2 * passes.rows)
        policy = _purpose(use, rank_needs(shape, layout, each, pairs), "a row is a pair: chosen and rejected together")
        note = "precomputing the reference's log-probabilities frees its memory"
        return _add_parts(policy, {"reference": _frozen_bytes(shape, layout)}, note)
    if use == "ppo":
        return _ppo(shape, layout, passes, each)
    return _inference(shape, layout, passes, served)


def _purpose(use: Use, needs: RankNeeds, *notes: str) -> Purpose:
    rest = needs.head + needs.workspace + needs.communication + needs.fragments + needs.outside
    parts = {
        "weights": needs.weights, "gradients": needs.gradients, "moments": needs.moments,
        "gathered": needs.gathered, "activations": needs.activations, "the rest": rest,
    }  # fmt: skip
    return Purpose(use, parts, "at the loss" if needs.activations else "at the end of the backward pass", notes)


def _add_parts(purpose: Purpose, parts: dict[str, int], *notes: str) -> Purpose:
    return replace(purpose, parts=purpose.parts | parts, notes=(*purpose.notes, *notes))


def _frozen_bytes(shape: ModelShape, layout: Layout) -> int:
    """A frozen model in 16 bits, sharded like the others, with its gathered layers."""
    weights = Weights.of(shape)
    sharded = layout.dp_shard * layout.cp > 1
    gathered = HALF * GATHERED * (weights.block + weights.experts) / layout.tp if sharded else 0.0
    return int(HALF * shape.parameters / layout.held + gathered)


def _adapters(
    use: Use, shape: ModelShape, layout: Layout, passes: Passes, rank: int, each: ParameterBytes
) -> Purpose:  # fmt: skip
    """Frozen weights in 16 or 4 bits; only adapters have gradients and moments. Inputs of adapted matrices are saved as
    in training, and so is the low-rank product of each adapter."""
    base = rank_needs(shape, layout, FROZEN, passes)
    size = lora_parameters(shape, rank)
    adapters = (each.weights + max(4.0, each.gradients) + each.moments + each.working) * size
    low_rank = rank * len(MODULES) * (shape.layers + shape.decoder_layers) * passes.tokens * passes.bytes
    if passes.activations == "full":
        low_rank //= shape.layers + shape.decoder_layers  # only the layer that is recomputed
    embedding = shape.vocab * shape.width // layout.tp
    needs = replace(
        base, head=max(0, base.head - embedding * (4 + 2 * (passes.bytes == 2))),  # its weight has no gradient
        activations=base.activations + low_rank // (layout.tp * layout.cp),
    )  # fmt: skip
    notes = [f"adapters of rank {rank}: {human_count(size)} parameters ({size / shape.parameters:.1%})"]
    adapter_parts = {"adapters": int(adapters / layout.held)}
    if use == "qlora":
        ends = Weights.of(shape)
        inner = (shape.parameters - ends.before - ends.behind) / layout.held
        largest = max(into * out for into, out in matrix_sides(shape).values())
        saved = int((HALF - NF4_BYTES) * inner)
        needs = replace(needs, weights=needs.weights - saved, workspace=needs.workspace + int(HALF * largest))
        notes.append("layers in NF4 with double quantisation, 0.516 bytes each (Dettmers et al. 2023); ends in 16 bits")
    return _add_parts(_purpose(use, needs, *notes), adapter_parts)


def _ppo(shape: ModelShape, layout: Layout, passes: Passes, each: ParameterBytes) -> Purpose:
    """Policy and critic are trained, reference and reward model are frozen. The peak is an update, or a rollout with
    its KV cache but without activations and gradients."""
    update = _purpose("ppo", rank_needs(shape, layout, each, passes))
    frozen = {"reference": _frozen_bytes(shape, layout), "reward model": _frozen_bytes(shape, layout)}
    trained = int((each.weights + each.moments) * shape.parameters / layout.held)
    note = "four models of one size; policy and critic are updated in turn, so only one has gradients"
    updating = _add_parts(update, {"critic": trained} | frozen, note)
    cache = passes.rows * cache_bytes(shape, passes.context) // layout.tp
    generating = int(HALF * shape.parameters / layout.tp)  # unsharded on each replica
    rolling = Purpose(
        "ppo", {"weights": trained, "generating": generating, "cache": cache, "critic": trained, **frozen,
                "the rest": CONTEXT + CHANNEL + layer_bytes(shape, replace(passes, activations="none"))},
        "during a rollout", (note,),
    )  # fmt: skip
    return max(updating, rolling, key=lambda purpose: purpose.total)


def _inference(shape: ModelShape, layout: Layout, passes: Passes, served: str) -> Purpose:
    """Tensor-parallel weights, the KV cache divided by up to the number of KV heads, and one layer of a prompt
    chunk."""
    tp = layout.tp
    weights = SERVED[served] * shape.parameters
    if served == "int4":  # embeddings and head stay in 16 bits
        ends = Weights.of(shape)
        weights += (HALF - NF4_BYTES) * (ends.before + ends.behind)
    shared = min(tp, shape.kv_heads) if shape.mla is None else 1  # a latent cache is duplicated
    cache = passes.rows * cache_bytes(shape, passes.context) // shared
    chunk = replace(passes, rows=1, context=min(PREFILL, passes.rows * passes.context), activations="none")
    logits = passes.rows * shape.vocab * 4 // tp
    parts = {"weights": int(weights / tp), "cache": cache, "a layer": layer_bytes(shape, chunk) // tp, "logits": logits}
    rest = int(FRAGMENTS * sum(parts.values())) + CONTEXT + CHANNEL * (tp > 1)
    each = cache_bytes(shape, passes.context)
    note = f"a conversation of {passes.context:,} tokens caches {human_bytes(each)}; weights in {served}"
    return Purpose("inference", parts | {"the rest": rest}, "during prefill", (note,))


@dataclass(frozen=True)
class PurposeFit:
    """The most rows that fit with the least recomputation; `fits` is False if not even one row fits."""

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
        raise UserError(f"plan memory {use}: write {', '.join(get_args(Use))}")
    return use  # type: ignore[return-value]


def fit_purpose(
    use: Use, shape: ModelShape, gpus: str | Cluster, context: int, rank: int = RANK, precision: str = "bf16"
) -> PurposeFit:  # fmt: skip
    """The fit on these GPUs: a full replica on each if possible, else sharded among all. Inference takes the layout
    with the most conversations per GPU."""
    supported = tuple(SERVED) if use == "inference" else ("bf16", "fp16", "fp8", "tf32", "fp32")
    if precision not in supported:
        raise UserError(f"--precision {precision}: for {use} write {', '.join(supported)}")
    cluster = parse_cluster(gpus) if isinstance(gpus, str) else gpus
    limit = USABLE * cluster.gpu.memory_bytes
    served = precision if precision in SERVED else "bf16"
    computed = "bf16" if precision == "int4" else precision
    smallest: PurposeFit | None = None
    fitting: list[PurposeFit] = []
    for layout in _layouts(use, shape, cluster):
        for mode in MODES[:1] if use == "inference" else MODES:
            best: PurposeFit | None = None
            rows = 1
            while rows <= MOST_ROWS:
                passes = Passes(context, rows, computed, mode, not (shape.moe or shape.mamba), "cuda", several=True)
                needs = purpose_needs(use, shape, layout, passes, rank, served)
                fit = PurposeFit(shape, cluster, layout, rows, context, mode, needs, needs.total <= limit)
                if smallest is None or needs.total < smallest.needs.total:
                    smallest = fit
                if not fit.fits:
                    break
                best, rows = fit, rows * 2
            if best and use != "inference":
                return best
            fitting += [best] if best else []
    assert smallest is not None
    return max(fitting, key=lambda fit: fit.rows / fit.layout.tp, default=smallest)


def _layouts(use: Use, shape: ModelShape, cluster: Cluster) -> Iterator[Layout]:
    if use == "inference":
        for split in (1, 2, 4, 8, 16):
            if split <= cluster.count and shape.heads % split == 0:
                yield Layout(tp=split)
        return
    yield Layout(dp_replicate=cluster.count)
    if cluster.count > 1:
        yield Layout(dp_shard=cluster.count)


def purpose_lines(fit: PurposeFit) -> list[str]:
    needs, gpu = fit.needs, fit.cluster.gpu
    divided = fit.layout.dp_shard * fit.layout.tp
    division = f"divided among {divided}" if divided > 1 else "a full replica on each"
    rows = {"dpo": "pairs", "ppo": "rollouts", "inference": "conversations"}.get(needs.use, "rows")
    recompute = "" if needs.use == "inference" else f", recompute {fit.activations}"
    head = f"{human_count(fit.shape.parameters)} parameters for {needs.use} on {fit.cluster}"
    size = f"{human_bytes(needs.total)} of {human_bytes(gpu.memory_bytes)} on each GPU, {needs.moment}"
    lines = [head, "", f"  layout  {division}, {fit.rows} {rows} of {fit.context:,} tokens at a time{recompute}"]
    lines += [f"  memory  {size}", f"          {needs.words()}", *(f"  note    {note}" for note in needs.notes)]
    if not fit.fits:
        lack = needs.total - USABLE * gpu.memory_bytes
        lines.append(f"  short   by {human_bytes(lack)} at one row: {_alternative(fit)}")
    return lines


def _alternative(fit: PurposeFit) -> str:
    alternatives = {
        "training": "lora, qlora or more GPUs", "dpo": "lora (its base is the reference) or more GPUs",
        "ppo": "more GPUs, or a smaller critic and reward model", "lora": "qlora or more GPUs",
        "qlora": "a larger GPU or a shorter --context", "inference": "--precision int4, or more GPUs",
    }  # fmt: skip
    return f"use {alternatives[fit.needs.use]}"


def purpose_json(fit: PurposeFit) -> dict[str, Any]:
    return {
        "for": fit.needs.use, "parameters": fit.shape.parameters, "gpus": str(fit.cluster),
        "context": fit.context, "rows": fit.rows, "activations": fit.activations, "fits": fit.fits,
        "layout": {"dp_replicate": fit.layout.dp_replicate, "dp_shard": fit.layout.dp_shard, "tp": fit.layout.tp},
        "memory_bytes": fit.needs.parts | {"total": fit.needs.total}, "moment": fit.needs.moment,
        "notes": list(fit.needs.notes),
    }  # fmt: skip
