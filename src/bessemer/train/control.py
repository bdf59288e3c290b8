"""Requests from outside in the training loop: rank 0 has read one, all ranks obey it after the same step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bessemer.run.control import ACTIONS, EVENT, POLL_S, ControlRequest
from bessemer.train.job import Adjustment, Job
from bessemer.train.profile import WARMUP, profile_by_request

if TYPE_CHECKING:
    from bessemer.train.loop import Due

STOP = "stop requested"  # in place of a signal's name, before who asked
FOREVER = 1 << 53
NUMBERS = 3  # of a request in the message of a step: action, whether it has a value, value


def next_request(job: Job) -> ControlRequest | None:
    """The next request, on rank 0."""
    reader = job.recorder.requests
    return reader.next() if reader and job.world.main else None


def to_numbers(request: ControlRequest | None) -> list[float]:
    """For the sum over ranks, of which only rank 0 has a request."""
    if request is None:
        return [0.0] * NUMBERS
    return [1.0 + list(ACTIONS).index(request.action), float(request.value is not None), request.value or 0.0]


def from_numbers(numbers: list[float], own: ControlRequest | None) -> ControlRequest | None:
    """The request on every rank; who asked is known to rank 0, which writes the events."""
    code, has_value, value = numbers
    return own or (
        ControlRequest("", list(ACTIONS)[int(code) - 1], value if has_value else None, "", 0.0) if code else None
    )


def answer(job: Job, request: ControlRequest, step: int, reason: str, done: bool = True, **details: Any) -> None:
    """The event that tells what became of a request."""
    job.recorder.event(
        EVENT, step=step, action=request.action, value=request.value, who=request.who, asked=request.time,
        id=request.id, done=done, reason=f"{request.who} asked to {request.action}: {reason}", **details,
    )  # fmt: skip


def obey(job: Job, due: Due, request: ControlRequest, done: int) -> Due:
    """What is due after `done` steps with a request. A rollback is left to the loop."""
    match request.action:
        case "save":
            answer(job, request, done, f"a checkpoint after step {done:,}")
            return replace(due, save=True)
        case "evaluate" if not job.data.evaluator.available:
            answer(job, request, done, "the run has no held-out data", done=False)
        case "evaluate":
            answer(job, request, done, f"an evaluation after step {done:,}")
            return replace(due, evaluate=True)
        case "stop":
            answer(job, request, done, f"saved and stopped after step {done:,}")
            return replace(due, signal=due.signal or f"{STOP} by {request.who}")
        case "lr":
            scale_lr(job, request, done)
        case "pause":
            return replace(due, signal=due.signal or wait_for_resume(job, request, done))
        case "resume":
            answer(job, request, done, "the run was not paused", done=False)
        case "profile":
            refusal = profile_by_request(job, request, done)
            plan = f"the steps from {done + WARMUP:,} on, after {WARMUP} to warm up"
            answer(job, request, done, refusal or plan, done=not refusal)
    return due


def scale_lr(job: Job, request: ControlRequest, done: int) -> None:
    """Multiply the schedule from the next step on; an earlier factor ends there. Saved with every checkpoint."""
    factor, guard = request.value or 1.0, job.guard
    guard.adjustments = [
        replace(one, until_step=done) if one.until_step == FOREVER else one for one in guard.adjustments
    ]
    if factor != 1.0:
        guard.adjustments.append(Adjustment(done, FOREVER, factor, 1.0))
    reason = "the learning rate was changed by request"
    guard.judge.reopen()
    guard.detectors.reopen(reason)
    lr = job.lr(done)
    answer(job, request, done, f"the schedule's learning rate x{factor:g} from step {done:,} on, {lr:.3g}", lr=lr)


def wait_for_resume(job: Job, request: ControlRequest, done: int) -> str | None:
    """Hold all ranks until the run is resumed; the signal or request that ends it instead."""
    answer(job, request, done, f"paused after step {done:,}; the device keeps its memory")
    job.recorder.view.activity("paused by request")
    began_s, world = time.monotonic(), job.world
    while True:
        if job.guard.watchdog:
            job.guard.watchdog.beat(done - 1, long=True)
        time.sleep(POLL_S / 2)
        signal = next((name for name in world.gather(job.interrupt.signal) if name), None)
        following = world.agree(next_request(job))
        if signal or (following and following.action == "stop"):
            if following:
                answer(job, following, done, f"saved and stopped after step {done:,}")
            return signal or f"{STOP} by {following.who if following else 'request'}"
        if following and following.action == "resume":
            answer(job, following, done, f"resumed after {time.monotonic() - began_s:.0f} s")
            return None
        if following:
            answer(job, following, done, "the run is paused: resume or stop it", done=False)
