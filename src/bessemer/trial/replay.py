"""Replays past steps in memory, as recorded or with one change, and compares the resulting weights. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.optim.low_memory import shard_place
from bessemer.parallel.shard import local
from bessemer.parallel.world import World
from bessemer.run.journal import to_number
from bessemer.train.job import Job
from bessemer.trial.measure import run_step

Record = Mapping[str, Any]


@dataclass(frozen=True)
class ReplayedStep:
    """The numbers of a replayed step."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    vetoed: bool  # in the run or in the replay


def replay_to(
    job: Job,
    target_step: int,
    records: Sequence[Record],
    start: int | None = None,
    lr: Callable[[Record], float] | None = None,
    veto: Callable[[int, float, float], bool] | None = None,
) -> list[ReplayedStep]:
    """Repeat steps `start` (by default `job.start_step`) to `target_step - 1` with their recorded vetoes and rates.

    `lr` replaces the rate of a record; `veto` decides from step, loss and gradient norm before every update. The job
    ends with the replayed weights: bit for bit those of the run on a CPU with as many threads, and within the device's
    spread elsewhere.
    """
    start = job.start_step if start is None else start
    by_step = {int(record["step"]): record for record in records}
    if missing := [step for step in range(start, target_step) if step not in by_step]:
        raise UserError(
            f"step {missing[0]} is not in the run's metrics: steps {start} to {target_step - 1} cannot be replayed"
        )
    accept = torch.zeros((), device=job.engine.device)
    path = []
    job.engine.discard_gradients()
    for step in range(start, target_step):
        record = by_step[step]
        rate = lr(record) if lr else float(record["lr"])
        measured = run_step(job.engine, job.data.stream, step)
        vetoed = bool(record.get("veto")) or (veto is not None and veto(step, measured.loss, measured.grad_norm))
        path.append(ReplayedStep(step, rate, measured.loss, measured.grad_norm, vetoed))
        if vetoed:
            job.engine.discard_gradients()
            continue
        norm = torch.tensor(measured.grad_norm, device=job.engine.device)
        if sam := job.engine.sam:
            with sam.perturbed(norm):
                norm = torch.tensor(run_step(job.engine, job.data.stream, step).grad_norm, device=job.engine.device)
        if job.engine.optimizer.curvature_due(step):
            renew_curvature(job, step, accept)
        limit = to_number(record.get("clip")) or job.spec.optimizer.clip
        divisor, _ = job.engine.optimizer.clip(norm, limit, None, accept, step)
        job.engine.update(rate, accept, divisor)
    return path


def renew_curvature(job: Job, step: int, accept: torch.Tensor) -> None:
    """Sophia's, from the rows that this rank read."""
    stream, world = job.data.stream, job.engine.world
    batches = stream.micro_batches(step, job.plan.micro_rows, world.dp_rank, world.layout.dp)
    job.engine.follow_curvature(batches, stream.step_count(step), step, accept)


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from another of the same name."""

    elements: int  # that differ
    of: int  # elements in all
    largest: float
    norm: float
    size: float  # root mean square of the reference


@dataclass(frozen=True)
class _ShardDifference:
    """The same for one rank's shard of a tensor, as sums."""

    elements: int
    of: int  # elements of the full tensor
    largest: float
    square: float
    reference: float  # sum of squares
    count: int


@torch.no_grad()
def tensor_differences(
    tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor], world: World | None = None
) -> dict[str, Difference]:
    """The tensors that differ, weights before moments, largest relative change first. Each rank compares its shards
    (`found` may hold only those), and all ranks get the result."""
    gaps = {}
    for name, expected_tensor in reference.items():
        if not name.startswith(("model.", "optimizer.")):
            continue
        expected = local(expected_tensor)
        a, b = local(tensors[name]).to(expected.device).float(), expected.float()
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            continue
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        squares = float(b.nan_to_num(0.0, 0.0, 0.0).square().sum())
        part = _ShardDifference(
            int((~same).sum()), expected_tensor.numel(), float(gap.max()), float(gap.norm()) ** 2, squares, b.numel()
        )
        gaps[name, shard_place(expected_tensor).first] = part
    result = _merge_shards((world or World()).gather(gaps))

    def rank(name: str) -> tuple[bool, float, str]:
        return not name.startswith("model."), -result[name].largest / max(result[name].size, 1e-12), name

    return {name: result[name] for name in sorted(result, key=rank)}


def _merge_shards(everyone: Sequence[Mapping[tuple[str, int], _ShardDifference]]) -> dict[str, Difference]:
    """Replicas of a shard count once: the one that is furthest off."""
    parts: dict[str, dict[int, _ShardDifference]] = {}
    for gaps in everyone:
        for (name, first), gap in gaps.items():
            shards = parts.setdefault(name, {})
            shards[first] = max(shards.get(first, gap), gap, key=lambda shard: shard.largest)
    result = {}
    for name, shards in parts.items():
        differing = shards.values()
        size = math.sqrt(sum(gap.reference for gap in differing) / sum(gap.count for gap in differing))
        norm = math.sqrt(sum(gap.square for gap in differing))
        elements, largest = sum(gap.elements for gap in differing), max(gap.largest for gap in differing)
        result[name] = Difference(elements, next(iter(differing)).of, largest, norm, size)
    return result


def excess_over_spread(differences: Mapping[str, Difference], spread: Mapping[str, Difference]) -> dict[str, float]:
    """The difference of each differing tensor, in units of the difference between two replays."""
    ratios = {}
    for name, gap in differences.items():
        usual = spread.get(name)
        ratios[name] = max(gap.largest / usual.largest, gap.norm / usual.norm) if usual else math.inf
    return ratios


def first_divergent_step(
    records: Sequence[Record], path: Sequence[ReplayedStep], second_path: Sequence[ReplayedStep]
) -> int | None:
    """The step whose update introduced the difference: found by the first recorded loss or gradient norm on which two
    replays agree with each other but not with the record."""
    by_step = {int(record["step"]): record for record in records}
    for first, second in zip(path, second_path, strict=True):
        record = by_step[first.step]
        for key, floor in (("loss", 1e-4), ("grad_norm", 1e-3)):
            value, a, b = to_number(record.get(key)), getattr(first, key), getattr(second, key)
            if value is None or value == a or (math.isnan(value) and math.isnan(a)):
                continue
            if not abs(value - a) <= 10 * abs(a - b) + floor * abs(a):
                return first.step if key == "grad_norm" else max(first.step - 1, path[0].step)
    return None
