"""The processes of one run (`World`): rank, mesh and process groups, and how ranks start, restart and agree.

All ranks run the same program on the same numbers. What differs between them (clocks, signals, disks) is exchanged over
a gloo group on the host, so that no GPU waits for it. A single process sends nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bessemer.errors import UserError
from bessemer.parent import end_with_parent
from bessemer.plan.search.layout import Layout

STORE_PORT = "bessemer/meeting"
CONNECT_S = 3.0  # timeout of one connection attempt
RECORDED = 2000  # collectives that torch's flight recorder keeps, a few hundred bytes each


def record_collectives() -> None:
    """Enable torch's flight recorder, which also writes a file if NCCL times out. Call it before the first group is
    created. Existing environment settings take precedence."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def open_restart_store(timeout: timedelta) -> dist.Store | None:
    """A store for this start only, if torchrun gives all starts the same one; None if torch creates its own.

    Under c10d rendezvous all starts share their agent's store, and after a restart ranks would read the addresses of
    dead ones there ("Connection refused", torch 2.13). Rank 0 opens a new store and publishes its port. A port that
    refuses connections belongs to an earlier start: retry. Restart counts cannot tell starts apart, since each agent
    has its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, rank, size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent_store = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        agent_store.set(STORE_PORT, str(store.port))
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        port = int(agent_store.get(STORE_PORT))
        try:  # torch's own attempts would fill the log with stack traces
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
            continue
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)


def set_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every existing group: groups of a mesh have torch's defaults of 30 minutes, or 10 with
    NCCL."""
    if not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def recorded_collectives() -> str:
    """The flight recorder's content as JSON; empty if there is none. Local to this process."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            text = dump()
            text = text.decode() if isinstance(text, bytes) else str(text)
            if json.loads(text).get("entries"):
                return text
    return ""


def last_collective(text: str) -> tuple[int, str]:
    """How many collectives this process has entered, and a description of the last. The number is 0 with point-to-point
    messages (pipelines), which differ between ranks by design."""
    entries = json.loads(text)["entries"] if text else []
    if not entries:
        return 0, ""
    last = entries[-1]
    group = (last.get("process_group") or ["", ""])[-1]
    state = "finished" if last.get("retired") else "unfinished"
    description = f"{last['profiling_name']} of {last['input_sizes']} in group {group}, {state}"
    has_p2p = any(entry.get("is_p2p") for entry in entries)
    return (0 if has_p2p else int(last["record_id"]) + 1), description


Value = TypeVar("Value")
ERROR, ERROR_READ, ERROR_S = "bessemer/error", "bessemer/error-read", 5.0
LEAVE_S = 1.0
TIMEOUT = timedelta(minutes=30)  # for other ranks, which may be reading a checkpoint or preparing data


@dataclass
class World:
    """All processes of a run. `control` is the host group of the training loop, `saving` that of the checkpoint
    thread."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    layout: Layout = field(default_factory=Layout)
    mesh: DeviceMesh | None = None
    control: Any = None
    saving: Any = None
    columns: Any = None  # context-parallel group: ranks that share this rank's rows
    data_parallel_group: Any = None  # ranks with the same part of the model and other tokens; None: all
    others_end: bool = False  # rank 0 failed first, and the other ranks end silently

    @property
    def main(self) -> bool:
        """Whether this rank writes the run's records."""
        return self.rank == 0

    def _mesh_rank(self, dimension: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(dimension)

    @property
    def dp_rank(self) -> int:
        """This rank's share of a step's rows, replicas first, as in the mesh. Tensor-, context- and pipeline-parallel
        ranks of one replica read the same rows."""
        return self._mesh_rank("dp_replicate") * self.layout.dp_shard + self._mesh_rank("dp_shard") // self.layout.cp

    @property
    def cp_rank(self) -> int:
        return self._mesh_rank("dp_shard") % self.layout.cp

    @property
    def pp_rank(self) -> int:
        return self._mesh_rank("pp")

    @property
    def reports_losses(self) -> bool:
        """Whether this rank reports losses: only one tensor-parallel rank does, on the last pipeline stage;
        context-parallel ranks each report their own columns."""
        return self._mesh_rank("tp") == 0 and self.pp_rank == self.layout.pp - 1

    @property
    def divided(self) -> bool:
        """Whether FSDP2 shards the weights. Also with one shard if weights are split in other ways, so that gradients
        are reduced in one way, and for one process if requested."""
        return self.mesh is not None and (self.layout.dp_shard > 1 or self.layout.inner or self.size == 1)

    def group(self, dimension: str) -> Any:
        """The process group of a mesh dimension; the default group without a mesh."""
        return None if self.mesh is None else self.mesh.get_group(dimension)

    def set_layout(self, layout: Layout, alone: bool = False) -> None:
        """Set the layout and create its mesh; a collective call. One mesh for everything: FSDP and tensor-parallel
        weights must share it. Context-parallel ranks lie inside `dp_shard`, with which they share weights. A single
        process has no mesh unless it shards its weights `alone`."""
        self.layout = layout
        if self.size == 1 and not alone:
            return
        if not dist.is_initialized():
            dist.init_process_group(_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)
        shards = layout.dp_shard * layout.cp
        sizes = (layout.pp, layout.dp_replicate, shards, layout.tp)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        ranks = torch.arange(self.size).view(layout.pp, layout.dp_replicate, shards, layout.tp)
        if layout.cp > 1:
            groups = ranks.transpose(-1, -2).reshape(-1, layout.cp).tolist()
            self.columns, _ = dist.new_subgroups_by_enumeration(groups)
        if layout.inner:
            groups = ranks.permute(0, 3, 1, 2).reshape(layout.pp * layout.tp, -1).tolist()
            self.data_parallel_group, _ = dist.new_subgroups_by_enumeration(groups)

    def agree(self, value: Value) -> Value:
        """Broadcast rank 0's value to all ranks."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def gather(self, value: Value, saving: bool = False) -> list[Value]:
        """All ranks' values, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.saving if saving else self.control)
        return values

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Sums of host numbers over all ranks."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def add(self, numbers: Tensor, group: Any = None) -> Tensor:
        """All-reduce a device tensor in place, without the host; over all ranks or a group."""
        if self.size > 1:
            dist.all_reduce(numbers, group=group)
        return numbers

    def broadcast_tensor(self, numbers: Tensor) -> Tensor:
        """Broadcast rank 0's device tensor in place."""
        if self.size > 1:
            dist.broadcast(numbers, src=0)
        return numbers

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block first, then the others. If rank 0 fails, the others exit silently with the same exit
        code, and rank 0 reports the error."""
        if not self.main and (code := self.agree(0)):
            exit_silently(code)
        try:
            yield
        except BaseException as error:
            if self.main:
                self.others_end = True
                self.agree(2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1)
            raise
        if self.main:
            self.agree(0)
        self.wait()

    def rank_0_reports_same_error(self, error: str) -> bool:
        """Whether rank 0 ends with the same error and prints it for all. Every rank that ends with an error calls this;
        a rank that fails alone waits a few seconds and gets False."""
        if self.size == 1 or self.others_end:
            return False
        store = dist.distributed_c10d._get_default_store()
        try:
            if self.main:
                store.set(ERROR, error)
                deadline = time.monotonic() + ERROR_S  # the store may live in this process: let the others read first
                while store.add(ERROR_READ, 0) < self.size - 1 and time.monotonic() < deadline:
                    time.sleep(0.02)
                return False
            store.wait([ERROR], timedelta(seconds=ERROR_S))
            same: bool = store.get(ERROR).decode() == error
            store.add(ERROR_READ, 1)
        except RuntimeError:  # rank 0 continues, or is gone
            return False
        return same


def join_process_group(device: torch.device, timeout: timedelta = TIMEOUT) -> World:
    """Join the process group if a launcher (torchrun) started several processes. `timeout` applies to the host groups;
    see `set_timeouts` for the others."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(device=device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    end_with_parent()
    record_collectives()
    if not dist.is_initialized():
        store = open_restart_store(timeout)
        rank = -1 if store is None else int(os.environ["RANK"])
        dist.init_process_group(_backend(device), None, timeout, -1 if store is None else size, rank, store)
    control, saving = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    return World(dist.get_rank(), size, device, control=control, saving=saving)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def exit_silently(code: int) -> NoReturn:
    """Exit while rank 0 prints the error: a moment later, since launchers end all processes when one exits."""
    time.sleep(LEAVE_S)
    raise SystemExit(code)


def leave_process_group() -> None:
    """Leave the process group at the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
