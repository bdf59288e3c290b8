"""Decides and checks the parallel layout of a run: replicas, shards, tensor, context, pipeline and expert parallelism,
DDP options, or DeepSpeed's ZeRO stage. Unsupported combinations are refused by the key that asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.spec.model import model_shape
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import DeepSpeedSpec, ParallelSpec, PipelineSpec, ReplicasSpec, RunSpec, ShardSpec
from bessemer.spec.shape import ModelShape
from bessemer.spec.trained import parameter_bytes

if TYPE_CHECKING:
    from bessemer.plan.decide import TrainPlan

REPLICATE, SHARD = "parallel.dp_replicate", "parallel.dp_shard"
REPLICATED_SHARE = 0.25  # of a device's memory that weights, gradients and moments may take before they are sharded
DEEPSPEED_KEY = "parallel.deepspeed"
SHARDABLE = ("adamw", "adam", "sgd", "lion")  # their update of a flat shard is the shard of their update
DIVIDED = ("nothing", "moments", "moments and gradients", "weights, gradients and moments")
REPLICAS_KEY = "parallel.replicas"
CHANGES = {
    "bf16": "half the traffic; gradients are rounded to three digits, which changes the losses slightly",
    "powersgd": "sends low-rank matrices, and the remainder in the next step; this changes the losses",
}


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The product of all but `ep` is the number of processes; experts are divided among the
    processes that shard the other weights."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Number of processes that share the rows of a step."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def inner(self) -> bool:
        """Whether a replica uses tensor, context or pipeline parallelism."""
        return self.tp * self.cp * self.pp > 1

    @property
    def held(self) -> int:
        """Number of parts that the weights of a replica are divided into."""
        return self.dp_shard * self.cp * self.tp * self.pp


ONE_PROCESS = Layout()


def count_processes(parallel: ParallelSpec, gpus: int) -> int:
    """The number of processes that a run starts on one machine: the product of the parallel degrees, at least one for
    each of its GPUs."""
    product = parallel.tp * parallel.cp * parallel.pp
    product *= 1 if parallel.dp_replicate == "auto" else parallel.dp_replicate
    product *= parallel.ep if parallel.dp_shard == "auto" else parallel.dp_shard
    return max(product, gpus)


def decide_layout(spec: RunSpec, shape: ModelShape, context: int, machine: Machine, size: int, plan: Plan) -> Layout:
    """The layout that the spec sets. What it leaves open depends on whether one device easily holds a full replica.
    Both choices give the same losses, so a resumed run may change them."""
    parallel = spec.parallel
    check_engine(parallel)
    if parallel.engine == "deepspeed":
        check_deepspeed(spec, shape, size, plan)
        return Layout(dp_replicate=size)
    inner = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp}
    outer = {REPLICATE: parallel.dp_replicate, SHARD: parallel.dp_shard}
    fixed = {key: int(degree) for key, degree in outer.items() if degree != "auto"}
    fixed |= {f"parallel.{key}": degree for key, degree in inner.items() if degree > 1}
    fixed_layout = Layout(fixed.get(REPLICATE, 1), fixed.get(SHARD, 1), **inner)
    _check_tensor(shape, fixed_layout, size)
    _check_context(spec, shape, fixed_layout, context, size)
    product = 1
    for key, degree in fixed.items():
        plan.add_requested(key, degree)
        product *= degree
    open_keys = [key for key in outer if key not in fixed]
    if size % product or (not open_keys and product != size):
        words = " x ".join(f"{key.removeprefix('parallel.')} {degree}" for key, degree in fixed.items())
        raise UserError(
            f"parallel: {words} needs {product} processes, and there are {size}: {_suggest_degree(size, fixed)}"
        )
    left = size // product
    degrees = {key: int(fixed.get(key, 1)) for key in outer}
    if size > 1 and len(open_keys) == 1:
        degrees[open_keys[0]] = plan.add(open_keys[0], left, f"what is left of {size} processes", "rule")
    elif size > 1 and open_keys:
        total = parameter_bytes(spec, shape, spec.precision).device * shape.parameters
        part = total // (parallel.tp * parallel.pp)
        fits = part <= REPLICATED_SHARE * machine.memory_bytes and parallel.ep == 1
        reason = f"weights, gradients and moments are {human_bytes(part)} of {human_bytes(machine.memory_bytes)}: "
        reason += "each device holds them whole" if fits else "they are divided among all devices"
        if parallel.ep > 1:
            reason = "experts are divided among the same processes as the other weights"
        shards = 1 if fits else parallel.ep if parallel.ep > 1 and left % parallel.ep == 0 else left
        degrees = {REPLICATE: left // shards, SHARD: shards}
        for key, degree in degrees.items():
            plan.add(key, degree, reason, "estimate")
    layout = Layout(degrees[REPLICATE], degrees[SHARD], **inner, ep=parallel.ep)
    check_layout(spec, shape, layout, context)
    return layout


def data_ranks(parallel: ParallelSpec, size: int) -> int:
    """Number of the `size` processes that share the rows of a step."""
    return size if parallel.engine == "deepspeed" else size // (parallel.tp * parallel.cp * parallel.pp)


def check_layout(spec: RunSpec, shape: ModelShape, layout: Layout, context: int, size: int = 0) -> None:
    """Refuse degrees that do not divide the model, and settings that several processes do not support. `size` is the
    number of processes if the layout fixes only some degrees and has 1 for the others."""
    size = size or layout.size
    if layout.size > 1 or spec.parallel.shard.alone:
        _check_settings(spec, shape, layout)
    _check_tensor(shape, layout, size)
    _check_context(spec, shape, layout, context, size)
    _check_pipeline(spec, shape, layout)
    _check_experts(shape, layout, size)


def _check_settings(spec: RunSpec, shape: ModelShape, layout: Layout) -> None:
    """Refuse settings that several processes, or sharded weights, do not support."""
    sharded = layout.held > 1 or spec.parallel.shard.alone
    single_process = {
        "model: another library's modules are not divided": bool(shape.wrapped),
        "memory.update: in_backward": spec.memory.update == "in_backward",
        "memory.offload_activations": spec.memory.offload_activations,
        f"precision: {spec.precision}": spec.precision in ("fp8", "fp8_rowwise"),
    }
    unsharded = {
        f"memory.weights: {spec.memory.kept} keeps vectors in fp32 beside matrices in bf16": spec.memory.kept != "fp32",
        f"optimizer.name: {spec.optimizer.name} is not ours": spec.optimizer.external,
    }
    for words, used in single_process.items():
        if used:
            raise UserError(f"{words}: for one process in this version; change this, or run it in one (WORLD_SIZE=1)")
    for words, used in unsharded.items():
        if used and sharded:
            raise UserError(f"{words}: not divided in this version; change this, or write parallel.dp_shard: 1")


def _suggest_degrees(fits: Callable[[int], bool], most: int, processes: int) -> str:
    """The degrees that the model and the processes allow, or else what the model allows."""
    allowed = [degree for degree in range(2, min(most, 64) + 1) if fits(degree)]
    possible = [degree for degree in allowed if processes % degree == 0]
    if possible or not allowed:
        return f"write {_join_or(possible or [1])}"
    return f"write 1, or {_join_or(allowed)} on a multiple of as many processes"


def _join_or(degrees: list[int]) -> str:
    words = [str(degree) for degree in degrees]
    return f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]


def _processes_for(layout: Layout, degree: int, size: int) -> int:
    """How many of `size` processes the other degrees of the layout leave for this one."""
    others = layout.size // degree
    return size // others if size % others == 0 else 1


def _check_tensor(shape: ModelShape, layout: Layout, size: int) -> None:
    """Tensor parallelism divides heads and inner units of a layer into equal parts."""
    if layout.tp == 1:
        return
    unsupported = {
        "experts (use ep)": bool(shape.moe),
        "a state space": shape.mamba is not None,
        "latent attention": shape.mla is not None,
        "a norm over all heads' queries": shape.qk_norm == "full",
        f"{shape.positions} positions": shape.positions in ("alibi", "relative"),
        "an encoder and a decoder": shape.decoder_layers > 0,
    }
    for words, used in unsupported.items():
        if used:
            raise UserError(f"parallel.tp: a model with {words} is not divided this way: write 1, or use dp_shard")
    divisible = gcd(shape.heads, shape.kv_heads, shape.ffn)
    if divisible % layout.tp:
        sizes = f"{shape.heads} heads, {shape.kv_heads} key-value heads and {shape.ffn} inner units"
        fix = _suggest_degrees(lambda tp: divisible % tp == 0, divisible, _processes_for(layout, layout.tp, size))
        raise UserError(f"parallel.tp: {layout.tp} does not divide {sizes}: {fix}")


def _check_context(spec: RunSpec, shape: ModelShape, layout: Layout, context: int, size: int) -> None:
    """Context parallelism divides rows into equal parts: two per process in a ring, one with Ulysses, which also
    divides the heads."""
    if layout.cp == 1:
        return
    ring = spec.parallel.context == "ring"
    if ring:
        _check_ring(spec, shape)
    plain = [task.kind for task in spec.tasks] == ["causal"] and shape.causal
    unsupported = {
        "experts": bool(shape.moe),
        "a state space": shape.mamba is not None,
        f"{shape.positions} positions": shape.positions in ("alibi", "relative"),
        "tasks other than causal": not plain,
    }
    for words, used in unsupported.items():
        if used:
            raise UserError(f"parallel.cp: rows are not divided with {words}: write 1, or use dp_shard")
    heads = shape.heads // layout.tp

    def fits(cp: int) -> bool:
        return (context % (2 * cp) == 0 if ring else heads % cp == 0) and context % (cp * layout.tp) == 0

    if not fits(layout.cp):
        sizes = f"{heads} heads of a process" + (f" and {context} tokens of a row" if context else "")
        if ring:
            sizes = f"{context} tokens of a row in two parts for each process"
        fix = _suggest_degrees(fits, layout.cp if ring else heads, _processes_for(layout, layout.cp, size))
        if not ring and context % (2 * layout.cp) == 0 and context % (layout.cp * layout.tp) == 0:
            fix += ", or parallel.context: ring"
        raise UserError(f"parallel.cp: {layout.cp} does not divide {sizes}: {fix}")


def _check_ring(spec: RunSpec, shape: ModelShape) -> None:
    """A ring merges blocks of keys by their log-sum-exp only."""
    unsupported = {
        "soft caps of logits (model.attention_cap)": shape.attention_cap is not None,
        "dropout.attention": spec.dropout.attention > 0,
    }
    for words, used in unsupported.items():
        if used:
            raise UserError(f"parallel.context: a ring has no {words}: write ulysses, or remove it")


def _check_pipeline(spec: RunSpec, shape: ModelShape, layout: Layout) -> None:
    if layout.pp == 1:
        return
    if shape.decoder_layers:
        raise UserError("parallel.pp: an encoder and a decoder are not cut into stages: write 1")
    stages = layout.pp * stages_each(spec)
    if shape.layers < stages:
        raise UserError(f"parallel.pp: {stages} stages need as many layers, and the model has {shape.layers}: lower pp")


def stages_each(spec: RunSpec) -> int:
    """Pipeline stages per process."""
    pipeline = spec.parallel.pipeline
    return pipeline.stages if pipeline.schedule in ("interleaved", "zero_bubble") else 1


def _check_experts(shape: ModelShape, layout: Layout, size: int) -> None:
    if layout.ep == 1:
        return
    if shape.moe is None:
        raise UserError("parallel.ep: the model has no experts: write 1")
    if layout.ep != layout.dp_shard:
        raise UserError(
            f"parallel.ep: experts are divided among the {layout.dp_shard} processes of dp_shard: "
            f"write ep: {layout.dp_shard}, or dp_shard: {layout.ep}"
        )
    if shape.moe.capacity is not None:
        raise UserError(
            "parallel.ep: a capacity applies to all experts together: remove model.moe.capacity, or write 1"
        )
    if shape.moe.experts % layout.ep:
        experts = shape.moe.experts
        fix = _suggest_degrees(lambda ep: experts % ep == 0, experts, _processes_for(layout, layout.dp, size))
        raise UserError(f"parallel.ep: {layout.ep} does not divide {experts} experts: {fix}")


def _suggest_degree(size: int, fixed: dict[str, int]) -> str:
    """The degree that would fit, for the last key that is set."""
    key = list(fixed)[-1]
    others = 1
    for name, degree in fixed.items():
        others *= degree if name != key else 1
    best = size // others if size % others == 0 else 1
    if key not in (REPLICATE, SHARD):
        best = gcd(best, fixed[key])  # divides the model if the set degree does
    if best == fixed[key]:
        return "leave dp_replicate or dp_shard auto"
    outer_set = REPLICATE in fixed or SHARD in fixed
    return f"write {key}: {best}" + (", or leave dp_replicate and dp_shard auto" if outer_set else "")


def check_deepspeed(spec: RunSpec, shape: ModelShape, size: int, plan: Plan) -> None:
    """Refuse settings that DeepSpeed does not support here, and record its stage in the plan. DeepSpeed shards among
    all processes."""
    for key, words in _unsupported_by_deepspeed(spec, shape, size):
        raise UserError(f"{key}: {words}")
    settings = spec.parallel.deepspeed
    plan.add_requested("parallel.engine", "deepspeed")
    sharding = (
        f"{DIVIDED[settings.zero]} divided among {size} processes" if settings.zero else "every process holds all"
    )
    plan.add(f"{DEEPSPEED_KEY}.zero", settings.zero, sharding if size > 1 else "one process holds all", "asked")
    if settings.offload != "none":
        tensors = "weights and moments" if settings.zero == 3 and settings.offload == "cpu" else "moments"
        place = "host memory" if settings.offload == "cpu" else str(settings.folder)
        plan.add(f"{DEEPSPEED_KEY}.offload", settings.offload, f"{tensors} stay in {place} between uses", "asked")
    missing = ["snapshots in memory (rollbacks read checkpoints)", "trials"]
    if settings.zero:
        missing = ["layer statistics", *missing]
    plan.add("guard", "judges before the update", f"under DeepSpeed without {', '.join(missing)}", "rule")


def check_engine(parallel: ParallelSpec) -> None:
    """Refuse DeepSpeed's keys without DeepSpeed, where they have no effect."""
    if parallel.engine != "deepspeed" and parallel.deepspeed != DeepSpeedSpec():
        raise UserError(
            f"{DEEPSPEED_KEY}: parallel.engine is {parallel.engine}: write engine: deepspeed, or leave this out"
        )


