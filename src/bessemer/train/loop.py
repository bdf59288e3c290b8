"""The loop. Read it top to bottom: take the micro-batches of a step, sum losses, backward, judge, step, log, save.

Numbers of a step are read on the host one step later, so that a GPU never waits for Python. A step's number counts
attempts, from 0: data position and schedule advance on a veto, the optimizer's own count does not.
"""

from __future__ import annotations

import bisect
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bessemer.data.prefetch import Prefetch
from bessemer.data.stream import Batch
from bessemer.guard.judge import ACCEPT, NONFINITE, REASONS, Verdict
from bessemer.optim.guarded import clip_divisor
from bessemer.plan.decide import Interval
from bessemer.train.blame import blame
from bessemer.train.device import memory_in_use, synchronize
from bessemer.train.job import Job, Outcome
from bessemer.train.precision import compute_in


@dataclass
class Attempt:
    """A step whose numbers are still on the device."""

    step: int
    lr: float
    tokens: int
    verdict: Verdict
    numbers: Tensor  # loss, gradient norm, correct
    batches: list[Batch]
    losses: list[Tensor]
    wait_s: float
    step_s: float = 0.0


def attempt_step(job: Job, step: int, batches: list[Batch], wait_s: float) -> Attempt:
    """Forward, backward, judge, and the update unless it is vetoed."""
    count = job.stream.step_count(step)
    loss = torch.zeros((), device=job.device)
    correct = torch.zeros((), device=job.device)
    losses = []
    for batch in batches:
        with compute_in(job.plan.precision, job.device):
            terms = job.objective.loss(job.model, job.objective.feed(batch, job.device), count)
        terms.loss.backward()
        loss += terms.loss.detach()
        correct += terms.correct
        losses.append(terms.nll_BT)
    norm = job.optimizer.grad_norm()
    verdict = job.judge.judge(loss, norm)
    lr = job.schedule.lr(step)
    reject = verdict.reject.to(job.device) if job.spec.guard.enabled else torch.zeros((), device=job.device)
    job.optimizer.step(lr, reject, clip_divisor(norm, job.spec.optimizer.clip))
    return Attempt(
        step, lr, int(count), verdict, torch.stack((loss, norm.float(), correct)), batches, losses, wait_s
    )


def report_step(job: Job, attempt: Attempt) -> str | None:
    """Read a step's numbers, write them down; a reason if the run must not go on."""
    loss, norm, correct = attempt.numbers.tolist()
    verdict = attempt.verdict.read()
    code = int(verdict["code"]) if job.spec.guard.enabled else ACCEPT
    clipped = math.isfinite(norm) and norm > job.spec.optimizer.clip
    progress = job.progress
    progress.tokens += attempt.tokens
    progress.elapsed_s += attempt.step_s
    progress.vetoes += code != ACCEPT
    progress.clipped += clipped
    record = {
        "step": attempt.step, "loss": loss, "accuracy": round(correct / max(1, attempt.tokens), 5), "grad_norm": norm,
        "lr": attempt.lr, "clipped": clipped, "veto": REASONS.get(code), "tokens": progress.tokens,
        "tokens_per_s": round(attempt.tokens / attempt.step_s, 1),
        "mfu": round(attempt.tokens * job.flops_per_token / attempt.step_s / job.peak_flops, 4),
        "step_s": round(attempt.step_s, 5), "data_wait_s": round(attempt.wait_s, 5),
        "memory_bytes": memory_in_use(job.device),
    }  # fmt: skip
    job.run.step(record)
    job.view.step(record)
    if code != ACCEPT:
        job.event(
            "veto", step=attempt.step, reason=REASONS[code], loss=loss, grad_norm=norm,
            statistics={key: round(value, 4) for key, value in verdict.items() if key not in ("code", "reopened")},
            documents=blame(job.stream, attempt.batches, attempt.losses),
        )  # fmt: skip
    if verdict["reopened"] and job.spec.guard.enabled:
        job.event(
            "guard_reopened", step=attempt.step, loss=loss,
            reason=f"{job.spec.guard.max_vetoes} vetoes in a row: taken for a lasting change, the window starts anew",
        )  # fmt: skip
    job.nonfinite_streak = job.nonfinite_streak + 1 if code == NONFINITE else 0
    if job.nonfinite_streak >= job.spec.guard.max_vetoes:
        return f"{job.nonfinite_streak} steps in a row had a non-finite loss or gradient; the weights are from before"
    return None


@dataclass
class Clock:
    """When an interval, in steps or seconds, is due."""

    interval: Interval
    last_s: float = field(default_factory=time.monotonic)

    def due(self, done: int) -> bool:
        by_steps = self.interval.steps is not None and done % self.interval.steps == 0
        by_time = (
            self.interval.seconds is not None and time.monotonic() - self.last_s >= self.interval.seconds
        )
        return by_steps or by_time

    def reset(self) -> None:
        self.last_s = time.monotonic()


