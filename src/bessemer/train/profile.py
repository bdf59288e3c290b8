"""Profiles a few steps of a run: torch's trace with the loop's named ranges, or only the ranges for Nsight.

The loop calls `Job.span` around its parts, which costs nothing unless a profiler is attached, and `step` after each
step. `bessemer train --profile` ends after the profiled steps; a live run profiles by request, see `control.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bessemer.observe.memory_snapshot import peak_holders
from bessemer.observe.profile import PREFIX, WINDOW
from bessemer.run.control import ControlRequest
from bessemer.train.device import synchronize

if TYPE_CHECKING:
    from bessemer.train.job import Interrupt, Job

WARMUP = 5  # steps before: compiling and kernel selection, then two that are timed without the profiler's overhead
DONE = "profiled"  # ends the loop, in place of a signal's name
REQUESTED_STEPS = 10  # without a number in the request
MEMORY_EVENTS = 200_000  # allocations and frees that a memory snapshot holds at most


class StepProfiler:
    """Profiles `steps` steps after WARMUP, then ends the loop. Without a `trace` to write it only marks ranges and
    starts CUDA's profiler: Nsight and torch's profiler cannot run at once. With `memory`, one more step on a GPU
    records every allocation into that file, for pytorch.org/memory_viz: it is slow, so no time is taken of it."""

    def __init__(self, device: torch.device, steps: int, trace: Path | None, memory: Path | None = None) -> None:
        self.device, self.steps, self.trace = device, steps, trace
        self.memory = memory if device.type == "cuda" else None
        self.peak: dict[str, Any] = {}  # see `peak_holders`
        self.plain_step_s = self._began = 0.0
        self.done = 0
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._torch = profile(activities=kinds) if trace else None
        self._window: Any = record_function(WINDOW) if trace else torch.cuda.profiler.profile()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        nvtx = torch.cuda.nvtx.range(PREFIX + name) if self.device.type == "cuda" else nullcontext()
        with record_function(PREFIX + name), nvtx:
            yield

    def step(self, interrupt: Interrupt) -> None:
        """After a step. Waits for the device where profiling starts or ends, so that its work is inside."""
        self.done += 1
        if self.done == WARMUP - 3:
            self._began = self._now()
        elif self.done == WARMUP - 1:
            self.plain_step_s = (self._now() - self._began) / 2
            if self._torch:
                self._torch.start()  # a step early: starting is slow
        elif self.done == WARMUP:
            self._now()
            self._window.__enter__()
        elif self.done == WARMUP + self.steps:
            self._now()
            self._window.__exit__(None, None, None)
            if self._torch:
                self._torch.stop()
                self._torch.export_chrome_trace(str(self.trace))
            if self.memory is None:
                self.finish(interrupt)
            else:
                torch.cuda.memory._record_memory_history(
                    "all", context="alloc", stacks="python", max_entries=MEMORY_EVENTS
                )
        elif self.done == WARMUP + self.steps + 1:
            self._now()
            torch.cuda.memory._dump_snapshot(str(self.memory))
            self.peak = peak_holders(torch.cuda.memory._snapshot(), self.device.index or 0)
            torch.cuda.memory._record_memory_history(None)
            self.finish(interrupt)

    def finish(self, interrupt: Interrupt) -> None:
        interrupt.signal = DONE

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


class RequestedProfiler(StepProfiler):
    """Profiles steps of a run that trains on afterwards. Each rank writes its trace into the run's folder."""

    def __init__(self, job: Job, request: ControlRequest, done: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notes would go between the lines of the view
        self.job, self.request, self.first_step = job, request, done + WARMUP
        folder = job.recorder.run.profiles
        folder.mkdir(exist_ok=True)
        self.names = [f"step-{self.first_step:08}-rank-{rank}.json.gz" for rank in range(job.world.size)]
        steps = int(request.value or REQUESTED_STEPS)
        super().__init__(job.engine.device, steps, folder / self.names[job.world.rank])

    def step(self, interrupt: Interrupt) -> None:
        if self.done + 1 == WARMUP + self.steps and self.job.guard.watchdog:
            self.job.guard.watchdog.beat(self.first_step + self.steps - 1, long=True)  # writing takes a while
        super().step(interrupt)

    def finish(self, interrupt: Interrupt) -> None:
        """Note where the traces are, and train on without a profiler."""
        first, request = self.first_step, self.request
        self.job.recorder.profiler = None
        self.job.recorder.event(
            "profiled", step=first + self.steps, steps=self.steps, traces=self.names, who=request.who, id=request.id,
            step_s=round(self.plain_step_s, 5),
            reason=f"{self.steps} steps from {first:,} on, by request of {request.who}: {self.names[0]}",
        )  # fmt: skip

    def abandon(self) -> None:
        """The run ends before the last step that was to be profiled."""
        self.job.recorder.profiler = None
        if self.done >= WARMUP:
            self._window.__exit__(None, None, None)
        if self._torch and self.done >= WARMUP - 1:
            self._torch.stop()


def profile_by_request(job: Job, request: ControlRequest, done: int) -> str:
    """Attach a profiler after `done` steps; the reason if there is none."""
    needed, left = WARMUP + int(request.value or REQUESTED_STEPS), job.plan.total_steps - done
    if job.recorder.profiler is not None:
        return "steps are being profiled already"
    if job.engine.device.type == "mps":
        return "torch cannot profile Apple GPUs"
    if needed > left:
        return f"it needs {needed} steps, and {left} are left"
    job.recorder.profiler = RequestedProfiler(job, request, done)
    return ""
