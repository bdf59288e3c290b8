"""The device and what it really does: chosen, then measured, before anything is decided from it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.plan.machine import Machine
from bessemer.spec.schema import ParallelSpec


def pick_device(spec: ParallelSpec) -> torch.device:
    """The device asked for, or the best one present."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if spec.device == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if present[kind]))
    if not present[spec.device]:
        here = ", ".join(kind for kind, there in present.items() if there)
        raise UserError(
            f"parallel.device: {spec.device} is not available to torch here (there is {here}): write device: auto"
        )
    return torch.device(spec.device)


def use_threads(spec: ParallelSpec) -> None:
    """Said even where it is torch's default: left alone, MKL chooses a number of its own, not the same in every
    process, and the last digit of a loss with it."""
    torch.set_num_threads(torch.get_num_threads() if spec.threads == "auto" else spec.threads)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Some CPUs make torch print a long native stack trace when bf16 has no fast path; the probe expects that case."""
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
    """Best FLOP/s of a square product, over as many repeats as fit in the budget."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    a @ b
    synchronize(device)
    best, end = float("inf"), time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        a @ b
        synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return 2 * size**3 / best


def measure(device: torch.device) -> Machine:
    """Name, memory and matmul rates. Takes under a second; a hopeless bf16 path is given up after a small product."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = platform.processor() or platform.machine(), psutil.virtual_memory().total
    size = 4096 if device.type == "cuda" else 512
    rates = {"fp32": matmul_rate(device, torch.float32, size)}
    try:
        with _quiet_stderr():
            small = matmul_rate(device, torch.bfloat16, 128, budget_s=0.05)
            hopeless = device.type == "cpu" and small < 0.2 * rates["fp32"]
            rates["bf16"] = small if hopeless else matmul_rate(device, torch.bfloat16, size)
    except (RuntimeError, TypeError):  # a backend without bf16
        rates["bf16"] = 0.0
    return Machine(device.type, name, memory, torch.get_num_threads(), rates)


def memory_in_use(device: torch.device) -> int:
    """Peak bytes on a GPU; elsewhere those of the process itself, without mapped data files."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))


def memory_limit(device: torch.device) -> int:
    """Bytes that `memory_in_use` can grow to."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


class Sent:
    """Numbers on their way to the host. Reading them waits for the device to have computed them, and for nothing that
    was given to it since: `tensor.tolist()` would wait for all of it, and leave the device idle afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._numbers = tensor

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._numbers.tolist()
        return found
