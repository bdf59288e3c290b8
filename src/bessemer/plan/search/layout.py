"""How a model is laid over the processes of a run: how many replicas, among how many each is divided, and how.

What `parallel.engine: deepspeed` asks for, checked before anything is built and told in the plan.

Nothing that the engine cannot do is left out in silence: each is refused by the key that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.spec.optimizer import optimizer_bytes
from bessemer.spec.parallel import DeepSpeedSpec, ParallelSpec, PipelineSpec, ReplicasSpec, ShardSpec
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

REPLICATE, SHARD = "parallel.dp_replicate", "parallel.dp_shard"
# Optimizers whose step of a part is the part of their step.
ELEMENTWISE = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "radam", "adamax", "lion")
WHOLE = 0.25  # of a device's memory that weights, gradients and moments may take before they are divided


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The product of all but `ep` is the number of processes; experts are divided among those
    that divide the other weights."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Among how many processes the rows of a step are divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def inner(self) -> bool:
        """Whether a replica is divided by more than its weights."""
        return self.tp * self.cp * self.pp > 1

    @property
    def held(self) -> int:
        """Into how many parts the weights of a replica are divided."""
        return self.dp_shard * self.cp * self.tp * self.pp


ALONE = Layout()


def decide_layout(spec: RunSpec, shape: ModelShape, context: int, machine: Machine, size: int, plan: Plan) -> Layout:
    """What the spec asks for if it fills the processes; what it leaves open is decided by whether one device holds a
    whole replica with room to spare. Either gives the same losses, so a resumed run is free to choose anew."""
    asked = spec.parallel
    check_engine(asked)
    if asked.engine == "deepspeed":
        check_zero(spec, shape, size, plan)
        return Layout(dp_replicate=size)
    inner = {"tp": asked.tp, "cp": asked.cp, "pp": asked.pp}
    given = {REPLICATE: asked.dp_replicate, SHARD: asked.dp_shard}
    fixed = {key: int(degree) for key, degree in given.items() if degree != "auto"}
    fixed |= {f"parallel.{key}": degree for key, degree in inner.items() if degree > 1}
    settled = Layout(fixed.get(REPLICATE, 1), fixed.get(SHARD, 1), **inner)
    _check_tensor(shape, settled, size)
    _check_context(spec, shape, settled, context, size)
    product = 1
    for key, degree in fixed.items():
        plan.asked(key, degree)
        product *= degree
    open_keys = [key for key in given if key not in fixed]
    if size % product or (not open_keys and product != size):
        words = " x ".join(f"{key.removeprefix('parallel.')} {degree}" for key, degree in fixed.items())
        raise UserError(f"parallel: {words} needs {product} processes, and there are {size}: {_nearest(size, fixed)}")
    left = size // product
    degrees = {key: int(fixed.get(key, 1)) for key in given}
    if size > 1 and len(open_keys) == 1:
        degrees[open_keys[0]] = plan.add(open_keys[0], left, f"what is left of {size} processes", "rule")
    elif size > 1 and open_keys:
        whole = optimizer_bytes(spec.optimizer, spec.memory, spec.precision).device * shape.parameters
        part = whole // (asked.tp * asked.pp)
        fits = part <= WHOLE * machine.memory_bytes and asked.ep == 1
        held = f"weights, gradients and moments are {human_bytes(part)} of {human_bytes(machine.memory_bytes)}: "
        reason = held + ("each device holds them whole" if fits else "they are divided among all devices")
        if asked.ep > 1:
            reason = "experts are divided among the same processes as the other weights"
        shards = 1 if fits else asked.ep if asked.ep > 1 and left % asked.ep == 0 else left
        degrees = {REPLICATE: left // shards, SHARD: shards}
        for key, degree in degrees.items():
            plan.add(key, degree, reason, "estimate")
    layout = Layout(degrees[REPLICATE], degrees[SHARD], **inner, ep=asked.ep)
    check_layout(spec, shape, layout, context)
    return layout


def data_ranks(asked: ParallelSpec, size: int) -> int:
    """Among how many of `size` processes the rows of a step are divided."""
    return size if asked.engine == "deepspeed" else size // (asked.tp * asked.cp * asked.pp)


def check_layout(spec: RunSpec, shape: ModelShape, layout: Layout, context: int, size: int = 0) -> None:
    """Refuse, with the fix, what a model cannot be divided by or what would not be the same run. `size` is the number
    of processes where the layout has settled only some degrees, and is 1 in the others."""
    size = size or layout.size
    if layout.size > 1 or spec.parallel.shard.alone:
        _refuse(spec, shape, layout)
    _check_tensor(shape, layout, size)
    _check_context(spec, shape, layout, context, size)
    _check_pipeline(spec, shape, layout)
    _check_experts(shape, layout, size)


def _refuse(spec: RunSpec, shape: ModelShape, layout: Layout) -> None:
    """What would not be the same run over several processes."""
    name = spec.optimizer.name
    parts = layout.held > 1 or spec.parallel.shard.alone
    faults = {
        "model: another library's modules are not divided": bool(shape.wrapped),
        "memory.update: in_backward": spec.memory.update == "in_backward",
        "memory.offload_activations": spec.memory.offload_activations,
        f"precision: {spec.precision}": spec.precision in ("fp8", "fp8_rowwise"),
    }
    halves = {
        f"memory.weights: {spec.memory.kept} keeps vectors in fp32 beside matrices in bf16": spec.memory.kept != "fp32",
        f"optimizer.name: {name} steps whole matrices": name not in ELEMENTWISE,
    }
    for words, found in faults.items():
        if found:
            raise UserError(f"{words}: for one process in this version; change this, or run it in one (WORLD_SIZE=1)")
    for words, found in halves.items():
        if found and parts:
            raise UserError(f"{words}: not divided in this version; change this, or write parallel.dp_shard: 1")


def _degrees(fits: Callable[[int], bool], above: int, room: int) -> str:
    """The degrees that the model and `room` processes allow, in words; where there are none, what the model allows."""
    allowed = [degree for degree in range(2, min(above, 64) + 1) if fits(degree)]
    found = [degree for degree in allowed if room % degree == 0]
    if found or not allowed:
        return f"write {_either(found or [1])}"
    return f"write 1, or {_either(allowed)} on a multiple of as many processes"


def _either(degrees: list[int]) -> str:
    words = [str(degree) for degree in degrees]
    return f"{', '.join(words[:-1])} or {words[-1]}" if words[1:] else words[0]


def _room(layout: Layout, degree: int, size: int) -> int:
    """How many of `size` processes this degree may take, beside the others of the layout."""
    others = layout.size // degree
    return size // others if size % others == 0 else 1


def _check_tensor(shape: ModelShape, layout: Layout, size: int) -> None:
    """Every matrix of a layer must fall into equal parts along its heads and inner units."""
    if layout.tp == 1:
        return
    faults = {
        "experts (use ep)": bool(shape.moe),
        "a state space": shape.mamba is not None,
        "latent attention": shape.mla is not None,
        "a norm over all heads' queries": shape.qk_norm == "full",
        f"{shape.positions} positions": shape.positions in ("alibi", "relative"),
        "an encoder and a decoder": shape.decoder_layers > 0,
    }
    for words, found in faults.items():
        if found:
            raise UserError(f"parallel.tp: a model with {words} is not divided this way: write 1, or use dp_shard")
    whole = gcd(shape.heads, shape.kv_heads, shape.ffn)
    if whole % layout.tp:
        sizes = f"{shape.heads} heads, {shape.kv_heads} key-value heads and {shape.ffn} inner units"
        fix = _degrees(lambda tp: whole % tp == 0, whole, _room(layout, layout.tp, size))
        raise UserError(f"parallel.tp: {layout.tp} does not divide {sizes}: {fix}")


def _check_context(spec: RunSpec, shape: ModelShape, layout: Layout, context: int, size: int) -> None:
    """Rows must fall into equal parts: two for each process of a ring, and one where heads are exchanged for columns
    around attention, which must do so too."""
    if layout.cp == 1:
        return
    ring = spec.parallel.context == "ring"
    if ring:
        _check_ring(spec, shape)
    plain = [task.kind for task in spec.tasks] == ["causal"] and shape.causal
    faults = {
        "experts": bool(shape.moe),
        "a state space": shape.mamba is not None,
        f"{shape.positions} positions": shape.positions in ("alibi", "relative"),
        "tasks other than causal": not plain,
    }
    for words, found in faults.items():
        if found:
            raise UserError(f"parallel.cp: rows are not divided with {words}: write 1, or use dp_shard")
    heads = shape.heads // layout.tp

    def fits(cp: int) -> bool:
        return (context % (2 * cp) == 0 if ring else heads % cp == 0) and context % (cp * layout.tp) == 0

    if not fits(layout.cp):
        sizes = f"{heads} heads of a process" + (f" and {context} tokens of a row" if context else "")
        if ring:
            sizes = f"{context} tokens of a row in two parts for each process"
        fix = _degrees(fits, layout.cp if ring else heads, _room(layout, layout.cp, size))
        if not ring and context % (2 * layout.cp) == 0 and context % (layout.cp * layout.tp) == 0:
            fix += ", or parallel.context: ring"
        raise UserError(f"parallel.cp: {layout.cp} does not divide {sizes}: {fix}")


def _check_ring(spec: RunSpec, shape: ModelShape) -> None:
    """Blocks of keys are merged by their log-sum-exp alone."""
    faults = {
        "soft caps of logits (model.attention_cap)": shape.attention_cap is not None,
        "dropout.attention": spec.dropout.attention > 0,
    }
    for words, found in faults.items():
        if found:
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
    """How many stages a process holds."""
    asked = spec.parallel.pipeline
    return asked.stages if asked.schedule in ("interleaved", "zero_bubble") else 1


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
            "parallel.ep: a capacity is kept by all experts together: remove model.moe.capacity, or write 1"
        )
    if shape.moe.experts % layout.ep:
        experts = shape.moe.experts
        fix = _degrees(lambda ep: experts % ep == 0, experts, _room(layout, layout.dp, size))
        raise UserError(f"parallel.ep: {layout.ep} does not divide {experts} experts: {fix}")


def _nearest(size: int, fixed: dict[str, int]) -> str:
    """The degree that would fit, of the key that is given last."""
    key = list(fixed)[-1]
    others = 1
    for name, degree in fixed.items():
        others *= degree if name != key else 1
    best = size // others if size % others == 0 else 1
    if key not in (REPLICATE, SHARD):
        best = gcd(best, fixed[key])  # divides the model as the given degree does
    if best == fixed[key]:
        return "leave dp_replicate or dp_shard auto"
    written = REPLICATE in fixed or SHARD in fixed
    return f"write {key}: {best}" + (", or leave dp_replicate and dp_shard auto" if written else "")


DEEPSPEED_KEY = "parallel.deepspeed"
STEPPED_IN_PARTS = ("adamw", "adam", "sgd", "lion")  # whose step of a flat part is the part of their step
DIVIDED = ("nothing", "moments", "moments and gradients", "weights, gradients and moments")


def check_zero(spec: RunSpec, shape: ModelShape, size: int, plan: Plan) -> None:
    """Refuse what DeepSpeed does not do here; say in the plan what it does. The engine divides among all processes."""
    for key, words in _faults(spec, shape, size):
        raise UserError(f"{key}: {words}")
    asked = spec.parallel.deepspeed
    plan.asked("parallel.engine", "deepspeed")
    among = f"{DIVIDED[asked.zero]} divided among {size} processes" if size > 1 else "one process holds everything"
    plan.add(f"{DEEPSPEED_KEY}.zero", asked.zero, among if asked.zero else "every process holds everything", "asked")
    if asked.offload != "none":
        what = "weights and moments" if asked.zero == 3 and asked.offload == "cpu" else "moments"
        where = "the host's memory" if asked.offload == "cpu" else str(asked.folder)
        plan.add(f"{DEEPSPEED_KEY}.offload", asked.offload, f"{what} lie in {where} between uses", "asked")
    lost = ["copies in memory (rollbacks read checkpoints)", "trials"]
    if asked.zero:
        lost = ["looks inside the model", *lost]
    plan.add("guard", "judges before the update", f"under DeepSpeed without {', '.join(lost)}", "rule")


def check_engine(parallel: ParallelSpec) -> None:
    """DeepSpeed's keys without DeepSpeed would change nothing."""
    if parallel.engine != "deepspeed" and parallel.deepspeed != DeepSpeedSpec():
        raise UserError(
            f"{DEEPSPEED_KEY}: parallel.engine is {parallel.engine}: write engine: deepspeed, or leave this out"
        )


