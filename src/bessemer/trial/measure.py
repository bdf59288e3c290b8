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

from bessemer.data.stream import Batch
from bessemer.model.widened import widened
from bessemer.train.job import Job
from bessemer.train.precision import compute_in, compute_type, use_tf32
from bessemer.train.scaling import scaled
from bessemer.trial.case import Normal, Scene


@dataclass(frozen=True)
class Measured:
    """Loss, gradient norm and every token's loss of one pass."""

    loss: float
    grad_norm: float
    nll: list[npt.NDArray[np.float64]]  # (R, T) of each micro-batch


def run_pass(job: Job, batches: Sequence[Batch], count: float | None = None, precision: str | None = None) -> Measured:
    """Forward and backward exactly as the loop does it; the gradients are left in the parameters, added to what is
    there. `count` is what the loss is divided by: the batches' own weight where it is not given."""
    feeds = deque(job.objective.feed(batch, job.device) for batch in batches)
    if count is None or job.objective.rewriting:
        count = sum(feed.count for feed in feeds)
    count = count or 1.0  # all of it is banned: nothing to learn from, and a loss of zero
    loss = torch.zeros((), device=job.device)
    losses = []
    precision = precision or job.plan.precision
    scaling = job.scaling if precision == "fp16" else None
    with use_tf32(precision), scaled(scaling, job.optimizer.parameters) as factor:
        while feeds:
            with compute_in(precision, job.device):
                terms = job.objective.loss(job.model, feeds.popleft(), count)
            (terms.loss * factor).backward()
            loss += terms.nll
            losses.append(terms.nll_BT)
    numbers = torch.stack((loss, job.optimizer.grad_norm().float())).tolist()
    return Measured(numbers[0], numbers[1], [np.asarray(nll.cpu(), dtype=np.float64) for nll in losses])


def measure(job: Job, batches: Sequence[Batch], count: float | None = None, precision: str | None = None) -> Measured:
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

    normal: Normal
    limit: float
    low: bool = False

    @classmethod
    def of(cls, scene: Scene) -> Yardstick:
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

    def of_measured(self, measured: Measured) -> float:
        return self.excess(measured.loss, measured.grad_norm)

    def centred_on(self, measured: Measured) -> Yardstick:
        """The same scales around other values: what is normal for other weights."""
        return replace(self, normal=replace(self.normal, loss=measured.loss, grad_norm=measured.grad_norm))


def mean_of(results: Sequence[Measured]) -> Measured:
    """The mean loss, and the geometric mean of the gradient norms."""
    norms = [math.log(max(result.grad_norm, 1e-30)) for result in results]
    loss = sum(result.loss for result in results) / len(results)
    return Measured(loss, math.exp(sum(norms) / len(norms)), [])


@contextmanager
def kept_aside(job: Job) -> Iterator[dict[str, Tensor]]:
    """Weights, moments, counts, the guard's window and random states are afterwards as they were, also after an error.
    The copy (three times the weights; each rank's own shards) lies on the host where the device has no room."""
    state = job.state()
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
    for name, tensor in job.state().items():
        if not name.startswith("guard."):
            tensor.copy_(kept[name])
