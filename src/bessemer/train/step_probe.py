"""The time of a job's step, measured before its first one: the base of the time that a run says it will take."""

from __future__ import annotations

import statistics
import time

import torch

from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.train.device import median_s, synchronize
from bessemer.train.engine import Engine, forward_backward
from bessemer.train.memory.fit import release
from bessemer.train.speed import LONGEST_S, random_batch, rate_here

MEASURE_S = 1.0  # for the passes of a row
UPDATE_BYTES = 40  # read and written for a parameter by clipping and AdamW's update


def step_seconds(
    engine: Engine, stream: BatchStream | IterableStream, step: int, rows: int, matmul_rate: float
) -> float | None:
    """Seconds of a step of `rows` rows, measured on the job's own model and rows before its first step: passes over one
    row, repeated, and the update. Gradients are dropped and the random state is put back, so the run is the same with
    or without it. None where that cannot be measured.

    One row is about as fast as many: 10M parameters, context 512, on two busy ARM cores gave 615 to 716 tokens/s with
    1 to 8 rows, where nothing interrupted a pass. A row that would take long is replaced by a short one through the
    first layers.
    """
    if engine.world.size > 1 or not engine.optimizer.whole or not engine.optimizer.judged_first:
        return None
    context, shape = engine.plan.context, engine.model.shape
    update_s = UPDATE_BYTES * sum(p.numel() for p in engine.optimizer.parameters) / _memory_rate(engine.device)
    row_flops = shape.flops_per_token(context) * context
    if row_flops <= LONGEST_S * matmul_rate:
        return rows * _row_seconds(engine, stream, step) + update_s
    if shape.wrapped or shape.decoder_layers:
        return None
    return rows * context / rate_here(shape, context, engine.plan.precision, engine.device, matmul_rate) + update_s


def _row_seconds(engine: Engine, stream: BatchStream | IterableStream, step: int) -> float:
    """Of forward and backward: the median of as many as fit in MEASURE_S."""
    if isinstance(stream, IterableStream):  # which cannot be read ahead of its turn
        batch = random_batch(engine.model.shape.vocab, 1, engine.plan.context)
    else:
        batch = stream.micro_batches(step, engine.plan.micro_rows)[0].part(0, 1)

    times: list[float] = []
    with torch.random.fork_rng([]):
        while not times[1:] or sum(times[1:]) < MEASURE_S:
            began = time.perf_counter()
            inputs = engine.inputs([batch])
            forward_backward(engine.model, engine.objective, inputs, batch.count or 1.0, engine.plan.precision)
            synchronize(engine.device)
            times.append(time.perf_counter() - began)
            release(engine)
    return statistics.median(times[1:])  # the first pays for allocations


def _memory_rate(device: torch.device) -> float:
    """Bytes a second of an element-wise pass, which an update is a few of."""
    values = torch.ones(1 << 22, device=device)
    return 8 * values.numel() / median_s(lambda: values.mul_(1.0), device, 0.02)