def _unsupported_by_deepspeed(spec: RunSpec, shape: ModelShape, size: int) -> Iterator[tuple[str, str]]:
    parallel, memory = spec.parallel, spec.memory
    yield from _deepspeed_conflicts(parallel)
    for key in ("tp", "cp", "pp", "ep"):
        if getattr(parallel, key) > 1:
            yield f"parallel.{key}", "with DeepSpeed only data parallelism is supported: write 1, or engine: torch"
    if parallel.dp_shard not in ("auto", 1):
        yield (
            "parallel.dp_shard",
            f"DeepSpeed divides by {DEEPSPEED_KEY}.zero (3 is what dp_shard does): write 1 or auto",
        )
    if parallel.dp_replicate not in ("auto", size):
        yield "parallel.dp_replicate", f"there are {size} processes: write {size}, or auto"
    others = {"replicas": ReplicasSpec(), "shard": ShardSpec(), "pipeline": PipelineSpec()}
    for key, usual in others.items():
        if getattr(parallel, key) != usual:
            yield f"parallel.{key}", "for engine: torch; leave it out"
    if memory.lean:
        yield (
            "memory",
            f"weights, moments, offload_optimizer and update are for engine: torch; {DEEPSPEED_KEY}.offload is here",
        )
    if memory.offload_activations:
        yield "memory.offload_activations", "for engine: torch; write false"
    if spec.precision in ("fp8", "fp8_rowwise"):
        yield "precision", f"{spec.precision} is for engine: torch; write bf16"
    if shape.moe:
        yield "model", "experts are for engine: torch"
    if shape.wrapped:
        yield "model", "another library's modules are for engine: torch"
    if spec.optimizer.veto not in ("auto", "host"):
        yield "optimizer.veto", f"{spec.optimizer.veto}: DeepSpeed vetoes a step on the host; write auto"
    yield from _unsupported_by_zero(spec)


