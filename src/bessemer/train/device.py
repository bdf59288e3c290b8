"""The device: chosen, then measured, before anything is decided from it; and scalars on their way from it."""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.plan.hardware import Ceilings, Machine, ceilings_path, load_ceilings
from bessemer.spec.schema import ParallelSpec


def pick_device(spec: ParallelSpec) -> torch.device:
    """The device that the spec names, or the best one available."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if spec.device == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    if not available[spec.device]:
        names = ", ".join(kind for kind, usable in available.items() if usable)
        raise UserError(
            f"parallel.device: {spec.device} is not available to torch here (there is {names}): write device: auto"
        )
    return torch.device(spec.device)


def use_threads(spec: ParallelSpec) -> None:
    """Set the thread count even where it is torch's default: otherwise MKL chooses its own, which may differ between
    processes and change the last digit of a loss."""
    torch.set_num_threads(torch.get_num_threads() if spec.threads == "auto" else spec.threads)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Silences the native stack trace that torch prints on CPUs without a fast bf16 path; the probe expects that."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int, budget_s: float = 0.2) -> float:
    """FLOP/s of a square matmul."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_s(lambda: a @ b, device, budget_s)


def median_s(run: Callable[[], object], device: torch.device, budget_s: float = 0.2, count: int | None = None) -> float:
    """Median seconds of `count` runs, or of as many as fit in the budget, at least 3. A GPU is timed by events, so that
    launches from the host do not count."""
    run()
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    count = count or min(200, max(3, int(budget_s / (time.perf_counter() - began))))
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        synchronize(device)
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3
    ends = [time.perf_counter()]
    for _ in range(count):
        run()
        synchronize(device)
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(ends))


def name_and_memory(device: torch.device) -> tuple[str, int]:
    """The device's name and its memory in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory
    return _processor(), psutil.virtual_memory().total


def _processor() -> str:
    """The CPU's name from /proc/cpuinfo; platform.processor() returns only x86_64 on Linux."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return match[1].strip() if match else platform.processor() or platform.machine()


def bench_count(device: torch.device) -> int:
    """The number of GPUs, or of a CPU's threads."""
    return torch.cuda.device_count() if device.type == "cuda" else torch.get_num_threads()


def bench_file(device: torch.device) -> Path:
    """Where `bessemer bench` stores its measurements of such a device with this torch."""
    return ceilings_path(name_and_memory(device)[0], bench_count(device), torch.__version__)


def stored_ceilings(device: torch.device) -> Ceilings | None:
    """The measurements of `bessemer bench` for such a device, if there are any."""
    return load_ceilings(bench_file(device))


def measure_machine(device: torch.device) -> Machine:
    """Name, memory and matmul rates: those stored by `bessemer bench`, or from a probe of under a second."""
    name, memory = name_and_memory(device)
    machine, stored = Machine(device.type, name, memory, torch.get_num_threads()), stored_ceilings(device)
    if stored is not None and "fp32" in (rates := stored.matmul()):
        return replace(machine, matmul={"bf16": 0.0} | rates, source=stored.source)
    return replace(machine, matmul=_probe(device))


def _probe(device: torch.device) -> dict[str, float]:
    """FLOP/s of matmuls in fp32 and bf16; a slow bf16 path is only measured on a small one."""
    size = 4096 if device.type == "cuda" else 512
    rates = {"fp32": matmul_rate(device, torch.float32, size)}
    try:
        with quiet_stderr():
            small = matmul_rate(device, torch.bfloat16, 128, budget_s=0.05)
            slow = device.type == "cpu" and small < 0.2 * rates["fp32"]
            rates["bf16"] = small if slow else matmul_rate(device, torch.bfloat16, size)
    except (RuntimeError, TypeError):  # a backend without bf16
        rates["bf16"] = 0.0
    return rates


def memory_in_use(device: torch.device) -> int:
    """Peak bytes on a GPU; elsewhere the resident memory of the process without mapped data files."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def memory_limit(device: torch.device) -> int:
    """Bytes that `memory_in_use` can grow to."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


class ScalarTransfer:
    """Named scalars on their way to the host, packed into one tensor. Reading them waits for the device to compute
    them, but not for work queued since: `tensor.tolist()` would wait for all of it and leave the device idle."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        by_device: dict[torch.device, list[str]] = {}
        for name, scalar in scalars.items():
            by_device.setdefault(scalar.device, []).append(name)
        self._names = [name for names in by_device.values() for name in names]
        parts = [torch.stack([scalars[name].float() for name in names]) for names in by_device.values()]
        packed = torch.cat([part.to(parts[0].device) for part in parts]) if len(parts) > 1 else parts[0]
        self._event: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed

    def read(self) -> dict[str, float]:
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._host.tolist(), strict=True))
