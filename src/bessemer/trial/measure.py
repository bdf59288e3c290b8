"""One pass over given micro-batches at the weights as they are, and how far its numbers are from normal.

Nothing here updates a weight. Experiments that load or train other weights do so inside `kept_aside`, which puts
everything back bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.data.stream.batches import Batch
from bessemer.model.init import widened
from bessemer.parallel.shard import add_up_experts, drop_gathered, local, send_gradients
from bessemer.parallel.world import World
from bessemer.train.compile import compute_in, compute_type, use_tf32
from bessemer.train.job import Job
from bessemer.train.lowp.loss_scale import scaled
from bessemer.train.step import StepResult, step_totals
from bessemer.trial.case import NormalRange, StepScene


class Apart(RuntimeError):
    """A pass that failed in one of several processes: the others wait in it, so this one has to end, and whoever
    started them starts all of them again. What fails outside of a pass fails everywhere, and can be gone on from."""


@dataclass(frozen=True)
class Measurement:
    """Loss, gradient norm and every token's loss of one pass."""

    loss: float
    grad_norm: float
    nll: list[npt.NDArray[np.float64]]  # (R, T) of each micro-batch


def whole_step(job: Job, step: int) -> list[Batch]:
    """The micro-batches of a step, of all processes in their order: each works out its own, and knows of all."""
    world = job.world
    ranks = range(world.layout.dp)
    return [b for rank in ranks for b in job.stream.micro_batches(step, job.plan.micro_rows, rank, world.layout.dp)]


