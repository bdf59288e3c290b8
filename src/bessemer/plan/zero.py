"""What `parallel.engine: deepspeed` asks for, checked before anything is built and told in the plan.

Nothing that the engine cannot do is left out in silence: each is refused by the key that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.spec.parallel import DeepSpeedSpec, ParallelSpec, PipelineSpec, ReplicasSpec, ShardSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

KEY = "parallel.deepspeed"
STEPPED_IN_PARTS = ("adamw", "adam", "sgd", "lion")  # whose step of a flat part is the part of their step
DIVIDED = ("nothing", "moments", "moments and gradients", "weights, gradients and moments")


def check_zero(spec: RunSpec, shape: ModelShape, size: int, plan: Plan) -> None:
    """Refuse what DeepSpeed does not do here; say in the plan what it does. The engine divides among all processes."""
    for key, words in _faults(spec, shape, size):
        raise UserError(f"{key}: {words}")
    asked = spec.parallel.deepspeed
    plan.asked("parallel.engine", "deepspeed")
    among = f"{DIVIDED[asked.zero]} divided among {size} processes" if size > 1 else "one process holds everything"
    plan.add(f"{KEY}.zero", asked.zero, among if asked.zero else "every process holds everything", "asked")
    if asked.offload != "none":
        what = "weights and moments" if asked.zero == 3 and asked.offload == "cpu" else "moments"
        where = "the host's memory" if asked.offload == "cpu" else str(asked.folder)
        plan.add(f"{KEY}.offload", asked.offload, f"{what} lie in {where} between uses", "asked")
    lost = ["copies in memory (rollbacks read checkpoints)", "trials"]
    if asked.zero:
        lost = ["looks inside the model", *lost]
    plan.add("guard", "judges before the update", f"under DeepSpeed without {', '.join(lost)}", "rule")


def check_engine(parallel: ParallelSpec) -> None:
    """DeepSpeed's keys without DeepSpeed would change nothing."""
    if parallel.engine != "deepspeed" and parallel.deepspeed != DeepSpeedSpec():
        raise UserError(f"{KEY}: parallel.engine is {parallel.engine}: write engine: deepspeed, or leave this out")


def _faults(spec: RunSpec, shape: ModelShape, size: int) -> Iterator[tuple[str, str]]:
    parallel, memory = spec.parallel, spec.memory
    yield from _misplaced(parallel)
    for key in ("tp", "cp", "pp", "ep"):
        if getattr(parallel, key) > 1:
            yield f"parallel.{key}", "DeepSpeed divides a run by its rows alone here: write 1, or engine: torch"
    if parallel.dp_shard not in ("auto", 1):
        yield "parallel.dp_shard", f"DeepSpeed divides by {KEY}.zero (3 is what dp_shard does): write 1 or auto"
    if parallel.dp_replicate not in ("auto", size):
        yield "parallel.dp_replicate", f"there are {size} processes: write {size}, or auto"
    others = {"replicas": ReplicasSpec(), "shard": ShardSpec(), "pipeline": PipelineSpec()}
    for key, usual in others.items():
        if getattr(parallel, key) != usual:
            yield f"parallel.{key}", "for engine: torch; leave it out"
    if memory.lean:
        yield "memory", f"weights, moments, offload_optimizer and update are for engine: torch; {KEY}.offload is here"
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
        yield f"{KEY}.offload", f"{asked.offload} needs divided moments: write zero: 1, 2 or 3"
    if asked.offload == "nvme" and asked.zero != 3:
        yield f"{KEY}.offload", "nvme needs zero: 3; write that, or offload: cpu"
    if asked.offload == "nvme" and not asked.folder:
        yield f"{KEY}.folder", "offload: nvme needs a folder on the fast disk, such as /local"
    if asked.folder and asked.offload != "nvme":
        yield f"{KEY}.folder", f"offload is {asked.offload}: write offload: nvme, or leave the folder out"


def _of_stage(spec: RunSpec) -> Iterator[tuple[str, str]]:
    zero, name = spec.parallel.deepspeed.zero, spec.optimizer.name
    if zero and name not in STEPPED_IN_PARTS:
        yield (
            "optimizer.name",
            f"{name} over parts of a matrix: write {' or '.join(STEPPED_IN_PARTS)}, or {KEY}.zero: 0",
        )
    if zero == 3 and spec.optimizer.ema:
        yield "optimizer.ema", f"weights lie in parts under {KEY}.zero: 3: write zero: 2, or leave the average out"
    if zero == 3 and spec.compile in ("block", "chain"):
        yield "compile", f"layers are gathered as they are called under {KEY}.zero: 3: write off, or zero: 2"
