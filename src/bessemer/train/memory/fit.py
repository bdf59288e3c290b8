"""Fits the micro-batch to the device memory. A probe before the first step measures the peak and corrects the planner's
estimate; a step that runs out of memory is explained and repeated with smaller micro-batches.

Nothing is updated before all micro-batches of a step are summed, so a failed attempt leaves no trace, and the rows and
the loss of the step stay the same. Several ranks probe and shrink together; one that runs out of memory during a step
ends, and the launcher restarts all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.errors import UserError
from bessemer.parallel.world import World
from bessemer.plan.cost_model.memory import (
    ACTIVATIONS,
    MOST_TOKENS,
    RECOMPUTE_MODES,
    ROWS,
    SHARE,
    MemoryNeeds,
    Passes,
    estimate_memory,
)
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.plan.search.proposal import memory_fallbacks
from bessemer.spec.optimizer import LOW_MEMORY_OPTIMIZERS
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import memory_limit
from bessemer.train.engine import Engine, forward_backward
from bessemer.train.job import Job
from bessemer.train.memory import recompute
from bessemer.train.speed import random_batch

OWN_BYTES = 2 << 30  # of this process besides torch's: CUDA context and libraries
# As cuBLAS, cuDNN, the CPU's allocator and the driver word it.
MESSAGES = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in MESSAGES)


def split(batches: list[Batch], rows: int) -> list[Batch]:
    """The same rows in micro-batches of at most `rows`."""
    cuts = [(batch, start) for batch in batches for start in range(0, len(batch.positions), rows)]
    return batches if len(cuts) == len(batches) else [batch.part(start, start + rows) for batch, start in cuts]


class MemoryGauge:
    """Reads a GPU's memory, in bytes, as torch counts it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def limit(self) -> int:
        """What a run may use."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(SHARE["cuda"] * (free + torch.cuda.memory_reserved(self.device)))

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Since `start`."""
        return torch.cuda.max_memory_allocated(self.device)

    def standing(self) -> int:
        return torch.cuda.memory_allocated(self.device)


