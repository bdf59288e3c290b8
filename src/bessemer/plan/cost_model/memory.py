"""Peak bytes of training on one device, by what takes them, and from that the micro-batch and what is computed again.

A step is fullest at one of three moments: at the loss, when every block has left what it keeps and the logits are made,
in the last layer's backward pass, beside what all layers keep, or at its end, when all gradients are there. Activations
are counted by the tensors that a block keeps; tests compare them with what torch really saves, and the whole with peaks
measured on an H200 (docs/cost-model.md). A probing step corrects the rest (train/memory/fit.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.spec.optimizer import optimizer_bytes
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

ROWS, ACTIVATIONS = "budget.micro_batch", "memory.activations"  # keys of the plan
Activations = str | float  # none, selective, full, or the share that is kept
STEPS_UP = ("none", "selective", "full")  # what `auto` goes through: each keeps less and costs more
HEAD_CHUNK = {"cpu": 4 << 20, "cuda": 2 << 30}  # logits at a time, train/loss.py
LONG, TILE = (
    32_768,
    16_384,
)  # tokens of a micro-batch, beyond which whole layers are run again in tiles, train/memory/tiles.py
MOST_TOKENS = {"cpu": 16_384, "cuda": 32_768}  # of a micro-batch: beyond, a device is no busier
SHARE = {"cpu": 1 / 3, "cuda": 0.92}  # of the device's memory: a machine's is not for one process alone


@dataclass(frozen=True)
class Passes:
    """How forward and backward are run."""

    context: int
    rows: int
    precision: str
    activations: Activations
    compiled: bool
    device: str = "cuda"
    several: bool = True  # micro-batches in a step: their gradients add up in fp32
    shards: int = 1  # processes among which weights, gradients and moments are divided

    @property
    def bytes(self) -> int:
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def tokens(self) -> int:
        return self.rows * self.context


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes at the peak of a step, and when that is."""

    moment: str
    weights: int
    gradients: int
    moments: int
    casts: int  # of weights, in the type of the passes
    activations: int
    head: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(self._sizes().values())

    def words(self) -> str:
        """What takes it, the largest first."""
        found = sorted(self._sizes().items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in found if size)

    def _sizes(self) -> dict[str, int]:
        return {name: size for name, size in asdict(self).items() if name != "moment"}


def estimate(spec: RunSpec, shape: ModelShape, passes: Passes) -> MemoryNeeds:
    """Gradients lie beside all activations only from a step's second micro-batch on."""
    each, how = optimizer_bytes(spec.optimizer, spec.memory, passes.precision), passes.activations
    parameters, embedding = shape.parameters, shape.vocab * shape.width
    # Compiled blocks that recompute anything cast their weights again too.
    cast = each.working if how == "none" or not passes.compiled else 0.0
    layers = shape.layers + shape.decoder_layers
    stay = min(3, layers) / layers if spec.memory.offload_activations else 1.0
    moments = each.moments * parameters
    if spec.optimizer.name == "muon":  # AdamW's part has two moments
        moments += each.moments * embedding * (1 if shape.tied else 2)
    gradients = int((4.0 if passes.several and each.gradients else each.gradients) * parameters) // passes.shards
    standing = {
        "weights": int(each.weights * parameters) // passes.shards, "moments": int(moments) // passes.shards,
        "casts": int(cast * (parameters - embedding * (not shape.tied))),
    }  # fmt: skip
    at_loss = MemoryNeeds(
        "at the loss", **standing, gradients=gradients if passes.several else 0,
        activations=int(activation_bytes(shape, passes) * stay), head=head_bytes(shape, passes, each.weights),
        workspace=0,
    )  # fmt: skip
    kept = int(_kept(shape, layers - 1, passes) * passes.tokens * passes.bytes)
    at_last = MemoryNeeds(
        "in the last layer's backward pass", **standing,
        gradients=gradients if passes.several else int(each.gradients * embedding) // passes.shards,
        activations=at_loss.activations, head=0, workspace=max(0, layer_bytes(shape, passes) - kept),
    )  # fmt: skip
    at_end = MemoryNeeds(
        "at the end of the backward pass", **standing, gradients=gradients or int(each.weights * embedding),
        activations=0, head=0, workspace=layer_bytes(shape, passes),
    )  # fmt: skip
    return max(at_loss, at_last, at_end, key=lambda needs: needs.total)


