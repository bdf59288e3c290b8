"""Measures what a machine does at most: products, attention, memory, disk, links between GPUs. For `bessemer bench`.

Inputs are random (zeros cost a GPU less power, and run faster) and larger than caches; rates are of the median time.

How fast the GPUs of this machine exchange: an all-reduce over all of them, in processes of their own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from bessemer.model.attention import KERNELS, attend
from bessemer.model.attention_mask import AttentionMask
from bessemer.plan.hardware import CeilingReading, Ceilings
from bessemer.train.compile import compute_type, use_tf32
from bessemer.train.device import bench_count, median_s, name_and_memory, quiet_stderr
from bessemer.train.saver import package_versions

# Rows, inner size, columns: a large square, and layers of models 2048 and 4096 wide.
GPU_SHAPES = ((8192, 8192, 8192), (16384, 2048, 8192), (32768, 2048, 2048), (16384, 4096, 14336))
CPU_SHAPES = ((2048, 2048, 2048), (4096, 512, 2048), (8192, 512, 512), (4096, 1024, 3584))
LEAST_CAPABILITY = {"tf32": (8, 0), "fp8": (8, 9)}  # of NVIDIA's
HEADS = ((32, 64), (16, 128))  # number and size
MOVED = 1 << 28  # bytes; a copy inside a GPU is of four times as many
BLOCK = 1 << 24  # of a file
Run = Callable[[], object]


def measure_ceilings(
    device: torch.device, folder: Path, quick: bool = False, tell: Callable[[str], None] = lambda line: None
) -> Ceilings:
    """Everything, in about half a minute; `folder` is where the disk is measured, `tell` gets each row of the table."""
    budget_s = 0.05 if quick else 0.3
    versions = package_versions() | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    date, count = datetime.now(UTC).isoformat(timespec="seconds"), bench_count(device)
    found = Ceilings(device.type, name_and_memory(device)[0], count, date, versions)
    on_device = products(device, budget_s, quick), attentions(device, budget_s), copies(device, budget_s)
    for reading in chain(*on_device, disk(folder, quick), links(device, count)):
        found = replace(found, readings=(*found.readings, reading))
        tell(found.line(reading))
    return found


def attempt(
    key: str, size: str, unit: str, work: float, make: Callable[[], Run], device: torch.device, budget_s: float,
    note: str = "",
) -> CeilingReading:  # fmt: skip
    """The rate at which `make()` does its work; where the device cannot, the reading says why."""
    try:
        with warnings.catch_warnings(), quiet_stderr():
            warnings.simplefilter("ignore")
            return CeilingReading(key, size, work / median_s(make(), device, budget_s), unit, note)
    except (RuntimeError, TypeError) as fault:  # no such kernel, no such type, out of memory
        why = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        return CeilingReading(key, size, None, unit, f"{note}: {why}" if note else why)


def product(device: torch.device, precision: str, M: int, K: int, N: int) -> Run:
    """x w^T as a linear layer multiplies it; fp8 with one scale a tensor and fast accumulation."""
    dtype = torch.float8_e4m3fn if precision == "fp8" else compute_type(precision)
    x, w = (torch.randn(rows, K, device=device).to(dtype) for rows in (M, N))
    if precision != "fp8":
        return lambda: x @ w.t()
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def products(device: torch.device, budget_s: float, quick: bool = False) -> Iterator[CeilingReading]:
    """matmul_fp32, _tf32, _bf16, _fp16 and _fp8, as far as the device has them."""

    def rate(precision: str, M: int, K: int, N: int) -> CeilingReading:
        make = partial(product, device, precision, M, K, N)
        with use_tf32(precision):
            return attempt(f"matmul_{precision}", f"{M}x{K}x{N}", "FLOP/s", 2.0 * M * K * N, make, device, budget_s)

    gpu = device.type == "cuda"
    shapes = GPU_SHAPES if gpu else CPU_SHAPES
    for precision in ("fp32", "tf32", "bf16", "fp16", "fp8") if gpu else ("fp32", "bf16", "fp16"):
        least = LEAST_CAPABILITY.get(precision, (0, 0))
        if gpu and torch.version.hip is None and torch.cuda.get_device_capability(device) < least:
            yield CeilingReading(
                f"matmul_{precision}", "", None, "FLOP/s", f"needs compute capability {least[0]}.{least[1]}"
            )
            continue
        if not gpu and precision != "fp32":  # a CPU without units for it would take minutes
            plain, small = (rate(each, 256, 256, 256) for each in ("fp32", precision))
            if (small.rate or 0.0) < 0.2 * (plain.rate or 0.0):
                yield replace(small, note=small.note or "too slow here for larger ones")
                continue
        yield from (rate(precision, *shape) for shape in shapes[: 1 if quick else None])


def attention(device: torch.device, dtype: torch.dtype, size: tuple[int, ...], kernel: str, backward: bool) -> Run:
    q, k, v, upstream = (torch.randn(size, device=device).to(dtype) for _ in range(4))
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def run() -> object:
        out = attend(q, k, v, AttentionMask(), 0, size[-1] ** -0.5, backend=kernel)
        return torch.autograd.grad(out, inputs, upstream) if backward else out

    return run


def attentions(device: torch.device, budget_s: float) -> Iterator[CeilingReading]:
    """attention_forward_D and attention_both_D (with the backward pass) of head size D by each kernel, on plain causal
    rows. Half of the square is counted, and 2.5 times that in the backward pass, as FlashAttention counts."""
    gpu = device.type == "cuda"
    B, T = (4, 4096) if gpu else (1, 1024)
    new = gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if new else torch.float16 if gpu else torch.float32
    for N, D in HEADS:
        for kernel in KERNELS if gpu else ("sdpa",):
            for key, times in (("forward", 1.0), ("both", 3.5)):
                work, size = times * 2.0 * B * N * T * T * D, (B, T, N, D)
                make = partial(attention, device, dtype, size, kernel, key == "both")
                words = "x".join(map(str, size))
                yield attempt(f"attention_{key}_{D}", words, "FLOP/s", work, make, device, budget_s, kernel)


def copier(source: torch.device, target: torch.device, size: int, pinned: bool) -> Run:
    near, far = torch.rand(size // 4, device=source), torch.empty(size // 4, device=target)
    if pinned:
        near, far = (x.pin_memory() if x.device.type == "cpu" else x for x in (near, far))
    return lambda: far.copy_(near, non_blocking=True)


def copies(device: torch.device, budget_s: float) -> Iterator[CeilingReading]:
    """`copy` inside the device's memory, bytes read and written; to and from a GPU, bytes moved."""
    gpu, host = device.type == "cuda", torch.device("cpu")
    size = 4 * MOVED if gpu else MOVED
    make = partial(copier, device, device, size, False)
    yield attempt("copy", f"{size >> 20} MiB", "B/s", 2.0 * size, make, device, budget_s, "read and written")
    for key, source, target in (("to_device", host, device), ("from_device", device, host)) if gpu else ():
        for how in ("pinned", "unpinned"):
            make = partial(copier, source, target, MOVED, how == "pinned")
            yield attempt(f"{key}_{how}", f"{MOVED >> 20} MiB", "B/s", float(MOVED), make, device, budget_s)