def validate(job: Job, done: int) -> dict[str, Any]:
    """Evaluate after `done` steps, note a new best."""
    start = time.perf_counter()
    result = job.evaluator.evaluate(job.model, job.objective)
    record = {
        "step": done,
        **asdict(result),
        "perplexity": math.exp(min(50.0, result.loss)),
        "seconds": round(time.perf_counter() - start, 3),
    }
    progress = job.progress
    if progress.best_validation is None or result.loss < progress.best_validation:
        progress.best_validation, progress.evaluations_since_best = result.loss, 0
    else:
        progress.evaluations_since_best += 1
    job.run.validation(record)
    job.view.validation(record)
    return record


def out_of_time(job: Job, attempt: Attempt) -> bool:
    limit = job.spec.budget.stop.time
    return limit is not None and job.progress.elapsed_s + attempt.step_s >= limit


def stop_reason(job: Job, validation: dict[str, Any] | None) -> str | None:
    """A rule of the spec that ends the run as finished, or None."""
    stop, progress = job.spec.budget.stop, job.progress
    if stop.time is not None and progress.elapsed_s >= stop.time:
        return f"budget.stop.time: {progress.elapsed_s:.0f} s trained"
    if validation is None:
        return None
    if stop.validation_loss is not None and validation["loss"] <= stop.validation_loss:
        return f"budget.stop.validation_loss: {validation['loss']:.4f} reached {stop.validation_loss}"
    if stop.patience is not None and progress.evaluations_since_best >= stop.patience:
        return f"budget.stop.patience: {stop.patience} evaluations without a new best ({progress.best_validation:.4f})"
    return None


def changes_at(job: Job) -> dict[int, str]:
    """Steps before which the guard's window is reopened, since the data or the batch is known to change there."""
    steps = job.stream.steps
    changes = {phase.from_step: "the batch size changes" for phase in steps.batch_phases[1:]}
    for phase in job.stream.order.phases[1:]:
        first = bisect.bisect_right(
            range(job.plan.total_steps), phase.start, key=lambda step: steps.range(step)[1]
        )
        changes[first] = "the data mixture changes"
    return changes


def train_loop(job: Job) -> Outcome:
    """Run until the budget, a stopping rule, a signal or a fault; what was reached is saved in each case."""
    total = job.plan.total_steps
    evaluations, saves = Clock(job.plan.evaluate), Clock(job.plan.save)
    changes = changes_at(job)
    validation = validate(job, 0) if job.start_step == 0 and job.evaluator.available else None
    pending: Attempt | None = None
    job.model.train()
    with Prefetch(job.stream, job.plan.micro_rows, pin=job.device.type == "cuda") as feed:
        for step in range(job.start_step, total):
            began = time.perf_counter()
            if step in changes:
                job.judge.reopen()
                job.event("guard_reopened", step=step, reason=changes[step])
            attempt = attempt_step(job, step, feed.get(step), feed.wait_s)
            fault = report_step(job, pending) if pending else None
            attempt.step_s = time.perf_counter() - began
            pending, done = attempt, step + 1

            # Most steps end here. The rest is for boundaries: evaluate, save, perhaps leave.
            leaving = done == total or fault is not None or out_of_time(job, attempt)
            evaluating = (
                job.evaluator.available and (leaving or evaluations.due(done)) and not job.interrupt.signal
            )
            if not (leaving or evaluating or saves.due(done) or job.interrupt.signal):
                continue
            waited = time.perf_counter()
            synchronize(job.device)  # nothing may be in flight, and the wait belongs to the step
            attempt.step_s += time.perf_counter() - waited
            last = report_step(job, attempt)
            fault, pending = fault or last, None
            evaluating = evaluating and not fault
            if evaluating:
                validation = validate(job, done)
                evaluations.reset()
            reason = stop_reason(job, validation if evaluating else None)
            new_best = (
                evaluating and job.spec.checkpoint.keep_best and job.progress.evaluations_since_best == 0
            )
            if leaving or new_best or reason or saves.due(done) or job.interrupt.signal:
                saved = job.saver.save(job, done, validation["loss"] if evaluating and validation else None)
                saves.reset()
                if saved is None and (leaving or reason or job.interrupt.signal):
                    fault = (
                        fault
                        or "the last state could not be saved; make room and start again from the checkpoint before"
                    )
            if fault:
                return Outcome("failed", fault, done, validation)
            if reason and done < total:
                return Outcome("finished", reason, done, validation)
            if job.interrupt.signal and done < total:
                return Outcome("interrupted", job.interrupt.signal, done, validation)
    return Outcome("finished", "the budget is spent", total, validation)