def head_bytes(shape: ModelShape, passes: Passes, weight_bytes: float, parts: int = 1) -> int:
    """Of the loss head, of which each process has one of `parts`: a chunk of logits, its weight's gradient summed in
    fp32 beside what is cast of the weight, hidden rows with their gradients. In fp32 a chunk is made before the last
    goes. The GPU's kernel has chunks of one size; weights in bf16 need no cast, and one chunk alone no sum."""
    half, embedding = passes.bytes == 2, shape.vocab * shape.width // parts
    limit, logits = HEAD_CHUNK.get(passes.device, 256 << 20), passes.tokens * shape.vocab * passes.bytes // parts
    even = half and passes.device == "cuda"
    chunk = logits // max(1, -(-logits // limit)) if even else min(2 * limit, logits)
    each = 4 + 2 * half
    if even and parts == 1 and weight_bytes == 2:
        each = 2 if logits <= limit else 4
    return chunk + embedding * each + 4 * passes.tokens * shape.width * passes.bytes


@lru_cache(maxsize=64)  # a search asks thousands of times, and every count goes through all layers
def _parameters(shape: ModelShape) -> int:
    return shape.parameters


def layer_bytes(shape: ModelShape, passes: Passes) -> int:
    """Of the block that is gone back through: what it kept or computes again, and its gradients on their way down."""
    whole = layer_numbers(shape, 0, passes) * 1.3
    if not _in_tiles(shape, passes):
        return int(passes.tokens * passes.bytes * whole)
    # Through both: what the layer reads and its first norm gives, what attention reads and gives, the gradients of the
    # layer's output and input, and of weights, summed in float32. A tile is on its way beside attention's gradient.
    # Attention's backward pass has gradients of all it read as well; in float32 those of queries once more, and keys
    # and values, if shared, have theirs for each of the queries' heads.
    queries = shape.heads * shape.key_dim
    lasting, embeddings = 4 * shape.width + _mixer(shape, 0), shape.vocab * shape.width * (2 - shape.tied)
    sums = 4 * (_parameters(shape) - embeddings) // (shape.layers + shape.decoder_layers)
    shared = 2 * queries * (shape.kv_heads < shape.heads)
    tile = passes.tokens * queries + TILE * whole
    attending = passes.tokens * (_mixer(shape, 0) + 2 * queries + shared)
    return int(passes.bytes * (passes.tokens * lasting + max(tile, attending))) + sums


def _in_tiles(shape: ModelShape, passes: Passes) -> bool:
    """Whether a layer of which only the input is kept goes through what follows attention tile by tile."""
    plain = shape.mixer(0) == "attention" and not shape.has_experts(0) and shape.parallel != "one_norm"
    long = passes.activations == "full" and passes.compiled and passes.tokens > LONG
    return long and plain and shape.positions not in ("alibi", "relative")


@lru_cache(maxsize=4096)  # a search asks for the same passes in many layouts
def activation_bytes(shape: ModelShape, passes: Passes) -> int:
    """Kept from forward to backward by all blocks."""
    layers, how = shape.layers + shape.decoder_layers, passes.activations
    if isinstance(how, str) or passes.compiled:
        numbers = sum(_kept(shape, layer, passes) for layer in range(layers))
    else:  # plain blocks are kept or checkpointed as a whole
        whole = layers - round((1 - how) * layers)
        numbers = sum(layer_numbers(shape, layer, passes) for layer in range(whole)) + (layers - whole) * shape.width
    return int(passes.tokens * passes.bytes * numbers)


def _kept(shape: ModelShape, layer: int, passes: Passes) -> float:
    """Numbers a token that one block keeps."""
    how, width, mixer = passes.activations, shape.width, _mixer(shape, layer)
    if how == "full":
        return width
    if how == "selective":
        return (2 if passes.compiled else 3) * width + mixer + _inner(shape, layer) * (1 + shape.gated)
    every = layer_numbers(shape, layer, passes)
    if passes.compiled and passes.precision == "fp8" and shape.gated and 0 < layer < shape.layers - 1:
        # As one function it computes SwiGLU again (train/lowp/fp8.py); inputs of other products stay in 8 bits too.
        every -= 0.75 * width + _inner(shape, layer)
    # torch's partitioner never gives up what lies between the graphs.
    return every if isinstance(how, str) else max(width + mixer, how * every)


