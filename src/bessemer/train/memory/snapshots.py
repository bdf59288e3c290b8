"""Two recent states of the run in device memory, to roll back to without reading a disk.

A veto of step N cannot undo update N-1, which may be the cause, so a rollback goes to a state that later healthy steps
have confirmed. Of two alternating snapshots, a fixed number of steps apart, one always is. A snapshot of 1B parameters
with moments is 12 GB and takes about 10 ms on an H200. Without free memory for both, rollbacks read checkpoints.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from bessemer.parallel.shard import local
from bessemer.parallel.world import World

if TYPE_CHECKING:
    from bessemer.train.job import Job

CONFIRMED_STEPS = 16  # accepted steps after which a state counts as healthy


@dataclass
class MemorySnapshot:
    """State of the run before step `step`, without frozen weights."""

    step: int
    state: dict[str, Tensor]
    progress: Any

    def restore(self, job: Job) -> None:
        """Restore weights, moments, guard window and counters."""
        self.restore_weights(job)
        job.guard.load_tensors({name: t.clone() for name, t in self.state.items() if name.startswith("guard.")})
        job.recorder.progress = copy.copy(self.progress)

    def restore_weights(self, job: Job) -> None:
        """Restore weights and moments only."""
        live = job.engine.state()
        for name, tensor in self.state.items():
            if not name.startswith("guard."):
                live[name].copy_(tensor)


class MemorySnapshots:
    """The two snapshots, oldest first."""

    def __init__(self) -> None:
        self.held: list[MemorySnapshot] = []
        self._frozen_digest: Tensor | None = None

    def complete(self, job: Job) -> bool:
        """Whether this rank's frozen weights, which no snapshot holds, are those of the first snapshot bit for bit. If
        not, memory was corrupted, and only a checkpoint has all of an earlier state."""
        return self._frozen_digest is None or bool(self._frozen_digest == job.frozen_digest())

    def take(self, job: Job, step: int) -> None:
        """Copy the state before `step`, over the older of the two."""
        earlier = [snapshot for snapshot in self.held if snapshot.step < step]  # a rollback went behind later ones
        state = job.snapshot_state()
        if self._frozen_digest is None:
            self._frozen_digest = job.frozen_digest()
        if len(earlier) == 2:
            copied = earlier.pop(0).state
            for name, tensor in state.items():
                copied[name].copy_(tensor)
        else:
            copied = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.held = [*earlier, MemorySnapshot(step, copied, copy.copy(job.recorder.progress))]


def processes_here(world: World) -> int:
    """How many ranks share this host's memory: what the launcher says, or else all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.size))


def fits_snapshots(
    state: Mapping[str, Tensor], device: torch.device, world: World, peak: int | None = None
) -> tuple[bool, int, int]:
    """Whether two snapshots fit in half of the free memory, or besides a step's `peak` if it is known; the bytes that
    they need and the free bytes. Of several ranks, all must have the memory."""
    needed = 2 * sum(local(tensor).numel() * tensor.element_size() for tensor in state.values())
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if peak is not None:
            spare = int(0.95 * (free + torch.cuda.memory_reserved(device))) - peak
            return needed <= spare, needed, max(0, spare)
    else:
        free = int(psutil.virtual_memory().available) // processes_here(world)
    return needed <= free // 2, needed, free
