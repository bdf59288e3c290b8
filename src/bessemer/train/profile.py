"""Profiles a few steps of a run: torch's trace with the loop's named ranges, or only the ranges for Nsight.

The loop calls `Job.span` around its parts, which costs nothing unless a profiler is attached, and `step` after each
step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bessemer.observe.profile import PREFIX, WINDOW
from bessemer.train.device import synchronize

if TYPE_CHECKING:
    from bessemer.train.job import Interrupt

WARMUP = 5  # steps before: compiling and kernel selection, then two that are timed without the profiler's overhead
DONE = "profiled"  # ends the loop, in place of a signal's name


class StepProfiler:
    """Profiles `steps` steps after WARMUP, then ends the loop. Without a `trace` to write it only marks ranges and
    starts CUDA's profiler: Nsight and torch's profiler cannot run at once."""

    def __init__(self, device: torch.device, steps: int, trace: Path | None) -> None:
        self.device, self.steps, self.trace = device, steps, trace
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
            interrupt.signal = DONE

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()
