"""Measures the peak rates of a machine for `bessemer bench`: matmul, attention, memory, disk, and links between GPUs.

Inputs are random (zeros take a GPU less power, and run faster) and larger than caches. Rates use the median time. The
all-reduce over all GPUs runs in processes of its own.
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
LEAST_CAPABILITY = {"tf32": (8, 0), "fp8": (8, 9)}  # compute capability of NVIDIA GPUs
HEADS = ((32, 64), (16, 128))  # number and size
MOVED = 1 << 28  # bytes; a copy inside a GPU moves four times as many
BLOCK = 1 << 24  # of a file
Run = Callable[[], object]


def measure_ceilings(
    device: torch.device, folder: Path, quick: bool = False, tell: Callable[[str], None] = lambda line: None
) -> Ceilings:
    """All rates, in about half a minute. The disk is measured in `folder`; `tell` receives each row of the table."""
    budget_s = 0.05 if quick else 0.3
    versions = package_versions() | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    date, count = datetime.now(UTC).isoformat(timespec="seconds"), bench_count(device)
    ceilings = Ceilings(device.type, name_and_memory(device)[0], count, date, versions)
    on_device = (
        measure_matmul(device, budget_s, quick),
        measure_attention(device, budget_s),
        measure_copies(device, budget_s),
    )
    for reading in chain(*on_device, measure_disk(folder, quick), measure_links(device, count)):
        ceilings = replace(ceilings, readings=(*ceilings.readings, reading))
        tell(ceilings.line(reading))
    return ceilings


def measure_rate(
    key: str, size: str, unit: str, work: float, make: Callable[[], Run], device: torch.device, budget_s: float,
    note: str = "",
) -> CeilingReading:  # fmt: skip
    """The rate of `make()`; if the device does not support it, the reading says why."""
    try:
        with warnings.catch_warnings(), quiet_stderr():
            warnings.simplefilter("ignore")
            return CeilingReading(key, size, work / median_s(make(), device, budget_s), unit, note)
    except (RuntimeError, TypeError) as error:  # no such kernel, no such type, out of memory
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return CeilingReading(key, size, None, unit, f"{note}: {reason}" if note else reason)


def make_matmul(device: torch.device, precision: str, M: int, K: int, N: int) -> Run:
    """x w^T as in a linear layer; fp8 with one scale per tensor and fast accumulation."""
    dtype = torch.float8_e4m3fn if precision == "fp8" else compute_type(precision)
    x, w = (torch.randn(rows, K, device=device).to(dtype) for rows in (M, N))
    if precision != "fp8":
        return lambda: x @ w.t()
    scale = torch.ones((), device=device)
    return lambda: torch._scaled_mm(x, w.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def measure_matmul(device: torch.device, budget_s: float, quick: bool = False) -> Iterator[CeilingReading]:
    """matmul_fp32, _tf32, _bf16, _fp16 and _fp8, if the device has them."""

    def rate(precision: str, M: int, K: int, N: int) -> CeilingReading:
        make = partial(make_matmul, device, precision, M, K, N)
        with use_tf32(precision):
            return measure_rate(
                f"matmul_{precision}", f"{M}x{K}x{N}", "FLOP/s", 2.0 * M * K * N, make, device, budget_s
            )

    gpu = device.type == "cuda"
    shapes = GPU_SHAPES if gpu else CPU_SHAPES
    for precision in ("fp32", "tf32", "bf16", "fp16", "fp8") if gpu else ("fp32", "bf16", "fp16"):
        least = LEAST_CAPABILITY.get(precision, (0, 0))
        if gpu and torch.version.hip is None and torch.cuda.get_device_capability(device) < least:
            yield CeilingReading(
                f"matmul_{precision}", "", None, "FLOP/s", f"needs compute capability {least[0]}.{least[1]}"
            )
            continue
        if not gpu and precision != "fp32":  # a CPU without such units would take minutes
            plain, small = (rate(each, 256, 256, 256) for each in ("fp32", precision))
            if (small.rate or 0.0) < 0.2 * (plain.rate or 0.0):
                yield replace(small, note=small.note or "too slow on this CPU for larger sizes")
                continue
        yield from (rate(precision, *shape) for shape in shapes[: 1 if quick else None])


def make_attention(device: torch.device, dtype: torch.dtype, size: tuple[int, ...], kernel: str, backward: bool) -> Run:
    q, k, v, upstream = (torch.randn(size, device=device).to(dtype) for _ in range(4))
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def run() -> object:
        out = attend(q, k, v, AttentionMask(), 0, size[-1] ** -0.5, backend=kernel)
        return torch.autograd.grad(out, inputs, upstream) if backward else out

    return run


def measure_attention(device: torch.device, budget_s: float) -> Iterator[CeilingReading]:
    """attention_forward_D and attention_both_D (with the backward pass) for head size D and each kernel, on causal
    rows. FLOPs are counted as FlashAttention does: half of the square, and 2.5 times that in the backward pass."""
    gpu = device.type == "cuda"
    B, T = (4, 4096) if gpu else (1, 1024)
    new = gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if new else torch.float16 if gpu else torch.float32
    for N, D in HEADS:
        for kernel in KERNELS if gpu else ("sdpa",):
            for key, times in (("forward", 1.0), ("both", 3.5)):
                work, size = times * 2.0 * B * N * T * T * D, (B, T, N, D)
                make = partial(make_attention, device, dtype, size, kernel, key == "both")
                words = "x".join(map(str, size))
                yield measure_rate(f"attention_{key}_{D}", words, "FLOP/s", work, make, device, budget_s, kernel)


def make_copy(source: torch.device, target: torch.device, size: int, pinned: bool) -> Run:
    near, far = torch.rand(size // 4, device=source), torch.empty(size // 4, device=target)
    if pinned:
        near, far = (x.pin_memory() if x.device.type == "cpu" else x for x in (near, far))
    return lambda: far.copy_(near, non_blocking=True)


def measure_copies(device: torch.device, budget_s: float) -> Iterator[CeilingReading]:
    """`copy` inside device memory (bytes read and written), and copies to and from a GPU (bytes moved)."""
    gpu, host = device.type == "cuda", torch.device("cpu")
    size = 4 * MOVED if gpu else MOVED
    make = partial(make_copy, device, device, size, False)
    yield measure_rate("copy", f"{size >> 20} MiB", "B/s", 2.0 * size, make, device, budget_s, "read and written")
    for key, source, target in (("to_device", host, device), ("from_device", device, host)) if gpu else ():
        for mode in ("pinned", "unpinned"):
            make = partial(make_copy, source, target, MOVED, mode == "pinned")
            yield measure_rate(f"{key}_{mode}", f"{MOVED >> 20} MiB", "B/s", float(MOVED), make, device, budget_s)


def measure_disk(folder: Path, quick: bool = False) -> Iterator[CeilingReading]:
    """disk_write and disk_read, in the folder or its nearest existing parent."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    most, limit_s = (1 << 26, 0.5) if quick else (1 << 29, 3.0)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".bench-") as file:
            block, written, began = os.urandom(BLOCK), 0, time.perf_counter()  # incompressible
            while written < most and time.perf_counter() - began < limit_s:
                written += sum(os.write(file.fileno(), block) for _ in range(4))
                os.fsync(file.fileno())
            rate, size = written / (time.perf_counter() - began), f"{written >> 20} MiB"
            yield CeilingReading("disk_write", size, rate, "B/s", f"in {existing}, synced each 64 MiB")
            rate, note = read_rate(file.name)
            yield CeilingReading("disk_read", size, rate, "B/s", note)
    except OSError as error:
        yield CeilingReading("disk_write", "", None, "B/s", f"{existing}: {error.strerror or error}")