def share_of(world: World, batches: Sequence[Batch]) -> list[Batch]:
    """Of the micro-batches of a whole step those that this process works out, as many on each: what is missing at the
    end is padding. Those of `whole_step` fall to the processes that had them."""
    share = -(-len(batches) // world.layout.dp)
    mine = list(batches[world.dp_rank * share :][:share])
    return mine + [_padding(batches[0])] * (share - len(mine))


def _padding(like: Batch) -> Batch:
    """One row of which nothing counts, as the stream has them."""
    row = {name: np.zeros_like(array[:1]) for name, array in vars(like).items()}
    return Batch(**row | {name: row[name] - 1 for name in ("positions", "sources", "sequences")})


def run_pass(
    job: Job, batches: Sequence[Batch], count: float | None = None, precision: str | None = None
) -> Measurement:
    """Forward and backward exactly as the loop does it; the gradients are left in the parameters, added to what is
    there. The batches are a whole step's, of which each process takes its share, and what is measured is the whole's.
    `count` is what the loss is divided by: the batches' own weight where it is not given."""
    with _failing_together(job):
        loss, norm, losses = _pass(job, share_of(job.world, batches), count, precision)
    return Measurement(loss, norm, whole_rows(job, losses)[: len(batches)])


def token_losses(job: Job, batches: Sequence[Batch]) -> list[npt.NDArray[np.float64]]:
    """Every token's loss, (R, T) of each micro-batch, by a forward pass alone: gradients in the parameters stay."""
    mode, losses, precision = job.model.training, [], job.plan.precision
    job.model.eval()
    try:
        with _failing_together(job), torch.no_grad(), use_tf32(precision):
            for batch in share_of(job.world, batches):
                feed = job.objective.feed(batch, job.device)
                with compute_in(precision, job.device):
                    losses.append(job.objective.loss(job.model, feed, 1.0).nll_BT)
    finally:
        job.model.train(mode)
        drop_gathered(job.model)
    return whole_rows(job, losses)[: len(batches)]


def whole_rows(job: Job, losses: Sequence[Tensor]) -> list[npt.NDArray[np.float64]]:
    """The losses of all processes' micro-batches, in the order of `whole_step`."""
    world = job.world
    mine = [np.asarray(nll.float().cpu(), dtype=np.float64) for nll in losses]
    everyone = dict(world.gather(((world.dp_rank, world.cp_rank), mine)))
    columns = job.objective.columns  # of rows that processes share
    return [
        columns.whole(parts) if columns else parts[0]
        for rank in range(world.layout.dp)
        for parts in zip(*(everyone[rank, part] for part in range(world.layout.cp)), strict=True)
    ]


def run_step(job: Job, step: int) -> Measurement:
    """The same of a step of the stream, of which each process reads its own rows, without the tokens' losses."""
    world, stream = job.world, job.stream
    mine = stream.micro_batches(step, job.plan.micro_rows, world.dp_rank, world.layout.dp)
    with _failing_together(job):
        loss, norm, _ = _pass(job, mine, stream.step_count(step))
    return Measurement(loss, norm, [])


@contextmanager
def _failing_together(job: Job) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if job.world.size == 1:
            raise
        raise Apart(f"a pass of a trial failed in process {job.world.rank}: {error}") from error


def _pass(
    job: Job, batches: Sequence[Batch], count: float | None, precision: str | None = None
) -> tuple[float, float, list[Tensor]]:
    """Loss and gradient norm of all processes, and the losses of this one's tokens."""
    feeds = deque(job.objective.feed(batch, job.device) for batch in batches)
    if count is None or job.objective.rewriting:
        count = job.world.sums([sum(feed.count for feed in feeds)])[0] / (job.world.size // job.world.layout.dp)
    count = count or 1.0  # all of it is banned: nothing to learn from, and a loss of zero
    loss, correct = torch.zeros((), device=job.device), torch.zeros((), device=job.device)
    losses = []
    precision = precision or job.plan.precision
    scaling = job.scaling if precision == "fp16" else None
    with use_tf32(precision), scaled(scaling, job.optimizer.parameters) as factor:
        while feeds:
            send_gradients(job.model, now=len(feeds) == 1)
            with compute_in(precision, job.device):
                terms = job.objective.loss(job.model, feeds.popleft(), count)
            (terms.loss * factor).backward()
            loss += terms.nll
            losses.append(terms.nll_BT)
        add_up_experts(job.model, job.world)
    attempt = StepResult(0, 0, loss, correct, [], losses, 0.0)
    norm = step_totals(job, attempt)  # which makes the loss that of all processes too
    numbers = torch.stack((attempt.loss, norm.float())).tolist()
    return numbers[0], numbers[1], losses


def measure(
    job: Job, batches: Sequence[Batch], count: float | None = None, precision: str | None = None
) -> Measurement:
    """The same, leaving no gradients. In fp32 weights that are kept in bf16 are widened for it."""
    clear_gradients(job)
    wide = compute_type(precision or job.plan.precision) == torch.float32
    try:
        with widened(job.model) if wide else nullcontext():
            return run_pass(job, batches, count, precision)
    finally:
        clear_gradients(job)


def clear_gradients(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.grad = None


QUIET = 0.35  # a step below this share of the guard's line is no anomaly


@dataclass(frozen=True)
class Yardstick:
    """How far loss and gradient norm are beyond normal: 1 is where the guard calls a value an outlier.

    A circumstance explains the step when it brings it below `limit`: under the guard's own line, and at least half of
    the way back where the step itself was hardly beyond it (slow divergence). Where the loss is strangely low, low is
    what counts.
    """

    normal: NormalRange
    limit: float
    low: bool = False

    @classmethod
    def of(cls, scene: StepScene) -> Yardstick:
        high = cls(scene.normal, 1.0)
        low = replace(high, low=True)
        sunk = high.excess(scene.loss, scene.grad_norm) < 0.5 and low.excess(scene.loss, scene.grad_norm) > 1
        chosen = low if sunk else high
        observed = chosen.excess(scene.loss, scene.grad_norm)
        return replace(chosen, limit=min(1.0, observed / 2) if observed > QUIET else 1.0)

    def excess(self, loss: float, grad_norm: float) -> float:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return math.inf
        normal = self.normal
        loss_z = (loss - normal.loss) / max(normal.loss_scale, 1e-12) * (-1 if self.low else 1)
        grad_z = math.log(max(grad_norm, 1e-30) / max(normal.grad_norm, 1e-30)) / normal.grad_scale
        return max(0.0, loss_z / normal.loss_sigma, grad_z / normal.grad_sigma)

    def of_measured(self, measured: Measurement) -> float:
        return self.excess(measured.loss, measured.grad_norm)

    def centred_on(self, measured: Measurement) -> Yardstick:
        """The same scales around other values: what is normal for other weights."""
        return replace(self, normal=replace(self.normal, loss=measured.loss, grad_norm=measured.grad_norm))


def mean_of(results: Sequence[Measurement]) -> Measurement:
    """The mean loss, and the geometric mean of the gradient norms."""
    norms = [math.log(max(result.grad_norm, 1e-30)) for result in results]
    loss = sum(result.loss for result in results) / len(results)
    return Measurement(loss, math.exp(sum(norms) / len(norms)), [])


def held(job: Job) -> dict[str, Tensor]:
    """The job's state, live, as far as this process holds it."""
    with torch.no_grad():
        return {name: local(tensor) for name, tensor in job.state().items()}


@contextmanager
def kept_aside(job: Job) -> Iterator[dict[str, Tensor]]:
    """Weights, moments, counts, the guard's window and random states are afterwards as they were, also after an error.
    The copy (three times the weights; each rank's own shards) lies on the host where the device has no room."""
    state = held(job)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    roomy = job.device.type != "cuda" or torch.cuda.mem_get_info(job.device)[0] > 1.5 * size
    kept = {
        name: tensor.detach().to(tensor.device if roomy or name.startswith("guard.") else "cpu", copy=True)
        for name, tensor in state.items()
    }
    numbers = torch.get_rng_state()
    device_numbers = torch.cuda.get_rng_state(job.device) if job.device.type == "cuda" else None
    mode, progress = job.model.training, copy.copy(job.progress)
    try:
        yield kept
    finally:
        put_back(job, kept)
        job.judge.load({name[6:]: tensor for name, tensor in kept.items() if name.startswith("guard.")})
        job.model.train(mode)
        job.progress = progress
        torch.set_rng_state(numbers)
        if device_numbers is not None:
            torch.cuda.set_rng_state(device_numbers, job.device)


@torch.no_grad()
def put_back(job: Job, kept: dict[str, Tensor]) -> None:
    """The kept weights and moments into the job again; gradients are cleared."""
    clear_gradients(job)
    for name, tensor in held(job).items():
        if not name.startswith("guard."):
            tensor.copy_(kept[name])