def _deepspeed_conflicts(parallel: ParallelSpec) -> Iterator[tuple[str, str]]:
    settings = parallel.deepspeed
    if parallel.device == "mps":
        yield "parallel.device", "mps has no DeepSpeed: write cpu or cuda, or engine: torch"
    if settings.offload != "none" and settings.zero == 0:
        yield f"{DEEPSPEED_KEY}.offload", f"{settings.offload} needs divided moments: write zero: 1, 2 or 3"
    if settings.offload == "nvme" and settings.zero != 3:
        yield f"{DEEPSPEED_KEY}.offload", "nvme needs zero: 3; write that, or offload: cpu"
    if settings.offload == "nvme" and not settings.folder:
        yield f"{DEEPSPEED_KEY}.folder", "offload: nvme needs a folder on the fast disk, such as /local"
    if settings.folder and settings.offload != "nvme":
        yield f"{DEEPSPEED_KEY}.folder", f"offload is {settings.offload}: write offload: nvme, or leave the folder out"


def _unsupported_by_zero(spec: RunSpec) -> Iterator[tuple[str, str]]:
    zero, name = spec.parallel.deepspeed.zero, spec.optimizer.name
    if zero and name not in SHARDABLE:
        yield "optimizer.name", f"{name} on shards: write {' or '.join(SHARDABLE)}, or {DEEPSPEED_KEY}.zero: 0"
    if name == "muon":  # at any stage
        yield "optimizer.name", "muon has AdamW beside it, and DeepSpeed steps one optimizer: write engine: torch"
    if zero == 3 and spec.optimizer.ema:
        yield "optimizer.ema", f"{DEEPSPEED_KEY}.zero: 3 shards the weights: write zero: 2, or leave the average out"
    if zero == 3 and spec.compile in ("block", "chain"):
        yield "compile", f"{DEEPSPEED_KEY}.zero: 3 gathers layers when they are called: write off, or zero: 2"


