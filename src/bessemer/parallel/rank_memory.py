"""What each process of a run holds: weights, gradients, moments and averages, divided or whole.

Sizes are read off the tensors as they lie there, whatever mesh or placement put them there, so that the table shows
what a layout really did. A large weight that stayed whole while others were divided is worth a warning.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from bessemer.parallel.shard import local, shards
from bessemer.parallel.world import World
from bessemer.spec.quantity import human_bytes

# Below 1 MiB nothing is gained. A twentieth of the weights that a process holds is worth a word, since gradients and
# moments are too large by as much. Norms, which stay whole by design, come nowhere near in real models.
LEAST_BYTES, LEAST_SHARE = 1 << 20, 0.05


@dataclass
class Amount:
    """Of tensors in one process."""

    tensors: int = 0
    numbers: int = 0
    bytes: int = 0

    def add(self, tensor: Tensor) -> None:
        held = local(tensor)
        self.tensors += 1
        self.numbers += held.numel()
        self.bytes += held.numel() * held.element_size()


@dataclass
class MemoryKind:
    """Weights, gradients, moments or averages of one process: parts of tensors, and whole ones."""

    divided: Amount = field(default_factory=Amount)
    whole: Amount = field(default_factory=Amount)

    @property
    def bytes(self) -> int:
        return self.divided.bytes + self.whole.bytes

    def add(self, tensor: Tensor, divided: bool = False) -> None:
        (self.divided if divided or shards(tensor) > 1 else self.whole).add(tensor)


@dataclass
class RankMemory:
    """One process. `left_whole` are large weights that stayed whole, or less divided than others."""

    rank: int
    host: str
    weights: MemoryKind = field(default_factory=MemoryKind)
    gradients: MemoryKind = field(default_factory=MemoryKind)
    moments: MemoryKind = field(default_factory=MemoryKind)
    averages: MemoryKind = field(default_factory=MemoryKind)
    left_whole: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in (self.weights, self.gradients, self.moments, self.averages))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bytes": self.bytes}


def held_here(
    world: World, named: Iterable[tuple[str, nn.Parameter]], moments: Mapping[str, Tensor],
    averages: Mapping[str, Tensor] | None = None,
) -> RankMemory:  # fmt: skip
    """Of this process. Gradients are counted where there will be some, in the type of their weights."""
    held = RankMemory(world.rank, socket.gethostname())
    pairs = list(named)
    trained = [name for name, parameter in pairs if parameter.requires_grad]
    for _, parameter in pairs:
        held.weights.add(parameter)
        if parameter.requires_grad:
            held.gradients.add(parameter)
    stepped = {key.rpartition(".")[0] for key in moments}
    some = 0 < len(stepped) < len(trained)  # whole tensors, of some of the parameters: an optimizer that is divided
    for tensor in moments.values():
        held.moments.add(tensor, some)
    for tensor in (averages or {}).values():
        held.averages.add(tensor)
    held.left_whole = left_whole(pairs, held.weights.bytes)
    return held


def left_whole(named: Iterable[tuple[str, nn.Parameter]], weight_bytes: int) -> list[str]:
    """Large weights that are divided into fewer parts than others, in words."""
    pairs = list(named)
    most = max((shards(parameter) for _, parameter in pairs), default=1)
    found = []
    for name, parameter in pairs:
        parts, held = shards(parameter), local(parameter)
        size = held.numel() * held.element_size()
        if parts < most and size >= max(LEAST_BYTES, LEAST_SHARE * weight_bytes):
            how = f"{parts} parts" if parts > 1 else "one piece"
            share = f"{human_bytes(size)}, {size / weight_bytes:.0%} of a process's weights"
            found.append(f"{name} ({share}) stays in {how} where others are in {most}")
    return found


def gather_holdings(world: World, here: RankMemory) -> list[dict[str, Any]]:
    """Everyone's, in the order of ranks, for everyone."""
    return world.gather(here.to_json())
