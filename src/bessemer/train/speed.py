"""Measures how fast a model shape trains on this machine: a few steps on random tokens, for `bessemer plan`; and a step
of a run before it starts, for its estimated duration.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace

import numpy as np
import torch

from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.user_dataset import IterableStream
from bessemer.model.transformer import build_model
from bessemer.optim.choose import make_optimizer
from bessemer.optim.guarded import clip_divisor
from bessemer.plan.expect import history_path, load_records
from bessemer.plan.hardware import gpu_catalogue, same_gpu
from bessemer.plan.local import LocalPlan, plan_local
from bessemer.plan.request import PlanRequest
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.schema import ParallelSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import (
    bench_count,
    measure_machine,
    median_s,
    name_and_memory,
    pick_device,
    synchronize,
    use_threads,
)
from bessemer.train.engine import Engine, forward_backward
from bessemer.train.objective import Pretrain

LONGEST_S = 2.0  # matmul time of a row up to which it is measured in full
SHORTEST = 64  # tokens of a shortened row; fewer would use other matmul kernels
MEASURE_S = 0.5  # for the passes of a row, and again for those of a micro-batch
SHORT_ROW_S = 0.05
UPDATE_BYTES = 40  # read and written per parameter by clipping and AdamW's update


def random_batch(vocab: int, rows: int, context: int, seed: int = 0) -> Batch:
    """Rows of random tokens, one document each."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, context + 1), dtype=np.int64)
    ones, nothing = np.ones((rows, context), np.float32), np.zeros(rows, np.int64)
    documents = np.zeros((rows, context), np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), ones, documents, nothing, nothing, nothing)


def measure_token_rate(
    shape: ModelShape, context: int, precision: str, device: torch.device, matmul_rate: float
) -> float:
    """Tokens/s of forward and backward passes of a shape, measured within seconds. A row that would take long at
    `matmul_rate` FLOP/s is replaced by a short one through two layers and scaled by FLOPs."""
    if shape.flops_per_token(context) * context <= LONGEST_S * matmul_rate:
        return training_rate(shape, context, 1, precision, device, update=False)
    short, length = replace(shape, layers=min(2, shape.layers)), SHORTEST
    while 2 * length <= context and short.flops_per_token(2 * length) * 2 * length <= LONGEST_S * matmul_rate:
        length *= 2
    rate = training_rate(short, length, 1, precision, device, update=False)
    return rate * short.flops_per_token(length) / shape.flops_per_token(context)


def training_rate(
    shape: ModelShape, context: int, rows: int, precision: str, device: torch.device, budget_s: float = 0.5,
    update: bool = True,
) -> float:  # fmt: skip
    """Tokens/s of forward, backward and, if asked, the update: the median of the steps that fit in the budget, at least
    two."""
    model = build_model(shape, device, seed=0)
    optimizer = make_optimizer(model.named_parameters(), OptimizerSpec())
    objective, batch = Pretrain(cross_documents=False), random_batch(shape.vocab, rows, context)
    batch.targets %= shape.outputs  # a classifier's head has fewer rows
    accept = torch.zeros((), device=device)
    times: list[float] = []
    end = 0.0
    for step in range(10_000):
        began = time.perf_counter()
        forward_backward(model, objective, deque([objective.feed(batch, device)]), batch.count, precision)
        if update:
            optimizer.step(1e-4, accept, clip_divisor(optimizer.grad_norm(), 1.0))
        else:
            optimizer.discard()
        synchronize(device)
        now = time.perf_counter()
        if step == 0:  # the first one pays for allocations and kernel selection
            end = now + budget_s
            continue
        times.append(now - began)
        if now > end and step >= 2:
            break
    return batch.count / statistics.median(times)


def catalogued_gpus(parallel: ParallelSpec) -> str | None:
    """The GPUs of this machine as the catalogue names them, such as "8 x H100"; None if a run would use another
    device."""
    device = pick_device(parallel)
    if device.type != "cuda":
        return None
    name = name_and_memory(device)[0]
    known = next((gpu.name for gpu in gpu_catalogue().values() if same_gpu(gpu, name)), None)
    return known and f"{torch.cuda.device_count()} x {known}"


def plan_measured(request: PlanRequest) -> LocalPlan:
    """The plan for this machine; takes a few seconds to time short runs of the model's shape."""
    use_threads(request.spec.parallel)
    device = pick_device(request.spec.parallel)
    machine = measure_machine(device)

    def rate_of(shape: ModelShape, context: int, precision: str) -> float | None:
        if shape.wrapped or shape.decoder_layers:  # needs more than its shape, or other inputs
            return None
        return measure_token_rate(shape, context, precision, device, machine.matmul["fp32"])

    records = load_records(history_path(machine.name, bench_count(device), torch.__version__))
    return plan_local(request, machine, rate_of, records)


def step_seconds(
    engine: Engine, stream: BatchStream | IterableStream, step: int, rows: int, matmul_rate: float
) -> float | None:
    """Seconds of a step of `rows` rows, from repeated passes of the run's model over one row and an estimate of the
    update. Discards gradients and restores the random state, so the run does not depend on it. None where it cannot be
    measured.

    One row is about as fast as many where it takes long: 10M parameters with context 512 on two busy ARM cores gave 615
    to 716 tokens/s with 1 to 8 rows. Of a short row most is overhead, so there a micro-batch is measured.
    """
    if engine.world.size > 1 or not engine.optimizer.whole or not engine.optimizer.rejects_before_update:
        return None
    context, shape = engine.plan.context, engine.model.shape
    update_s = UPDATE_BYTES * sum(p.numel() for p in engine.optimizer.parameters) / _memory_rate(engine.device)
    row_flops = shape.flops_per_token(context) * context
    if row_flops <= LONGEST_S * matmul_rate:
        return rows * _row_seconds(engine, stream, step, rows) + update_s
    if shape.wrapped or shape.decoder_layers:
        return None
    return (
        rows * context / measure_token_rate(shape, context, engine.plan.precision, engine.device, matmul_rate)
        + update_s
    )


def _row_seconds(engine: Engine, stream: BatchStream | IterableStream, step: int, rows: int) -> float:
    """Of forward and backward of a row: of one alone, or its share of a micro-batch if that is short."""
    if isinstance(stream, IterableStream):  # cannot be read ahead
        batch = random_batch(engine.model.shape.vocab, min(rows, engine.plan.micro_rows), engine.plan.context)
    else:
        batch = stream.micro_batches(step, engine.plan.micro_rows)[0]
    alone_s, count = _pass_seconds(engine, batch.part(0, 1)), min(rows, len(batch.tokens))
    if alone_s > SHORT_ROW_S or count == 1:
        return alone_s
    return _pass_seconds(engine, batch.part(0, count)) / count


def _pass_seconds(engine: Engine, batch: Batch) -> float:
    """The median of the passes that fit in MEASURE_S."""
    times: list[float] = []
    with torch.random.fork_rng([]):
        while not times[1:] or sum(times[1:]) < MEASURE_S:
            began = time.perf_counter()
            inputs = engine.inputs([batch])
            forward_backward(engine.model, engine.objective, inputs, batch.count or 1.0, engine.plan.precision)
            synchronize(engine.device)
            times.append(time.perf_counter() - began)
            engine.release_memory()
    return statistics.median(times[1:])  # the first pays for allocations


def _memory_rate(device: torch.device) -> float:
    """Bytes/s of an element-wise pass; an update is a few of them."""
    values = torch.ones(1 << 22, device=device)
    return 8 * values.numel() / median_s(lambda: values.mul_(1.0), device, 0.02)
