"""Estimates the peak memory of a training step, on one device and on the fullest process of a parallel layout, and
decides micro-batch and recomputation from it.

Memory peaks at one of three moments: at the loss, with all saved activations and the logits; in the last layer's
backward pass, with all saved activations; or at the end of the backward pass, with all gradients. Activations are
counted by the tensors that a block saves. Tests compare them with what torch saves, and the sum with peaks measured on
an H200 (docs/cost-model.md). A trial step corrects the estimate (train/memory/fit.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.search.layout import Layout
from bessemer.spec.adapter import matrix_sides
from bessemer.spec.optimizer import MOMENT_BYTES, SOAP_LARGEST, ParameterBytes, optimizer_bytes
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape, parameter_counts
from bessemer.spec.trained import parameter_bytes

ROWS, ACTIVATIONS = "budget.micro_batch", "memory.activations"  # keys of the plan
Activations = str | float  # recomputation: none, selective, full, or the share of activations that is saved
RECOMPUTE_MODES = ("none", "selective", "full")  # `auto` tries them in order: each saves memory and costs time
HEAD_CHUNK = {"cpu": 4 << 20, "cuda": 2 << 30}  # bytes of logits at a time, train/loss.py
LONG, TILE = 32_768, 16_384  # tokens of a micro-batch above which layers are recomputed in tiles; train/memory/tiles.py
MOST_TOKENS = {"cpu": 16_384, "cuda": 32_768}  # of a micro-batch: more do not keep a device busier
SHARE = {"cpu": 1 / 3, "cuda": 0.92}  # of the device's memory; host memory is shared with other processes
BUCKET = 25 << 20  # of DDP: one is sent while another fills
GATHERED = 2  # layers of a sharded model that are gathered at a time: the current one and the next
# Not counted by torch's allocator: the CUDA context, NCCL's buffers and cuBLAS workspaces.
CONTEXT, CHANNEL = 600 << 20, 64 << 20
FRAGMENTS = 0.02  # of the allocated memory, lost to fragmentation with expandable segments


@dataclass(frozen=True)
class Passes:
    """How the forward and backward passes run."""

    context: int
    rows: int
    precision: str
    activations: Activations
    compiled: bool
    device: str = "cuda"
    several: bool = True  # several micro-batches per step: gradients accumulate in fp32
    shards: int = 1  # processes that share weights, gradients and moments

    @property
    def bytes(self) -> int:
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def tokens(self) -> int:
        return self.rows * self.context


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes at the peak of a step, and the moment of the peak."""

    moment: str
    weights: int
    gradients: int
    moments: int
    casts: int  # copies of weights in the compute precision, and a dequantized one
    activations: int
    head: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(self._sizes().values())

    def words(self) -> str:
        """The parts, largest first."""
        parts = sorted(self._sizes().items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in parts if size)

    def _sizes(self) -> dict[str, int]:
        return {name: size for name, size in asdict(self).items() if name != "moment"}


def estimate_memory(spec: RunSpec, shape: ModelShape, passes: Passes) -> MemoryNeeds:
    """Peak memory of a step. Gradients and all activations coexist only from the second micro-batch on."""
    each, mode = parameter_bytes(spec, shape, passes.precision), passes.activations
    parameters, embedding = shape.parameters, shape.vocab * shape.width
    # Compiled blocks with recomputation cast their weights again too.
    cast = each.working if mode == "none" or not passes.compiled else 0.0
    layers = shape.layers + shape.decoder_layers
    on_device = min(3, layers) / layers if spec.memory.offload_activations else 1.0
    moments = each.moments * parameters
    if spec.optimizer.name == "muon":  # the embeddings use AdamW, with two moments
        moments += MOMENT_BYTES["fp32"] * embedding * (1 if shape.tied else 2)
    if spec.optimizer.name == "soap":  # every process holds the bases
        moments += soap_bytes(shape) * passes.shards
    gradients = int(each.accumulated(passes.several) * parameters) // passes.shards
    constant = {
        "weights": int(each.held * parameters) // passes.shards, "moments": int(moments) // passes.shards,
        "casts": int(cast * (parameters - embedding * (not shape.tied))) + _dense_bytes(shape, each, passes),
    }  # fmt: skip
    at_loss = MemoryNeeds(
        "at the loss", **constant, gradients=gradients if passes.several else 0,
        activations=int(activation_bytes(shape, passes) * on_device), head=head_bytes(shape, passes, each.weights),
        workspace=0,
    )  # fmt: skip
    saved = int(_saved_numbers(shape, layers - 1, passes) * passes.tokens * passes.bytes)
    at_last = MemoryNeeds(
        "in the last layer's backward pass", **constant,
        gradients=gradients if passes.several else int(each.gradients * embedding) // passes.shards,
        activations=at_loss.activations, head=0, workspace=max(0, layer_bytes(shape, passes) - saved),
    )  # fmt: skip
    at_end = MemoryNeeds(
        "at the end of the backward pass", **constant, gradients=gradients or int(each.weights * embedding),
        activations=0, head=0, workspace=layer_bytes(shape, passes),
    )  # fmt: skip
    return max(at_loss, at_last, at_end, key=lambda needs: needs.total)


