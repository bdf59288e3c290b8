"""One step on the device: losses and gradients of its micro-batches, the verdict, the update. `loop.py` goes from step
to step, and reads the numbers of one when the next is under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bessemer.data.stream.batches import Batch
from bessemer.guard.layer_stats import LayerSample
from bessemer.model.moe import update_choice_bias
from bessemer.optim.guarded import clip_divisor
from bessemer.parallel.shard import add_up_experts, send_gradients, square_of
from bessemer.train.compile import compute_in
from bessemer.train.device import Sent
from bessemer.train.job import Job
from bessemer.train.memory.fit import is_compiled, out_of_memory, shrink_micro_batch, split
from bessemer.train.profile import span

LOOK_ROWS = 2  # sequences of a look inside the model


@dataclass
class StepResult:
    """A step whose numbers are still on the device."""

    step: int
    tokens: int
    loss: Tensor
    correct: Tensor
    batches: list[Batch]
    losses: list[Tensor]
    wait_s: float
    rows: list[Tensor] = field(default_factory=list)  # (2, R) of each micro-batch, as in `LossTerms`
    step_s: float = 0.0
    memory_bytes: int = 0
    clocks: tuple[float, float] = (0.0, 0.0)
    rank_step_s: list[float] | None = None  # each process's own work, where they told each other
    ranks: dict[str, list[float]] | None = None  # the same, and what else they told of themselves
    lr: float = 0.0
    clip: float = 0.0
    scaled: bool = False  # by fp16's loss scale
    sent: Sent | None = None  # loss, gradient norm, correct, the verdict's numbers if it was judged, the loss scale
    look: LayerSample | None = None


def forward_backward(job: Job, step: int, batches: list[Batch], wait_s: float) -> StepResult:
    """Losses and gradients of a step; nothing is updated yet."""
    if job.faults:
        job.faults.before_step(job, step)
    with span(job, "data"):
        feeds = deque(job.objective.feed(batch, job.device) for batch in batches)
    count = job.stream.step_count(step)
    if job.objective.rewriting:  # known only once it is made
        (count,) = job.world.sums([sum(feed.count for feed in feeds)])
        count /= job.world.size // job.world.layout.dp  # who shares rows has counted the same
    loss = torch.zeros((), device=job.device)
    correct = torch.zeros((), device=job.device)
    losses, rows, scaling = [], [], job.scaling
    total = left = len(feeds)
    job.view.micro_batch(step, 0, total, int(count))
    if step == job.start_step and is_compiled(job):
        job.view.activity("compiling, with the first micro-batch")
    job.optimizer.accumulate(len(feeds) > 1)
    if job.pipeline:
        with span(job, "pipeline"):
            found = job.pipeline.run(list(feeds), count or 1.0, scaling.scale if scaling else None)
        for terms in found:
            loss += terms.nll
            correct += terms.correct
            losses.append(terms.nll_BT)
            rows.append(terms.rows_2B)
        feeds.clear()
    while feeds:  # one by one: its masks go with a feed
        job.check_interrupt()
        left -= 1
        send_gradients(job.model, now=left == 0)
        with span(job, "forward"), compute_in(job.plan.precision, job.device):
            # A step whose documents are all banned has nothing to learn from, and a loss of zero.
            terms = job.objective.loss(job.model, feeds.popleft(), count or 1.0)
        with span(job, "backward"):
            job.optimizer.backward(terms.loss if scaling is None else terms.loss * scaling.scale, last=left == 0)
        loss += terms.nll
        correct += terms.correct
        losses.append(terms.nll_BT)
        rows.append(terms.rows_2B)
        job.view.micro_batch(step, total - left, total, int(count))
    add_up_experts(job.model, job.world)
    if job.faults:
        job.faults.after_backward(job, step)
    return StepResult(step, int(count), loss, correct, batches, losses, wait_s, rows, scaled=scaling is not None)


def attempt_step(job: Job, step: int, batches: list[Batch], wait_s: float) -> StepResult | str:
    """Losses and gradients, in smaller micro-batches where memory runs out; in words why not even so. Abandoned where a
    signal comes in between."""
    while True:
        try:
            return forward_backward(job, step, split(batches, job.plan.micro_rows), wait_s)
        except RuntimeError as error:
            # One of several processes must not go its own way: it ends, and the launcher starts all of them again.
            if not out_of_memory(error) or job.world.size > 1 or not job.optimizer.whole:
                raise
            said = str(error).split("\n")[0]
        # Out of `except`, whose traceback holds all that the failed pass had made.
        if fault := shrink_micro_batch(job, step, said):
            return fault


def step_totals(job: Job, attempt: StepResult) -> Tensor:
    """The step's gradient norm; over several processes its loss, what it got right and its rows too, in one sum on the
    device."""
    world = job.world
    if world.mesh is None:
        return job.optimizer.grad_norm()
    square = job.optimizer.square()
    if square is None:
        twice = job.pipeline.twice if job.pipeline else None
        square = square_of((p for p in job.optimizer.parameters if p is not twice), world)
    mine = 1.0 if world.speaks else 0.0
    parts = torch.stack((attempt.loss.double() * mine, attempt.correct.double() * mine, square))
    # A place for every row of the step: processes that share rows add their columns up, and the others add nothing.
    own = sum(len(batch.tokens) for batch in attempt.batches)
    rows_2R = torch.zeros(2, own * world.layout.dp, dtype=torch.float64, device=job.device)
    if world.speaks and attempt.rows:
        rows_2R[:, own * world.dp_rank :][:, :own] = torch.cat(attempt.rows, 1).double()
    numbers = world.add(torch.cat((parts, rows_2R.flatten())))
    attempt.loss, attempt.correct = numbers[0].float(), numbers[1].float()
    attempt.rows = [numbers[3:].view_as(rows_2R)]
    return numbers[2].sqrt().float()


def judge_and_update(job: Job, attempt: StepResult, looking: bool) -> None:
    """The verdict, and the update unless it is vetoed; no host sync where the optimizer allows."""
    step = attempt.step
    scaling = job.scaling
    norm = step_totals(job, attempt)
    norm = norm if scaling is None else norm / scaling.scale
    attempt.clip, attempt.lr = job.clip(step), job.lr(step)
    if job.faults:
        attempt.lr = job.faults.lr(step, attempt.lr)
    divisor = clip_divisor(norm, attempt.clip)
    numbers = torch.stack((attempt.loss, norm.float(), attempt.correct))
    if job.spec.guard.enabled and attempt.tokens:
        verdict = job.judge.judge(attempt.loss, norm, torch.cat(attempt.rows, 1))
        numbers = torch.cat((numbers, verdict.numbers.to(job.device)))
        # What was updated in the backward pass is past withholding, and averages go along.
        reject = verdict.reject.to(job.device) if job.optimizer.judged_first else torch.zeros((), device=job.device)
    else:
        reject = torch.zeros((), device=job.device) if attempt.tokens else torch.ones((), device=job.device)
    if looking:
        job.inside.before(1.0 if scaling is None else scaling.scale)
    if scaling is not None:
        numbers = torch.cat((numbers, scaling.scale[None]))
        divisor = divisor * scaling.scale
        reject = torch.maximum(reject, scaling.update(norm))
    attempt.sent = Sent(numbers)
    with span(job, "optimizer"):
        job.optimizer.step(attempt.lr, reject, divisor)
        if (moe := job.model.shape.moe) is not None and moe.choice_bias:
            update_choice_bias(
                job.model, moe.bias_rate, reject, lambda counts: job.world.add(counts, job.world.readers)
            )
        if job.ema:
            job.ema.update(reject)
    if looking:
        job.inside.after()
        attempt.look = look_inside(job, attempt.batches)


def look_inside(job: Job, batches: list[Batch]) -> LayerSample:
    feed = job.objective.feed(batches[0].part(0, LOOK_ROWS), job.device)
    with compute_in(job.plan.precision, job.device):
        return job.inside.look(job.model, feed.tokens_BT, feed.sight, **feed.more)
