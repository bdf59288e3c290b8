"""Where processes meet anew after a fault, how long they wait for each other, and what torch recorded of that."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

MEETING = "bessemer/meeting"
TRY_S = 3.0  # for one connection to where they may meet
RECORDED = 2000  # collectives that torch's flight recorder keeps, some hundred bytes each


def record_collectives() -> None:
    """Have torch keep the last collectives of this process, and write them to a file where NCCL times out. Called
    before the first group is made. What is already in the environment is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def meet(patience: timedelta) -> dist.Store | None:
    """A store for this start alone, where torchrun hands all starts the same one; None where torch makes its own.

    Under c10d rendezvous all starts share their agent's store, and after a restart read there the addresses of those
    who died ("Connection refused", with torch 2.13). The first process opens a store and writes its port there. A port
    of an earlier start refuses: then the new one has not been written yet. The count of restarts would tell starts
    apart, but each agent has its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, rank, size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
    if rank == 0:
        own = dist.TCPStore(host, 0, size, is_master=True, timeout=patience, wait_for_workers=False)
        agents.set(MEETING, str(own.port))
        return own
    give_up = time.monotonic() + patience.total_seconds()
    while True:
        port = int(agents.get(MEETING))
        try:  # torch's own attempt would fill the log with its stacks
            socket.create_connection((host, port), timeout=TRY_S).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
            continue
        return dist.TCPStore(host, port, size, is_master=False, timeout=patience, wait_for_workers=False)


def set_patience(patience: timedelta) -> None:
    """For every group there is: those that a mesh has made come with torch's own 30 minutes, or 10 on NCCL."""
    if not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(patience, group)


def recorded() -> str:
    """What the flight recorder holds, as JSON; empty where it holds nothing. Asks no other process."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            text = dump()
            text = text.decode() if isinstance(text, bytes) else str(text)
            if json.loads(text).get("entries"):
                return text
    return ""


def last_collective(text: str) -> tuple[int, str]:
    """How many collectives this process has entered, and the last one in words. Messages from one process to another
    (pipelines) make the numbers of ranks differ by design: then 0."""
    entries = json.loads(text)["entries"] if text else []
    if not entries:
        return 0, ""
    last = entries[-1]
    group = (last.get("process_group") or ["", ""])[-1]
    done = "ended" if last.get("retired") else "not ended"
    words = f"{last['profiling_name']} of {last['input_sizes']} in group {group}, {done}"
    direct = any(entry.get("is_p2p") for entry in entries)
    return (0 if direct else int(last["record_id"]) + 1), words