def _faults(spec: RunSpec, shape: ModelShape, size: int) -> Iterator[tuple[str, str]]:
    parallel, memory = spec.parallel, spec.memory
    yield from _misplaced(parallel)
    for key in ("tp", "cp", "pp", "ep"):
        if getattr(parallel, key) > 1:
            yield f"parallel.{key}", "DeepSpeed divides a run by its rows alone here: write 1, or engine: torch"
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
        yield "optimizer.veto", f"{spec.optimizer.veto}: DeepSpeed's step is withheld by a host read; write auto"
    yield from _of_stage(spec)


def _misplaced(parallel: ParallelSpec) -> Iterator[tuple[str, str]]:
    asked = parallel.deepspeed
    if parallel.device == "mps":
        yield "parallel.device", "mps has no DeepSpeed: write cpu or cuda, or engine: torch"
    if asked.offload != "none" and asked.zero == 0:
        yield f"{DEEPSPEED_KEY}.offload", f"{asked.offload} needs divided moments: write zero: 1, 2 or 3"
    if asked.offload == "nvme" and asked.zero != 3:
        yield f"{DEEPSPEED_KEY}.offload", "nvme needs zero: 3; write that, or offload: cpu"
    if asked.offload == "nvme" and not asked.folder:
        yield f"{DEEPSPEED_KEY}.folder", "offload: nvme needs a folder on the fast disk, such as /local"
    if asked.folder and asked.offload != "nvme":
        yield f"{DEEPSPEED_KEY}.folder", f"offload is {asked.offload}: write offload: nvme, or leave the folder out"


def _of_stage(spec: RunSpec) -> Iterator[tuple[str, str]]:
    zero, name = spec.parallel.deepspeed.zero, spec.optimizer.name
    if zero and name not in STEPPED_IN_PARTS:
        yield (
            "optimizer.name",
            f"{name} over parts of a matrix: write {' or '.join(STEPPED_IN_PARTS)}, or {DEEPSPEED_KEY}.zero: 0",
        )
    if zero == 3 and spec.optimizer.ema:
        yield (
            "optimizer.ema",
            f"weights lie in parts under {DEEPSPEED_KEY}.zero: 3: write zero: 2, or leave the average out",
        )
    if zero == 3 and spec.compile in ("block", "chain"):
        yield "compile", f"layers are gathered as they are called under {DEEPSPEED_KEY}.zero: 3: write off, or zero: 2"
