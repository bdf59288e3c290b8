"""Samples the answers of the next round while the current one trains (`rl.ahead: 1`): one round off-policy, which
truncated importance sampling corrects.

On a CPU, and with a remote generator, this happens in a thread, from a copy of the weights; on a GPU and with tensor
parallelism it happens before the round trains, which saves no time. Both give the same samples. They are on
disk before a checkpoint is written, so a resumed run trains on the same ones.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bessemer.align.environment import Write
from bessemer.align.resident import plain_model
from bessemer.align.sampler import Answers, LocalAnswers, PromptRequest, Sampler
from bessemer.model.generate import Generator
from bessemer.train.job import Job

POLL_S = 0.05


class Cancelled(Exception):
    """The samples are not needed any more."""


@dataclass
class PendingRound:
    """Samples that are being made: for which round, and the step whose weights they are made with."""

    first: int
    key: str
    weights_step: int
    questions: int
    local: LocalAnswers | None = None
    thread: threading.Thread | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()
        if self.thread is not None:
            self.thread.join(timeout=10.0)  # a generator stops at its next token; an HTTP request may take longer

    def wait(self, check: Callable[[], None]) -> float:
        """Waits until the answers are made; `check` may raise. Returns the seconds."""
        began_s = time.perf_counter()
        while self.thread is not None and self.thread.is_alive():
            self.thread.join(POLL_S)
            check()
        return time.perf_counter() - began_s


def begin(job: Job, sampler: Sampler, pending: PendingRound, questions: Sequence[PromptRequest]) -> None:
    """Start to sample with the present weights; all ranks call it together."""
    engine, world, rl = job.engine, job.world, sampler.rl
    part = sampler.share(questions, world)
    answers = len(part) * rl.samples

    def on_step(done: int, total: int) -> None:
        if pending.cancelled.is_set():
            raise Cancelled

    def make(write: Write) -> None:
        try:
            pending.local = sampler.make(write, part, rl.samples, rl.temperature, pending.first)
        except Cancelled:
            pending.local = LocalAnswers(failure=Cancelled())
        except Exception as failure:  # raised where the samples are taken
            pending.local = LocalAnswers(failure=failure)

    if sampler.remote is not None:
        sampler.load_remote(engine.model, world)
        write: Write = partial(sampler.remote.complete, on_step=on_step)
    elif engine.device.type == "cpu" and world.layout.tp == 1:
        with plain_model(engine.model, world, engine.plan.precision) as local:
            weights = copy.deepcopy(local).eval()
        write = sampler.embedded(Generator(weights, sampler.slots(answers), sampler.context), on_step)
    else:
        with sampler.writer(
            engine.model, world, engine.plan.precision, answers, lambda done, total: job.check_interrupt()
        ) as now:
            pending.local = sampler.make(now, part, rl.samples, rl.temperature, pending.first)
        engine.model.train()
        return
    engine.model.train()
    pending.thread = threading.Thread(target=make, args=(write,), name=f"rollouts-{pending.first}", daemon=True)
    pending.thread.start()


def finish(job: Job, sampler: Sampler, pending: PendingRound, check: Callable[[], None]) -> tuple[Answers, float]:
    """The answers of all ranks, and the seconds that this one waited."""
    waited_s = pending.wait(check)
    assert pending.local is not None
    return sampler.exchange(pending.local, job.world, pending.questions, sampler.rl.samples), waited_s
