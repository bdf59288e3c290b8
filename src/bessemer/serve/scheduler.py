"""One thread computes all jobs: it admits them from a fair queue, steps the models, and reports progress to the event
loop. Everything else of the server runs in the event loop and only submits, cancels and reads.

Fair: the next job is that of the waiting client with the fewest running samples, then of the one served least recently.
A job that needs more slots than are free blocks its model's queue until they are, so none is starved.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bessemer.errors import UserError
from bessemer.model.generate import Completion
from bessemer.serve.errors import ApiError
from bessemer.serve.metrics import ServerMetrics

_log = logging.getLogger(__name__)
# Readers of a growing answer are woken this often at most: one event for each token of 64 answers took ten times as
# long as the pass on a GPU.
STREAM_INTERVAL_S = 0.02


@dataclass(frozen=True)
class QueueLimits:
    """What the server accepts."""

    queue: int = 512  # jobs that wait
    client_queue: int = 256  # of one client
    queue_s: float = 120.0  # longest wait for a slot
    request_s: float = 600.0  # longest computation of a job
    max_tokens: int = 16384  # new tokens of a sample
    samples: int = 16  # n
    prompts: int = 128  # of a request
    inputs: int = 2048  # of an embedding or classification request
    body_bytes: int = 4 << 20


class SampleProgress(NamedTuple):
    """What a reader may use of a sample: its first tokens, its text, and the reason of its end."""

    tokens: int
    text: str
    reason: str | None


@dataclass(eq=False)
class InferenceJob:
    """One prompt with its samples, or the texts of one embedding or classification request. It is computed by the
    model that it was accepted for, also if the name gets a newer one while it waits."""

    model: str
    backend: Backend
    client: str
    work: Any  # a `Request` for generators, lists of token ids for encoders
    samples: int = 1
    progress: list[SampleProgress] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    error: ApiError | None = None
    done: bool = False
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    woken: float = 0.0  # when its readers were last woken
    readers: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None


class Backend(Protocol):
    """A model as the scheduler drives it, from its one thread."""

    slots: int

    def free(self) -> int:
        """Samples that can start now."""
        ...

    def start(self, job: InferenceJob) -> None: ...
    def cancel(self, job: InferenceJob) -> None: ...
    def step(self) -> None:
        """Advance all started jobs."""
        ...

    def progress(self, job: InferenceJob) -> list[SampleProgress]: ...
    def reset(self) -> None:
        """Forget all jobs after an error."""
        ...


class Scheduler:
    """Call `start` once; `submit`, `cancel` and `updates` in the event loop."""

    def __init__(self, limits: QueueLimits, metrics: ServerMetrics) -> None:
        self.limits, self.metrics = limits, metrics
        self._waiting: dict[str, deque[InferenceJob]] = {}  # by client
        self._active: list[InferenceJob] = []
        self._cancelled: list[InferenceJob] = []
        self._served_at: dict[str, float] = {}  # by client
        self._condition = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bessemer-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Jobs that are not done fail."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def load(self) -> dict[str, int]:
        """Waiting jobs and running samples."""
        with self._condition:
            waiting = sum(map(len, self._waiting.values()))
            return {"waiting": waiting, "running": sum(job.samples for job in self._active)}

    def submit(self, jobs: Sequence[InferenceJob]) -> None:
        """Queue the jobs of one request, which share one event; ApiError if the queue is full."""
        readers, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._condition:
            if self._stopping:
                raise ApiError(503, "the server is shutting down", code="shutdown")
            waiting, client = sum(map(len, self._waiting.values())), jobs[0].client
            client_waiting = len(self._waiting.get(client, ()))
            if waiting + len(jobs) > self.limits.queue or client_waiting + len(jobs) > self.limits.client_queue:
                self.metrics.refused.inc()
                raise ApiError(
                    429, f"the queue is full: {waiting} requests wait; try again later", code="queue_full",
                    retry_after_s=1 + waiting // 16,
                )  # fmt: skip
            for job in jobs:
                job.readers, job.loop = readers, loop
                self._waiting.setdefault(client, deque()).append(job)
            self._condition.notify()

    def cancel(self, jobs: Iterable[InferenceJob]) -> None:
        """Stop computing these jobs before the next step. Jobs that are done stay as they are."""
        with self._condition:
            self._cancelled += [job for job in jobs if not job.done]
            self._condition.notify()

    async def updates(self, jobs: Sequence[InferenceJob]) -> AsyncIterator[None]:
        """Yields after each change of a job, until all are done. Raises the first error; cancels them if left early."""
        try:
            while True:
                jobs[0].readers.clear()
                finished = all(job.done for job in jobs)
                if error := next((job.error for job in jobs if job.error is not None), None):
                    raise error
                yield
                if finished:
                    return
                await jobs[0].readers.wait()
        finally:
            self.cancel(jobs)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception:
            _log.exception("the scheduler ended")
            raise
        finally:
            with self._condition:
                self._stopping = True
                left = [*self._active, *(job for queue in self._waiting.values() for job in queue)]
                for job in left:
                    job.error, job.done = ApiError(503, "the server is shutting down", code="shutdown"), True
                self._wake(left)

    def _step(self) -> bool:
        """Admit jobs and advance the models by one step; False when the thread is to end."""
        with self._condition:
            while not (self._active or self._waiting or self._cancelled or self._stopping):
                self._condition.wait()
            if self._stopping:
                return False
            changed = self._drop_cancelled() + self._expire() + self._admit()
        for backend in {job.backend for job in self._active}:
            try:
                backend.step()
            except Exception as error:  # a fault of one model must not end the others
                _log.exception("a step of the model failed")
                changed += self._fail(backend, ApiError(500, f"the model failed: {error}", code="model_error"))
        self._wake(changed + self._publish())
        return True

    def _drop_cancelled(self) -> list[InferenceJob]:
        cancelled, self._cancelled = self._cancelled, []
        for job in cancelled:
            if job.done:
                continue
            job.error, job.done = ApiError(499, "the client closed the request", code="cancelled"), True
            if job in self._active:
                self._active.remove(job)
                job.backend.cancel(job)
            elif job in (queue := self._waiting.get(job.client, deque())):
                queue.remove(job)
                self._forget_empty(job.client)
            self.metrics.finished(job, "cancelled")
        return cancelled

    def _expire(self) -> list[InferenceJob]:
        """Fail jobs that waited too long. Each client's queue is in order of arrival."""
        now, expired = time.monotonic(), []
        for client, queue in list(self._waiting.items()):
            while queue and now - queue[0].submitted > self.limits.queue_s:
                job = queue.popleft()
                message = f"no slot became free within {self.limits.queue_s:g} s; try again later"
                job.error, job.done = ApiError(503, message, code="queue_timeout", retry_after_s=10), True
                expired.append(job)
                self.metrics.finished(job, "expired")
            self._forget_empty(client)
        return expired

    def _forget_empty(self, client: str) -> None:
        if not self._waiting.get(client, True):
            del self._waiting[client]

    def _admit(self) -> list[InferenceJob]:
        """Start waiting jobs while there are slots. Returns those that were refused by their model."""
        running = Counter[str]()
        for job in self._active:
            running[job.client] += job.samples
        refused: list[InferenceJob] = []
        blocked: set[Backend] = set()
        while True:
            candidates = []
            for client, queue in self._waiting.items():
                first = next((entry for entry in queue if entry.backend not in blocked), None)
                if first is not None:
                    candidates.append((running[client], self._served_at.get(client, 0.0), client, first))
            if not candidates:
                self._served_at = {client: at for client, at in self._served_at.items() if client in running}
                return refused
            _, _, client, job = min(candidates, key=lambda entry: entry[:2])
            if job.samples > job.backend.free():
                blocked.add(job.backend)
                continue
            self._waiting[client].remove(job)
            self._forget_empty(client)
            job.started = self._served_at[client] = time.monotonic()
            try:
                job.backend.start(job)
            except UserError as error:
                job.error, job.done = ApiError(400, str(error)), True
                refused.append(job)
                continue
            running[client] += job.samples
            self._active.append(job)

    def _fail(self, backend: Backend, error: ApiError) -> list[InferenceJob]:
        failed = [job for job in self._active if job.backend is backend]
        for job in failed:
            job.error, job.done = error, True
            self.metrics.finished(job, "failed")
            self._active.remove(job)
        backend.reset()
        return failed

    def _publish(self) -> list[InferenceJob]:
        """Take over the progress of jobs that ended, began, or were last read some time ago."""
        changed, now = [], time.monotonic()
        for job in list(self._active):
            progress = job.backend.progress(job)
            ended = all(sample.reason is not None for sample in progress)
            if progress == job.progress or (now < job.woken + STREAM_INTERVAL_S and not ended):
                continue
            if job.first_token is None and any(sample.tokens for sample in progress):
                job.first_token = now
            job.progress, job.woken = progress, now
            if ended:
                self._active.remove(job)
                self.metrics.finished(job, "completed")
                job.done = True
            changed.append(job)
        return changed

    def _wake(self, jobs: Sequence[InferenceJob]) -> None:
        """Wake the readers of these jobs, with one call into each event loop."""
        for loop in {job.loop for job in jobs if job.loop is not None}:
            events = {job.readers for job in jobs if job.loop is loop}
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
