"""Past steps again, in memory: with what was recorded of them, or with one thing changed. Nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.optim.guarded import clip_divisor
from bessemer.optim.low_memory import place_of
from bessemer.parallel.shard import local
from bessemer.parallel.world import World
from bessemer.run.journal import number
from bessemer.train.job import Job
from bessemer.trial.measure import run_step

Record = Mapping[str, Any]


@dataclass(frozen=True)
class ReplayedStep:
    """A step as it came out in the replay."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    vetoed: bool  # then or now


def replay_to(
    job: Job,
    target_step: int,
    records: Sequence[Record],
    start: int | None = None,
    lr: Callable[[Record], float] | None = None,
    veto: Callable[[int, float, float], bool] | None = None,
) -> list[ReplayedStep]:
    """Run steps `start` (where the job's weights are: `job.start_step`) to `target_step - 1` as they were recorded.

    Recorded vetoes and learning rates are honoured. `lr` gives another rate for a record; `veto` is asked with step,
    loss and gradient norm before every update. The weights end up in the job: bit for bit those of the run on a CPU
    with as many threads, within the device's spread elsewhere.
    """
    start = job.start_step if start is None else start
    known = {int(record["step"]): record for record in records}
    if missing := [step for step in range(start, target_step) if step not in known]:
        raise UserError(
            f"step {missing[0]} is not in the run's metrics: steps {start} to {target_step - 1} cannot be replayed"
        )
    accept = torch.zeros((), device=job.engine.device)
    path = []
    job.engine.discard_gradients()
    for step in range(start, target_step):
        record = known[step]
        rate = lr(record) if lr else float(record["lr"])
        measured = run_step(job.engine, job.data.stream, step)
        vetoed = bool(record.get("veto")) or (veto is not None and veto(step, measured.loss, measured.grad_norm))
        path.append(ReplayedStep(step, rate, measured.loss, measured.grad_norm, vetoed))
        if vetoed:
            job.engine.discard_gradients()
            continue
        norm = torch.tensor(measured.grad_norm, device=job.engine.device)
        job.engine.update(rate, accept, clip_divisor(norm, number(record.get("clip")) or job.spec.optimizer.clip))
    return path


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from another of the same name."""

    elements: int  # that differ at all
    of: int
    largest: float
    norm: float
    size: float  # root mean square of the reference


@dataclass(frozen=True)
class _Gap:
    """The same for the part of a tensor that one process holds, in sums that parts can be added up by."""

    elements: int
    of: int  # of the whole tensor
    largest: float
    square: float
    reference: float  # sum of squares
    count: int


@torch.no_grad()
def differences(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor], world: World | None = None
) -> dict[str, Difference]:
    """The tensors that differ, weights before moments, the one with the largest change for its size first. Of several
    processes each compares what it holds (`found` may be just that), and all know the result."""
    gaps = {}
    for name, whole in reference.items():
        if not name.startswith(("model.", "optimizer.")):
            continue
        expected = local(whole)
        a, b = local(found[name]).to(expected.device).float(), expected.float()
        same = (a == b) | (a.isnan() & b.isnan())
        if bool(same.all()):
            continue
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        squares = float(b.nan_to_num(0.0, 0.0, 0.0).square().sum())
        part = _Gap(int((~same).sum()), whole.numel(), float(gap.max()), float(gap.norm()) ** 2, squares, b.numel())
        gaps[name, place_of(whole).first] = part
    result = _together((world or World()).gather(gaps))

    def rank(name: str) -> tuple[bool, float, str]:
        return not name.startswith("model."), -result[name].largest / max(result[name].size, 1e-12), name

    return {name: result[name] for name in sorted(result, key=rank)}


def _together(everyone: Sequence[Mapping[tuple[str, int], _Gap]]) -> dict[str, Difference]:
    """What several processes hold in common counts once: by the replica of it that is furthest off."""
    parts: dict[str, dict[int, _Gap]] = {}
    for gaps in everyone:
        for (name, first), gap in gaps.items():
            known = parts.setdefault(name, {})
            known[first] = max(known.get(first, gap), gap, key=lambda one: one.largest)
    result = {}
    for name, known in parts.items():
        gaps_here = known.values()
        size = math.sqrt(sum(gap.reference for gap in gaps_here) / sum(gap.count for gap in gaps_here))
        norm = math.sqrt(sum(gap.square for gap in gaps_here))
        elements, largest = sum(gap.elements for gap in gaps_here), max(gap.largest for gap in gaps_here)
        result[name] = Difference(elements, next(iter(gaps_here)).of, largest, norm, size)
    return result


def beyond_spread(found: Mapping[str, Difference], spread: Mapping[str, Difference]) -> dict[str, float]:
    """How many times a tensor's difference exceeds that between two replays, for those that differ."""
    ratios = {}
    for name, gap in found.items():
        usual = spread.get(name)
        ratios[name] = max(gap.largest / usual.largest, gap.norm / usual.norm) if usual else math.inf
    return ratios


def first_unlike(records: Sequence[Record], path: Sequence[ReplayedStep], again: Sequence[ReplayedStep]) -> int | None:
    """The step whose update (or the moment before whose pass) brought the difference in: from the first recorded loss
    or gradient norm that two replays agree on with each other but not with the record."""
    known = {int(record["step"]): record for record in records}
    for first, second in zip(path, again, strict=True):
        record = known[first.step]
        for key, floor in (("loss", 1e-4), ("grad_norm", 1e-3)):
            value, a, b = number(record.get(key)), getattr(first, key), getattr(second, key)
            if value is None or value == a or (math.isnan(value) and math.isnan(a)):
                continue
            if not abs(value - a) <= 10 * abs(a - b) + floor * abs(a):
                return first.step if key == "grad_norm" else max(first.step - 1, path[0].step)
    return None
