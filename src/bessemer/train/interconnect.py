"""How fast the GPUs of this machine exchange: an all-reduce over all of them, in processes of their own."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import torch

from bessemer.train.device import median_s

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
