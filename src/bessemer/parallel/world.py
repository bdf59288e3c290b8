"""Where processes meet anew after a fault, how long they wait for each other, and what torch recorded of that.

The processes of one run. All run the same program on the same numbers; what clocks, signals and disks say differs,
and is settled by words on a channel of the host's own, so that a GPU never waits for them.

Alone, every word is one's own and nothing is sent.
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


Word = TypeVar("Word")
ERROR, ERROR_READ, ERROR_S = "bessemer/error", "bessemer/error-read", 5.0
LEAVE_S = 1.0
PATIENCE = timedelta(minutes=30)  # of a rank for the others: a checkpoint may be read meanwhile, or data prepared


@dataclass
class World:
    """Who takes part. `control` is for the loop's words, `saving` for those of a thread that writes a checkpoint."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    layout: Layout = field(default_factory=Layout)
    mesh: DeviceMesh | None = None
    control: Any = None
    saving: Any = None
    columns: Any = None  # those that share the columns of this one's rows
    readers: Any = None  # those that hold the same part of the model and see other tokens; None: all

    @property
    def main(self) -> bool:
        """Whether this one writes the run's records."""
        return self.rank == 0

    def _at(self, dimension: str) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank(dimension)

    @property
    def dp_rank(self) -> int:
        """Which share of a step's rows is this one's: replicas first, as the mesh has it. Those that share the tensors,
        columns or layers of a replica read the same rows."""
        return self._at("dp_replicate") * self.layout.dp_shard + self._at("dp_shard") // self.layout.cp

    @property
    def cp_rank(self) -> int:
        return self._at("dp_shard") % self.layout.cp

    @property
    def pp_rank(self) -> int:
        return self._at("pp")

    @property
    def speaks(self) -> bool:
        """Whether what this one computed of a loss counts: of those that share every tensor one does, and in a pipeline
        the last stage."""
        return self._at("tp") == 0 and self.pp_rank == self.layout.pp - 1

    @property
    def divided(self) -> bool:
        """Whether FSDP2 lays out the weights: also among one, so that whatever is divided otherwise has one way to add
        up its gradients, and where one process was asked to."""
        return self.mesh is not None and (self.layout.dp_shard > 1 or self.layout.inner or self.size == 1)

    def group(self, dimension: str) -> Any:
        """The process group of a dimension of the mesh; the default one without a mesh."""
        return None if self.mesh is None else self.mesh.get_group(dimension)

    def lay(self, layout: Layout, alone: bool = False) -> None:
        """Decide the layout; made by all together. One mesh for all that is divided: FSDP and tensor parallel weights
        must come from the same one. Columns of a row are shared inside `dp_shard`, whose weights they share too. One
        process has no mesh, unless it is to divide its weights `alone`."""
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
            rows = ranks.transpose(-1, -2).reshape(-1, layout.cp).tolist()
            self.columns, _ = dist.new_subgroups_by_enumeration(rows)
        if layout.inner:
            rows = ranks.permute(0, 3, 1, 2).reshape(layout.pp * layout.tp, -1).tolist()
            self.readers, _ = dist.new_subgroups_by_enumeration(rows)

    def agree(self, word: Word) -> Word:
        """The first one's word, for all."""
        if self.size == 1:
            return word
        words = [word]
        dist.broadcast_object_list(words, src=0, group=self.control)
        return words[0]

    def gather(self, word: Word, saving: bool = False) -> list[Word]:
        """Everyone's, in the order of ranks, for everyone."""
        if self.size == 1:
            return [word]
        words: list[Any] = [None] * self.size
        dist.all_gather_object(words, word, group=self.saving if saving else self.control)
        return words

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Of the host's numbers, each over all."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def add(self, numbers: Tensor, among: Any = None) -> Tensor:
        """The same on the device, in place, without the host; among all, or a group of them."""
        if self.size > 1:
            dist.all_reduce(numbers, group=among)
        return numbers

    def first_word(self, numbers: Tensor) -> Tensor:
        """The first one's numbers on the device, in place."""
        if self.size > 1:
            dist.broadcast(numbers, src=0)
        return numbers

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first one does it, then the others find it done. If it fails there, the others leave with the same exit
        code and without a word: the first one says why."""
        if not self.main and (code := self.agree(0)):
            leave_to_rank_0(code)
        try:
            yield
        except BaseException as error:
            if self.main:
                self.agree(2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1)
            raise
        if self.main:
            self.agree(0)
        self.wait()

    def says_it_too(self, error: str) -> bool:
        """Whether rank 0 ends with the same error and so prints it for all. Called by every rank that ends with one;
        a rank that is alone with its error waits for a few seconds and gets False."""
        if self.size == 1:
            return False
        store = dist.distributed_c10d._get_default_store()
        try:
            if self.main:
                store.set(ERROR, error)
                give_up = time.monotonic() + ERROR_S  # the store may live in this process: the others read first
                while store.add(ERROR_READ, 0) < self.size - 1 and time.monotonic() < give_up:
                    time.sleep(0.02)
                return False
            store.wait([ERROR], timedelta(seconds=ERROR_S))
            same: bool = store.get(ERROR).decode() == error
            store.add(ERROR_READ, 1)
        except RuntimeError:  # torch: rank 0 goes on, or is gone
            return False
        return same


def join(device: torch.device, patience: timedelta = PATIENCE) -> World:
    """Meet the others, if a launcher (torchrun) has started several. `patience` is how long words of the hosts are
    waited for; see `health.set_patience` for the rest."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(device=device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    end_with_parent()
    record_collectives()
    if not dist.is_initialized():
        store = meet(patience)
        rank = -1 if store is None else int(os.environ["RANK"])
        dist.init_process_group(_backend(device), None, patience, -1 if store is None else size, rank, store)
    control, saving = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
    return World(dist.get_rank(), size, device, control=control, saving=saving)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def leave_to_rank_0(code: int) -> NoReturn:
    """End this process, whose error rank 0 prints: a moment later, since launchers end all others when one has left."""
    time.sleep(LEAVE_S)
    raise SystemExit(code)


def part() -> None:
    """Leave, at the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
