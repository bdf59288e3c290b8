"""Several processes of one run, forked from this one, which has imported everything: two ranks take under a second."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("fork")


def _run(rank: int, size: int, place: str, work: Callable[..., Any], arguments: tuple[Any, ...], answers: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        answers.put((rank, work(*arguments), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    sys.stdout.flush()
    os._exit(0)


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work` gives on each rank; the first fault is raised here."""
    answers = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "meet")
        ranks = [
            CONTEXT.Process(target=_run, args=(rank, size, place, work, arguments, answers)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < size:
                rank, answer, fault = answers.get(timeout=120)
                if fault:
                    raise AssertionError(f"rank {rank} of {size}:\n{fault}")
                found[rank] = answer
        finally:
            for process in ranks:
                process.join(2 if len(found) == size else 0)
                process.kill()
    return [found[rank] for rank in range(size)]


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    return on_ranks