def disk(folder: Path, quick: bool = False) -> Iterator[CeilingReading]:
    """disk_write and disk_read. A folder that is not there yet is measured where it would be made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    most, limit_s = (1 << 26, 0.5) if quick else (1 << 29, 3.0)
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".bench-") as file:
            block, written, began = os.urandom(BLOCK), 0, time.perf_counter()  # nothing for a disk to compress
            while written < most and time.perf_counter() - began < limit_s:
                written += sum(os.write(file.fileno(), block) for _ in range(4))
                os.fsync(file.fileno())
            rate, size = written / (time.perf_counter() - began), f"{written >> 20} MiB"
            yield CeilingReading("disk_write", size, rate, "B/s", f"in {there}, synced each 64 MiB")
            rate, note = read_rate(file.name)
            yield CeilingReading("disk_read", size, rate, "B/s", note)
    except OSError as fault:
        yield CeilingReading("disk_write", "", None, "B/s", f"{there}: {fault.strerror or fault}")


def read_rate(path: str, direct: int = getattr(os, "O_DIRECT", 0)) -> tuple[float, str]:
    """Bytes a second, and whether they can have come from the system's cache."""
    buffer = mmap.mmap(-1, BLOCK)  # aligned to a page, as direct reads must be
    try:
        with open(os.open(path, os.O_RDONLY | direct), "rb", buffering=0) as file:
            total, began = 0, time.perf_counter()
            while count := file.readinto(buffer):
                total += count
            rate = total / (time.perf_counter() - began)
    except OSError:
        if not direct:
            raise
        return read_rate(path, direct=0)  # a file system in memory or on a network may have no direct reads
    return rate, "direct, not from the system's cache" if direct else "may be from the system's cache"


def links(device: torch.device, count: int) -> Iterator[CeilingReading]:
    """all_reduce over all GPUs of this machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        rate, note = None, "one GPU: nothing to connect"
        try:
            if count > 1:
                rate, note = all_reduce_rate("nccl", count, MOVED), "sent by each"
        except RuntimeError as fault:
            note = str(fault)
        yield CeilingReading("all_reduce", f"{MOVED >> 20} MiB x{count}", rate, "B/s", note)


LIMIT = timedelta(seconds=60)  # a broken link hangs rather than fails; torch ends a process that waits for longer
REPEATS = 20  # the same on every rank, whatever its clock says: one that left early would keep the others waiting


def all_reduce_rate(backend: str, count: int, size: int) -> float:
    """Bytes a second that each must send, comparable with a link's data sheet: 2 (n - 1) / n of the tensor's over the
    time of the slowest. RuntimeError if a process fails."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank, (backend, count, size, folder), count)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as fault:
            raise RuntimeError(str(fault).strip().splitlines()[-1]) from fault
        slowest_s = max(float((Path(folder) / str(rank)).read_text()) for rank in range(count))
    return 2 * (count - 1) / count * size / slowest_s


def _rank(rank: int, backend: str, count: int, size: int, folder: str) -> None:
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{folder}/meeting", rank=rank, world_size=count, timeout=LIMIT)
    tensor = torch.randn(size // 4, device=device)
    # The largest rather than the sum, which would grow without end.
    spent_s = median_s(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX), device, count=REPEATS)
    (Path(folder) / str(rank)).write_text(str(spent_s))
    dist.destroy_process_group()
