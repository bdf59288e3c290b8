"""What each rank holds: bytes of weights, gradients, moments and averages, sharded or not.

Sizes are read from the tensors themselves, so the table shows what a layout really did. A large weight that stayed
unsharded while others were sharded deserves a warning.
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

# Warn from 1 MiB and a twentieth of a rank's weights on: gradients and moments are too large by as much. Norms, which
# stay unsharded by design, are far smaller in real models.
MIN_BYTES, MIN_SHARE = 1 << 20, 0.05


@dataclass
class Amount:
    """Tensors of one rank."""

    tensors: int = 0
    numbers: int = 0
    bytes: int = 0

    def add(self, tensor: Tensor) -> None:
        shard = local(tensor)
        self.tensors += 1
        self.numbers += shard.numel()
        self.bytes += shard.nbytes


@dataclass
class MemoryKind:
    """Weights, gradients, moments or averages of one rank: shards, and full tensors."""

    divided: Amount = field(default_factory=Amount)
    whole: Amount = field(default_factory=Amount)

    @property
    def bytes(self) -> int:
        return self.divided.bytes + self.whole.bytes

    def add(self, tensor: Tensor, divided: bool = False) -> None:
        (self.divided if divided or shards(tensor) > 1 else self.whole).add(tensor)


@dataclass
class RankMemory:
    """One rank. `left_whole` lists large weights that are sharded less than others."""

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
    """This rank's memory. Gradients are counted for trainable weights, in the weights' dtype."""
    memory = RankMemory(world.rank, socket.gethostname())
    pairs = list(named)
    trained = [name for name, parameter in pairs if parameter.requires_grad]
    for _, parameter in pairs:
        memory.weights.add(parameter)
        if parameter.requires_grad:
            memory.gradients.add(parameter)
    optimized = {key.rpartition(".")[0] for key in moments}
    zero1 = 0 < len(optimized) < len(trained)  # full tensors of some of the parameters
    for tensor in moments.values():
        memory.moments.add(tensor, zero1)
    for tensor in (averages or {}).values():
        memory.averages.add(tensor)
    memory.left_whole = left_whole(pairs, memory.weights.bytes)
    return memory


def left_whole(named: Iterable[tuple[str, nn.Parameter]], weight_bytes: int) -> list[str]:
    """Descriptions of large weights that are sharded less than others."""
    pairs = list(named)
    most = max((shards(parameter) for _, parameter in pairs), default=1)
    warnings = []
    for name, parameter in pairs:
        parts, size = shards(parameter), local(parameter).nbytes
        if parts < most and size >= max(MIN_BYTES, MIN_SHARE * weight_bytes):
            split = f"{parts} shards" if parts > 1 else "one piece"
            share = f"{human_bytes(size)}, {size / weight_bytes:.0%} of a rank's weights"
            warnings.append(f"{name} ({share}) stays in {split} while others are in {most}")
    return warnings


def gather_holdings(world: World, memory: RankMemory) -> list[dict[str, Any]]:
    """All ranks' memory, in rank order, on every rank."""
    return world.gather(memory.to_json())