def read_rate(path: str, direct: int = getattr(os, "O_DIRECT", 0)) -> tuple[float, str]:
    """Bytes per second, and whether they may come from the page cache."""
    buffer = mmap.mmap(-1, BLOCK)  # page-aligned, as direct reads require
    try:
        with open(os.open(path, os.O_RDONLY | direct), "rb", buffering=0) as file:
            total, began = 0, time.perf_counter()
            while count := file.readinto(buffer):
                total += count
            rate = total / (time.perf_counter() - began)
    except OSError:
        if not direct:
            raise
        return read_rate(path, direct=0)  # some file systems have no direct reads
    return rate, "direct, not from the system's cache" if direct else "may be from the system's cache"


def measure_links(device: torch.device, count: int) -> Iterator[CeilingReading]:
    """all_reduce over all GPUs of this machine."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        rate, note = None, "one GPU: nothing to connect"
        try:
            if count > 1:
                rate, note = all_reduce_rate("nccl", count, MOVED), "sent by each"
        except RuntimeError as error:
            note = str(error)
        yield CeilingReading("all_reduce", f"{MOVED >> 20} MiB x{count}", rate, "B/s", note)


LIMIT = timedelta(seconds=60)  # a broken link hangs instead of failing; torch ends a process that waits longer
REPEATS = 20  # fixed, since a rank that stopped early would block the others


def all_reduce_rate(backend: str, count: int, size: int) -> float:
    """Bytes per second that each rank sends, comparable with a link's data sheet: 2 (n - 1) / n of the tensor over the
    time of the slowest rank. Raises RuntimeError if a process fails."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_measure_rank, (backend, count, size, folder), count)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        slowest_s = max(float((Path(folder) / str(rank)).read_text()) for rank in range(count))
    return 2 * (count - 1) / count * size / slowest_s


def _measure_rank(rank: int, backend: str, count: int, size: int, folder: str) -> None:
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, f"file://{folder}/meeting", rank=rank, world_size=count, timeout=LIMIT)
    tensor = torch.randn(size // 4, device=device)
    # The maximum, since repeated sums would overflow.
    spent_s = median_s(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX), device, count=REPEATS)
    (Path(folder) / str(rank)).write_text(str(spent_s))
    dist.destroy_process_group()