def layer_numbers(shape: ModelShape, layer: int, passes: Passes) -> float:
    """Numbers a token that one block keeps if nothing is computed again, each of the size that passes have.

    Compiled: what the block and both norms read and give (4 widths), q, k, v and attention's output, and of the
    feed-forward part both products and what `down` reads. Plain blocks keep the activation's output too. A CPU also
    keeps the rows that RMSNorm has scaled, with the stream in float32, and casts what a norm gives for each product.
    """
    width, plain, read, given = shape.width, not passes.compiled, 2.0, 2
    if plain and passes.device == "cpu":
        read = 2 * (1 + (shape.norm == "rms")) * 4 / passes.bytes
        given = 2 if passes.bytes == 4 else 4 + shape.gated
    inner = _inner(shape, layer) * (3 + plain if shape.gated else 2)
    return (read + given) * width + _mixer(shape, layer) * (1 + (layer >= shape.layers)) + inner


def _mixer(shape: ModelShape, layer: int) -> int:
    if shape.mixer(layer) == "mamba":
        assert shape.mamba is not None
        return 46 * shape.mamba.heads * shape.mamba.head_dim  # 23 numbers of the inner width, in float32
    if shape.mla is not None:
        mla = shape.mla
        waist = mla.kv_rank + mla.rope_dim + 2 * (mla.q_rank or 0)
        return 2 * shape.heads * (shape.key_dim + mla.value_dim) + waist
    return 2 * (shape.heads + shape.kv_heads) * shape.head_dim


def _inner(shape: ModelShape, layer: int) -> int:
    """Of the feed-forward part; tokens are moved to their experts and back."""
    if not shape.has_experts(layer):
        return shape.ffn
    assert shape.moe is not None
    return (shape.moe.top_k + shape.moe.shared) * shape.moe.ffn + shape.moe.top_k * shape.width


def decide_micro_batch(
    spec: RunSpec, shape: ModelShape, passes: Passes, batch: int, machine: Machine, plan: Plan,
    previous: Plan | None = None,
) -> Passes:  # fmt: skip
    """`passes` with rows and activations decided: the first mode in which one row fits (or the rows that were asked
    for), and in it as many rows as fit, a divisor of the `batch`."""
    limit = int(machine.memory_bytes * SHARE.get(machine.device, SHARE["cpu"]))

    def needs(rows: int, how: Activations) -> MemoryNeeds:
        return estimate(spec, shape, replace(passes, rows=rows, activations=how, several=rows < batch))

    rows = _given_rows(spec, batch, plan, previous)
    written = spec.memory.activations
    kept = plan.keep(ACTIVATIONS, written, previous) if written == "auto" else plan.asked(ACTIVATIONS, written)
    modes: tuple[Activations, ...] = STEPS_UP if kept is None else (kept,)
    how = next((mode for mode in modes if needs(rows or 1, mode).total <= limit), modes[-1])
    if kept is None:
        reason = "all of them fit" if how == "none" else "the least that is computed again for the rest to fit"
        size = f"{human_bytes(needs(rows or 1, how).total)} of {human_bytes(limit)} at {rows or 1} rows"
        plan.add(ACTIVATIONS, how, f"{reason}: {size}", "estimate")
    if rows is None:
        cap = max(1, MOST_TOKENS.get(machine.device, MOST_TOKENS["cpu"]) // passes.context)
        fitting = [n for n in range(1, min(batch, cap) + 1) if batch % n == 0 and needs(n, how).total <= limit]
        rows = max(fitting, default=1)
        found = needs(rows, how)
        reason = f"it divides the batch of {batch}; by estimate {human_bytes(found.total)}: {found.words()}"
        if not fitting:
            reason = f"the least there is: by estimate the model hardly fits in {human_bytes(limit)}: {found.words()}"
        plan.add(ROWS, rows, reason, "estimate")
    return replace(passes, rows=rows, activations=how, several=rows < batch)


def _given_rows(spec: RunSpec, batch: int, plan: Plan, previous: Plan | None) -> int | None:
    """A micro-batch that is not for the planner to choose, or None."""
    asked = spec.budget.micro_batch
    if asked != "auto":
        if int(asked) > batch:
            raise UserError(f"{ROWS}: {asked} sequences exceed the batch of {batch}: write {batch} or less")
        return int(plan.asked(ROWS, asked))
    if spec.memory.update == "in_backward":
        return int(plan.add(ROWS, batch, "memory.update: in_backward cannot add up micro-batches", "rule"))
    kept = plan.keep(ROWS, asked, previous)
    return int(kept) if kept is not None and kept <= batch else None