def _dense_bytes(shape: ModelShape, each: ParameterBytes, passes: Passes) -> int:
    """The largest matrix of a layer, if weights are quantized: one is dense at a time."""
    return max(math.prod(sides) for sides in matrix_sides(shape).values()) * passes.bytes if each.quantized else 0


def head_bytes(shape: ModelShape, passes: Passes, weight_bytes: float, parts: int = 1) -> int:
    """Bytes of the loss head, which is split into `parts` among processes: a chunk of logits, the weight's gradient in
    fp32 and its cast, hidden rows with their gradients. In fp32 two chunks coexist. The GPU kernel uses equal chunks;
    bf16 weights need no cast, and a single chunk needs no fp32 sum."""
    half, embedding = passes.bytes == 2, shape.vocab * shape.width // parts
    limit, logits = HEAD_CHUNK.get(passes.device, 256 << 20), passes.tokens * shape.outputs * passes.bytes // parts
    even = half and passes.device == "cuda"
    chunk = logits // max(1, -(-logits // limit)) if even else min(2 * limit, logits)
    each = 4 + 2 * half
    if even and parts == 1 and weight_bytes == 2:
        each = 2 if logits <= limit else 4
    return chunk + embedding * each + 4 * passes.tokens * shape.width * passes.bytes


@lru_cache(maxsize=64)  # a search calls it thousands of times, and each count walks all layers
def _parameters(shape: ModelShape) -> int:
    return shape.parameters


def layer_bytes(shape: ModelShape, passes: Passes) -> int:
    """Bytes of the block in its backward pass: its saved or recomputed activations, and their gradients."""
    numbers = layer_numbers(shape, 0, passes) * 1.3
    if not _uses_tiles(shape, passes):
        return int(passes.tokens * passes.bytes * numbers)
    # Always: inputs of the layer and outputs of its first norm, inputs and outputs of attention, gradients of the
    # layer's output and input, and fp32 sums of weight gradients. A tile coexists with attention's output gradient.
    # Attention's backward pass holds gradients of all its inputs, those of queries again in fp32, and those of shared
    # keys and values for each query head.
    queries = shape.heads * shape.key_dim
    lasting, embeddings = 4 * shape.width + _mixer_numbers(shape, 0), shape.vocab * shape.width * (2 - shape.tied)
    sums = 4 * (_parameters(shape) - embeddings) // (shape.layers + shape.decoder_layers)
    shared = 2 * queries * (shape.kv_heads < shape.heads)
    tile = passes.tokens * queries + TILE * numbers
    attending = passes.tokens * (_mixer_numbers(shape, 0) + 2 * queries + shared)
    return int(passes.bytes * (passes.tokens * lasting + max(tile, attending))) + sums


def _uses_tiles(shape: ModelShape, passes: Passes) -> bool:
    """Whether a fully recomputed layer runs the part after attention in tiles."""
    plain = shape.mixer(0) == "attention" and not shape.has_experts(0) and shape.parallel != "one_norm"
    long = passes.activations == "full" and passes.compiled and passes.tokens > LONG
    return long and plain and shape.positions not in ("alibi", "relative")


@lru_cache(maxsize=4096)  # a search uses the same passes in many layouts
def activation_bytes(shape: ModelShape, passes: Passes) -> int:
    """Bytes that all blocks save from the forward to the backward pass."""
    layers, mode = shape.layers + shape.decoder_layers, passes.activations
    if isinstance(mode, str) or passes.compiled:
        numbers = sum(_saved_numbers(shape, layer, passes) for layer in range(layers))
    else:  # eager blocks are either saved or recomputed as a whole
        saved = layers - round((1 - mode) * layers)
        numbers = sum(layer_numbers(shape, layer, passes) for layer in range(saved)) + (layers - saved) * shape.width
    return int(passes.tokens * passes.bytes * numbers)


