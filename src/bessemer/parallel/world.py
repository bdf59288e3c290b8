"""The processes of one run. All run the same program on the same numbers; what clocks, signals and disks say differs,
and is settled by words on a channel of the host's own, so that a GPU never waits for them.

Alone, every word is one's own and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bessemer.plan.layout import Layout

Word = TypeVar("Word")
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

    @property
    def main(self) -> bool:
        """Whether this one writes the run's records."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which share of a step's rows is this one's: replicas first, as the mesh has it."""
        return self.rank

    def lay(self, layout: Layout) -> None:
        """Decide the layout; made by all together."""
        self.layout = layout
        if self.size > 1:
            sizes, names = (layout.dp_replicate, layout.dp_shard), ("dp_replicate", "dp_shard")
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

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

    def add(self, numbers: Tensor) -> Tensor:
        """The same on the device, in place, without the host."""
        if self.size > 1:
            dist.all_reduce(numbers)
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
        """The first one does it, then the others find it done. If it fails there, the others fail too."""
        if not self.main and (fault := self.agree("")):
            raise SystemExit(fault)
        try:
            yield
        except BaseException as error:
            if self.main:
                self.agree(f"rank 0 failed: {error}")
            raise
        if self.main:
            self.agree("")
        self.wait()


def join(device: torch.device) -> World:
    """Meet the others, if a launcher (torchrun) has started several."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(device=device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    control, saving = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
    return World(dist.get_rank(), size, device, control=control, saving=saving)


def part() -> None:
    """Leave, at the end of the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