def record_replicas(spec: RunSpec, layout: Layout, plan: Plan) -> None:
    """Refuse these keys in layouts without DDP, which reduces the gradients of full replicas."""
    settings, usual = spec.parallel.replicas, ReplicasSpec()
    changed = [key for key in ReplicasSpec.model_fields if getattr(settings, key) != getattr(usual, key)]
    if not changed or layout.size == 1:  # one process sends nothing and may run the same spec
        return
    if layout.size > layout.dp_replicate:
        degree = next(key for key in ("dp_shard", "tp", "cp", "pp") if getattr(layout, key) > 1)
        raise UserError(
            f"{REPLICAS_KEY}.{changed[0]}: for full replicas, and parallel.{degree} is {getattr(layout, degree)}: "
            f"write parallel.{degree}: 1, or leave this out"
        )
    if settings.divide_optimizer and spec.memory.update == "in_backward":
        raise UserError(f"{REPLICAS_KEY}.divide_optimizer: memory.update is in_backward: write after, or false here")
    for key in changed:
        plan.add_requested(f"{REPLICAS_KEY}.{key}", getattr(settings, key))
    if settings.compress != "none":
        plan.add(f"{REPLICAS_KEY}.compress", settings.compress, CHANGES[settings.compress], "asked")
    if settings.divide_optimizer:
        reason = f"each of {layout.dp_replicate} replicas keeps and steps its share of the moments"
        plan.add(f"{REPLICAS_KEY}.divide_optimizer", True, f"{reason}, whole tensors", "asked")