def fit(job: Job, plan: Plan, resumed: bool, gauge: MemoryGauge | None = None) -> int | None:
    """Probe a new run before its first step and correct the settings that the spec leaves open; the expected peak of
    its steps. Only a GPU is probed: a CPU's memory is shared with other processes.

    The rank with the least memory decides. Where ranks communicate inside a pass, one that fails would leave the others
    waiting: there only one row is measured, and the peak of more rows is extrapolated.
    """
    engine, spec = job.engine, job.spec
    open_rows = spec.budget.micro_batch == "auto" and spec.memory.update == "after"
    if gauge is None and engine.device.type == "cuda":
        gauge = MemoryGauge(engine.device)
    if gauge is None:
        return None
    world, communicates = job.world, communicates_in_passes(job.world)
    static = world.size > 1 and spec.parallel.replicas.static_graph  # DDP learns from the first passes
    if resumed or static or engine.pipeline or not engine.optimizer.whole or (communicates and not open_rows):
        return estimate_needs(engine).total
    if not (open_rows or spec.memory.activations == "auto"):
        return estimate_needs(engine).total
    if communicates:
        resize(engine, 1)
    limit = min(world.gather(gauge.limit()))
    while (peak := _largest(world.gather(probe(engine, job.data.stream, gauge)))) is None or (
        peak > limit and engine.plan.micro_rows == 1
    ):
        if (change := reduce_memory(job, plan, "a probing step ran out of memory")) is None:
            return estimate_needs(engine).total  # the first step will explain it
        job.recorder.event("out_of_memory", reason=f"probing: {change}")
    if not open_rows:
        return peak
    rows, batch = engine.plan.micro_rows, -(-min(rows for _, rows in engine.plan.batch_rows) // world.layout.dp)
    gradients = sum(p.numel() * max(4, p.element_size()) for p in engine.optimizer.parameters)  # accumulated in fp32
    most = max(1, MOST_TOKENS["cuda"] // engine.plan.context)
    standing = max(world.gather(gauge.standing()))
    best, each = rows_that_fit(peak, rows, standing, gradients, batch, limit, most)
    resize(engine, best)
    took = f"took {human_bytes(peak)} of {human_bytes(limit)}, {human_bytes(each)} a row"
    plan.add(ROWS, best, f"a probing step of {rows} rows {took}", "measured")
    return int(peak + (best - rows) * each)


def communicates_in_passes(world: World) -> bool:
    """Whether ranks communicate in a pass that reduces no gradients: all do but full replicas."""
    return world.size > world.layout.dp_replicate


def _largest(peaks: Sequence[int | None]) -> int | None:
    """The largest over ranks; None if one of them ran out of memory."""
    return None if None in peaks else max(peak for peak in peaks if peak is not None)


def rows_that_fit(
    peak: int, rows: int, standing: int, gradients: int, batch: int, limit: int, most: int
) -> tuple[int, float]:
    """The largest divisor of the batch, at most `most`, whose peak is within the limit; and the bytes per row. Assumes
    a peak linear in the rows, through one measurement with `rows`. Accumulated gradients add to activations unless one
    micro-batch is the whole batch."""
    each = (peak - standing - gradients * (rows < batch)) / rows
    sizes = [n for n in range(1, min(batch, most) + 1) if batch % n == 0]
    return max((n for n in sizes if standing + gradients * (n < batch) + n * each <= limit), default=1), each


def probe(engine: Engine, stream: BatchStream | IterableStream, gauge: MemoryGauge) -> int | None:
    """Peak bytes of forward and backward passes, or None where they do not fit. Two micro-batches if the step has as
    many: the second one meets the gradients of the first."""
    rows, world = engine.plan.micro_rows, engine.world
    if isinstance(stream, IterableStream):  # cannot be read ahead
        batches = [random_batch(engine.model.shape.vocab, rows, engine.plan.context)] * 2
    else:  # real batches: their masks count too, and what is compiled for them serves the first step
        batches = stream.micro_batches(0, rows, world.dp_rank, world.layout.dp)[:2]
    gauge.start()
    peak = None
    engine.optimizer.accumulate(len(batches) > 1)
    try:
        forward_backward(
            engine.model, engine.objective, engine.inputs(batches), batches[0].count or 1.0, engine.plan.precision,
            sync_gradients=communicates_in_passes(world),
        )  # fmt: skip
        peak = gauge.peak()
    except RuntimeError as error:
        if not out_of_memory(error) or communicates_in_passes(world):
            raise
    engine.release_memory()
    return peak


def resize(engine: Engine, rows: int) -> None:
    engine.plan = replace(engine.plan, micro_rows=rows)
    for block in engine.model.blocks:
        if (compiled := getattr(block, "compiled", None)) is not None:
            compiled.size = (rows, engine.plan.context)


def estimate_needs(engine: Engine) -> MemoryNeeds:
    """The planner's estimate for the engine's present settings."""
    passes = _passes(engine.plan, engine.is_compiled, engine.device, engine.world.layout.dp_shard)
    return estimate_memory(engine.spec, engine.model.shape, passes)


def _passes(plan: TrainPlan, compiled: bool, device: torch.device, shards: int) -> Passes:
    several = plan.micro_rows < max(rows for _, rows in plan.batch_rows)
    how = (plan.context, plan.micro_rows, plan.precision, plan.activations, compiled)
    return Passes(*how, device.type, several, shards)


@contextmanager
def explain_build_out_of_memory(
    spec: RunSpec, shape: ModelShape, plan: TrainPlan, device: torch.device, shards: int
) -> Iterator[None]:
    """Turns running out of memory while the model is built into a UserError that says what to change."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        need = estimate_memory(spec, shape, _passes(plan, plan.compiled, device, shards))
        took, fix = f"by estimate a step takes {human_bytes(need.total)}: {need.words()}", ""
        if device.type == "cuda" and shards == 1:
            usable = MemoryGauge(device).limit()
            fix = memory_fallbacks(spec, shape, plan.context, plan.precision, usable, int(usable / SHARE["cuda"]))
        raise UserError(
            f"out of memory while the model was built: {took}. {device_memory(device)}. {fix or advice(spec, plan)}"
        ) from error


def device_memory(device: torch.device) -> str:
    """The size of the device's memory, and what other processes hold of it."""
    if device.type != "cuda":
        return f"The machine has {human_bytes(memory_limit(device))}"
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    size = f"The device has {human_bytes(total)}"
    return size if others < OWN_BYTES else f"{size}, and other processes hold {human_bytes(others)} of it"


def report_out_of_memory(job: Job, error: RuntimeError) -> str:
    """Running out of memory in an update or an evaluation ends the run: the reason, also written as an event."""
    message = str(error).split("\n")[0]
    reason = f"out of memory outside of a step's passes: by estimate these take {estimate_needs(job.engine).words()}"
    reason = f"{reason}. {device_memory(job.engine.device)}. {advice(job.spec, job.plan)}; the last checkpoint stands"
    job.recorder.event("out_of_memory", reason=reason, said=message)
    return reason


def reduce_memory(job: Job, plan: Plan, why: str) -> str | None:
    """Take the next step to need less memory that the spec leaves open: drop the guard's snapshots, then fewer rows per
    micro-batch, then more activation recomputation. Returns what was done, None if nothing is left."""
    if job.guard.snapshots is not None:
        job.guard.snapshots = None
        return "the guard's snapshots in memory are dropped, and rollbacks read checkpoints"
    engine, spec = job.engine, job.spec
    rows, how = engine.plan.micro_rows, engine.plan.activations
    if rows > 1 and spec.budget.micro_batch == "auto" and spec.memory.update == "after":
        fewer = max(n for n in range(1, rows // 2 + 1) if rows % n == 0)
        resize(engine, fewer)
        plan.add(ROWS, fewer, f"{why} with {rows}", "measured")
        return f"{ROWS} is {fewer} instead of {rows}"
    if spec.memory.activations == "auto" and how != RECOMPUTE_MODES[-1]:
        more = RECOMPUTE_MODES[RECOMPUTE_MODES.index(str(how)) + 1]
        engine.plan = replace(engine.plan, activations=more)
        recompute.apply(engine.model, more, spec.memory.offload_activations)
        plan.add(ACTIVATIONS, more, f"{why} with {how} at {rows} rows", "measured")
        return f"{ACTIVATIONS} is {more} instead of {how}"
    return None


def shrink_micro_batch(job: Job, step: int, message: str) -> str | None:
    """After a pass that ran out of memory: None if the step can be repeated, otherwise the reason with the fix."""
    job.engine.release_memory()
    took = estimate_needs(job.engine).words()
    path, change = job.recorder.run.folder / "plan.json", None
    if job.engine.optimizer.rejects_before_update:  # otherwise some weights are already updated
        decisions = Plan.from_json(path.read_text())
        change = reduce_memory(job, decisions, f"step {step} ran out of memory")
    if change is None:
        reason = f"out of memory at step {step}: by estimate {took}. {advice(job.spec, job.plan)}"
        job.recorder.event("out_of_memory", step=step, reason=reason, said=message)
        return reason
    job.recorder.run.write_file(path.name, decisions.to_json())  # a resume keeps it
    job.recorder.run.write_file("settings.json", job.plan.to_json())
    job.recorder.event(
        "out_of_memory", step=step, reason=f"by estimate {took}. {change}: the same step again", said=message
    )
    return None


def advice(spec: RunSpec, plan: TrainPlan) -> str:
    """Settings of the spec that save memory, the cheapest first."""
    memory = spec.memory
    low_memory = spec.optimizer.name in LOW_MEMORY_OPTIMIZERS
    half = low_memory and plan.precision in ("bf16", "fp8", "fp8_rowwise")
    options = {
        f"budget.micro_batch: {plan.micro_rows // 2}": plan.micro_rows > 1 and memory.update == "after",
        f"memory.activations: {'selective' if plan.activations == 'none' else 'full'}": plan.activations != "full",
        "memory.moments: 8bit": low_memory and memory.moments == "fp32",
        "memory.weights: stochastic": half and memory.kept != "stochastic",
        "memory.offload_optimizer: true": low_memory and not memory.offload_optimizer,
        "memory.offload_activations: true": not memory.offload_activations,
        "a shorter data.context": True,
    }
    return "Write " + ", or ".join(option for option, possible in options.items() if possible)