def _saved_numbers(shape: ModelShape, layer: int, passes: Passes) -> float:
    """Numbers per token that one block saves."""
    mode, width, mixer = passes.activations, shape.width, _mixer_numbers(shape, layer)
    if mode == "full":
        return width
    if mode == "selective":
        return (2 if passes.compiled else 3) * width + mixer + _inner_numbers(shape, layer) * (1 + shape.gated)
    numbers = layer_numbers(shape, layer, passes)
    if passes.compiled and passes.precision == "fp8" and shape.gated and 0 < layer < shape.layers - 1:
        # The fused function recomputes SwiGLU (train/lowp.py); inputs of other products are saved in 8 bits too.
        numbers -= 0.75 * width + _inner_numbers(shape, layer)
    # torch's partitioner always saves the tensors between its graphs.
    return numbers if isinstance(mode, str) else max(width + mixer, mode * numbers)


def layer_numbers(shape: ModelShape, layer: int, passes: Passes) -> float:
    """Numbers per token that one block saves without recomputation, each in the compute precision.

    Compiled: inputs and outputs of the block and both norms (4 widths), q, k, v and attention's output, and in the
    feed-forward part both products and the input of `down`. Eager blocks also save the activation's output. A CPU also
    saves the rows that RMSNorm scaled, with the residual stream in fp32, and a cast of each norm's output per product.
    """
    width, eager, inputs, outputs = shape.width, not passes.compiled, 2.0, 2
    if eager and passes.device == "cpu":
        inputs = 2 * (1 + (shape.norm == "rms")) * 4 / passes.bytes
        outputs = 2 if passes.bytes == 4 else 4 + shape.gated
    inner = _inner_numbers(shape, layer) * (3 + eager if shape.gated else 2)
    return (inputs + outputs) * width + _mixer_numbers(shape, layer) * (1 + (layer >= shape.layers)) + inner


def _mixer_numbers(shape: ModelShape, layer: int) -> int:
    if shape.mixer(layer) == "mamba":
        assert shape.mamba is not None
        return 46 * shape.mamba.heads * shape.mamba.head_dim  # 23 numbers of the inner width, in float32
    if shape.mla is not None:
        mla = shape.mla
        waist = mla.kv_rank + mla.rope_dim + 2 * (mla.q_rank or 0)
        return 2 * shape.heads * (shape.key_dim + mla.value_dim) + waist
    return 2 * (shape.heads + shape.kv_heads) * shape.head_dim


def _inner_numbers(shape: ModelShape, layer: int) -> int:
    """Numbers per token of the feed-forward part; tokens move to their experts and back."""
    if not shape.has_experts(layer):
        return shape.ffn
    assert shape.moe is not None
    return (shape.moe.top_k + shape.moe.shared) * shape.moe.ffn + shape.moe.top_k * shape.width