def check_processes(spec: RunSpec, folder_shape: ModelShape | None, size: int) -> None:
    """Refuse a layout before processes start and data is read. `folder_shape` is the shape of a folder of weights. What
    depends on the data (an open context) or on this machine's memory is checked later."""
    vocab = spec.tokenizer.vocab
    shape = model_shape(
        spec.model, folder_shape.vocab if folder_shape else vocab if isinstance(vocab, int) else 0, folder_shape
    )
    context = spec.data.context if isinstance(spec.data.context, int) else 0  # every degree divides 0
    unlimited = Machine("cpu", "any", 1 << 60, 1)
    record_replicas(spec, decide_layout(spec, shape, context, unlimited, size, Plan()), Plan())


def check_static_graph(spec: RunSpec, layout: Layout, training: TrainPlan) -> None:
    """DDP records the graph in the first backward pass, and fails if that pass does not send its gradients. With
    several micro-batches per step only the last one sends them."""
    if not spec.parallel.replicas.static_graph or layout.size == 1:
        return
    rows = -(-max(rows for _, rows in training.batch_rows) // layout.dp)
    if rows > training.micro_rows:
        raise UserError(
            f"{REPLICAS_KEY}.static_graph: a process takes {rows} rows of a step in passes of {training.micro_rows}, "
            f"and it has to take them in one: write budget.micro_batch: {rows}, or false here"
        )