def decide_micro_batch(
    spec: RunSpec, shape: ModelShape, passes: Passes, batch: int, machine: Machine, plan: Plan,
    previous: Plan | None = None,
) -> Passes:  # fmt: skip
    """`passes` with rows and recomputation decided: the first mode in which one row (or the requested rows) fits, and
    in it the most rows that fit and divide the `batch`."""
    limit = int(machine.memory_bytes * SHARE.get(machine.device, SHARE["cpu"]))

    def needs(rows: int, mode: Activations) -> MemoryNeeds:
        return estimate_memory(spec, shape, replace(passes, rows=rows, activations=mode, several=rows < batch))

    rows = _fixed_rows(spec, batch, plan, previous)
    setting = spec.memory.activations
    fixed = plan.keep(ACTIVATIONS, setting, previous) if setting == "auto" else plan.add_requested(ACTIVATIONS, setting)
    modes: tuple[Activations, ...] = RECOMPUTE_MODES if fixed is None else (fixed,)
    best = next((mode for mode in modes if needs(rows or 1, mode).total <= limit), modes[-1])
    if fixed is None:
        reason = "all of them fit" if best == "none" else "the least recomputation that fits"
        size = f"{human_bytes(needs(rows or 1, best).total)} of {human_bytes(limit)} at {rows or 1} rows"
        plan.add(ACTIVATIONS, best, f"{reason}: {size}", "estimate")
    if rows is None:
        cap = max(1, MOST_TOKENS.get(machine.device, MOST_TOKENS["cpu"]) // passes.context)
        fitting = [n for n in range(1, min(batch, cap) + 1) if batch % n == 0 and needs(n, best).total <= limit]
        rows = max(fitting, default=1)
        peak = needs(rows, best)
        reason = f"it divides the batch of {batch}; by estimate {human_bytes(peak.total)}: {peak.words()}"
        if not fitting:
            reason = f"the minimum: by estimate the model hardly fits in {human_bytes(limit)}: {peak.words()}"
        plan.add(ROWS, rows, reason, "estimate")
    return replace(passes, rows=rows, activations=best, several=rows < batch)


def _fixed_rows(spec: RunSpec, batch: int, plan: Plan, previous: Plan | None) -> int | None:
    """The micro-batch that the spec or the previous plan fixes, or None."""
    setting = spec.budget.micro_batch
    if setting != "auto":
        if int(setting) > batch:
            raise UserError(f"{ROWS}: {setting} sequences exceed the batch of {batch}: write {batch} or less")
        return int(plan.add_requested(ROWS, setting))
    if spec.memory.update == "in_backward":
        return int(plan.add(ROWS, batch, "memory.update: in_backward cannot accumulate micro-batches", "rule"))
    rows = plan.keep(ROWS, setting, previous)
    return int(rows) if rows is not None and rows <= batch else None


@dataclass(frozen=True)
class OtherModel:
    """A further model of a run: its name, shape, and whether it is trained."""

    name: str
    shape: ModelShape
    trained: bool


def reserve_memory(spec: RunSpec, others: Iterable[OtherModel], machine: Machine, parts: int, plan: Plan) -> Machine:
    """The machine with the memory that is left beside further models, whose weights are divided into `parts`; the plan
    says how much they take. Frozen ones count 2 bytes a parameter on a GPU in half precision, else 4; trained ones as
    the optimizer has it. Their activations are small beside those of the run's model or freed before its backward
    pass, except those of trained ones, which the measurement at the start of a run includes."""
    left = machine.memory_bytes
    half = machine.device == "cuda" and spec.precision not in ("fp32", "tf32")
    for other in others:
        trained = optimizer_bytes(spec.optimizer, spec.memory, spec.precision).device
        bytes_each = trained if other.trained else 2 if half else 4
        size = int(bytes_each * other.shape.parameters / parts)
        divided = f", divided among {parts} processes" if parts > 1 else ""
        reason = f"{bytes_each:g} bytes for each of {human_count(other.shape.parameters)} parameters{divided}"
        plan.add(f"memory.models.{other.name}", human_bytes(size), reason, "counted")
        left -= size
    if left <= 0:
        need, have = human_bytes(machine.memory_bytes - left), human_bytes(machine.memory_bytes)
        raise UserError(f"models: they need {need} of {have}: shard them with parallel.dp_shard")
    return replace(machine, memory_bytes=left)


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
        counts = parameter_counts(shape)
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
        gathered = each.working * held + _dense_bytes(shape, each, passes)
    else:
        at_once = layers if pp > 1 else min(layers, GATHERED)  # a pipeline keeps its layers gathered
        gathered = half * (block * at_once + ends / tp) + 2 * half * block
    local = replace(passes, context=passes.context // layout.cp) if layout.cp > 1 else passes
    saved = activation_bytes(shape, local) / (shape.layers + shape.decoder_layers) * layers / tp
    saved *= max(1, min(micro_batches, pp - stage)) * (1 + (pp - 1) / (pp * interleaved) if interleaved > 1 else 1)
    gradients = each.accumulated(passes.several) * held
    constant = {
        "weights": each.held * held, "moments": each.moments * held, "gathered": gathered,
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


def soap_bytes(shape: ModelShape) -> int:
    """SOAP's covariances and eigenbases of the dense matrices of each layer, and of the embedding's narrow side."""
    heads, kv = shape.attention_width, shape.kv_heads * shape.head_dim
    sides = [(shape.width, heads), (shape.width, kv), (shape.width, kv), (heads, shape.width)]
    sides += [(shape.width, shape.ffn)] * (3 if shape.gated else 2)
    per_layer = sum(side**2 for pair in sides for side in pair if side <= SOAP_LARGEST)
    embeddings = (1 if shape.tied else 2) * shape.width**2
    return 8 * ((shape.layers + shape.decoder_layers) * per_layer + embeddings)
