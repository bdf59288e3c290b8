"""Detects silent data corruption: ranks that must hold the same bits compare a digest of them.

The digest is integer arithmetic on the device, so it does not depend on the order of the reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash
from torch import Tensor, nn

from bessemer.dtensor import is_dtensor
from bessemer.guard.alarm import Alarm, make_alarm
from bessemer.model.quantized import stored_tensors
from bessemer.parallel.nf4 import ShardedNF4
from bessemer.parallel.shard import local
from bessemer.parallel.world import World

CHUNK = 1 << 24  # integers per pass: 64 MiB of scratch memory
_FACTOR = 0x9E3779B97F4A7C15  # odd, hence invertible modulo a power of two: no change vanishes in a product


def _bits(tensor: Tensor) -> Tensor:
    """The raw bits as a flat integer tensor, of 32 bits if the size allows."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return flat.new_zeros(0, dtype=torch.int32)
    size = flat.numel() * flat.element_size()
    return flat.view(torch.int32 if size % 4 == 0 else torch.int8)


def _signed(value: int) -> int:
    """Modulo 2^64, as an int64."""
    return (value + 2**63) % 2**64 - 2**63


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> Tensor:
    """An int64 scalar on the device. Any flipped bit changes it, and so do swapped values or tensors.

    Each integer is multiplied by an odd number that depends on its position, modulo 2^32: one change always changes its
    product, and with it a sum of otherwise equal products.
    """
    total: Tensor | None = None
    places: dict[torch.device, Tensor] = {}
    for number, tensor in enumerate(tensors):
        bits = (piece for stored in stored_tensors(tensor) for piece in _bits(stored).split(CHUNK))
        for at, part in enumerate(bits):
            if part.device not in places or len(places[part.device]) < len(part):
                places[part.device] = 2 * torch.arange(len(part), dtype=torch.int32, device=part.device) + 1
            products = part.to(torch.int32) * places[part.device][: len(part)]
            factor = _signed(_FACTOR * (2 * (number * 1_000_003 + at) + 1))
            term = products.sum(dtype=torch.int64) * factor
            total = term if total is None else total + term.to(total.device)
    return total if total is not None else torch.zeros((), dtype=torch.int64)


def minority_ranks(digests: Sequence[int]) -> list[int]:
    """Replicas that differ from the majority; all of them if there is no majority."""
    if not digests:
        return []
    value, votes = Counter(digests).most_common(1)[0]
    if 2 * votes <= len(digests) and votes < len(digests):
        return list(range(len(digests)))
    return [rank for rank, digest in enumerate(digests) if digest != value]


def shard_of(parameter: Tensor) -> str:
    """Which shard of a tensor this rank holds; ranks with equal answers hold equal bits. Empty for a full tensor."""
    if isinstance(parameter, ShardedNF4):
        return f"nf4 {parameter.gatherer.rank}"
    if not is_dtensor(parameter):
        return ""
    mesh = parameter.device_mesh
    at = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), parameter.placements, strict=True)
    return " ".join(f"{name} {place}" for name, place, placement in at if not placement.is_replicate())


class ReplicaCheck:
    """Compares what several ranks hold in common: full replicas, and replicated tensors next to sharded ones.

    `start_digest` queues work on the device and waits for nothing; `compare` reads the result one step later, with one
    message between the hosts. On a CPU 10 M parameters take some 60 ms.
    """

    def __init__(self, model: nn.Module, world: World, every: int | None) -> None:
        self.model, self.world, self.every = model, world, every if world.size > 1 else None
        self.equal_at: int | None = None  # steps done when all were last equal
        self._taken: tuple[int, list[str], Callable[[], list[int]]] | None = None

    def _by_shard(self) -> dict[str, list[tuple[str, Tensor]]]:
        """Parameters by the shard that is held of them. Experts of expert parallelism have no replica."""
        groups: dict[str, list[tuple[str, Tensor]]] = {}
        for name, parameter in self.model.named_parameters():
            if not getattr(parameter, "apart", False):
                groups.setdefault(shard_of(parameter), []).append((name, local(parameter.detach())))
        return groups

    def start(self, step: int) -> None:
        """The loop begins at a step. Loaded states are taken to be equal; a rollback goes to such a state."""
        self._taken = None
        self.equal_at = step if self.equal_at is None else min(step, self.equal_at)

    def due(self, done: int) -> bool:
        return self.every is not None and done % self.every == 0

    def start_digest(self, step: int) -> None:
        """Computes digests after the update of a step and leaves them on the device."""
        if self.every is None:
            return
        groups = self._by_shard()
        names = [f"stage {self.world.pp_rank} {part} {_signature(held)}" for part, held in groups.items()]
        digests = [digest(tensor for _, tensor in held) for held in groups.values()]
        self._taken = step, names, _copy_to_host(torch.stack(digests))

    def compare(self, step: int, hosts: Sequence[str]) -> list[Alarm]:
        """Compares the digests of a step, if there are any: an alarm names the ranks that differ from the rest."""
        if self._taken is None or self._taken[0] != step:
            return []
        _, names, read = self._taken
        self._taken = None
        ranks, undecided = differing_ranks(self.world.gather(dict(zip(names, read(), strict=True))))
        if not ranks:
            self.equal_at = step + 1
            return []
        tensors = self._differing_tensors()
        culprits = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
        where = f" in {', '.join(tensors[:4])}{' and others' if len(tensors) > 4 else ''}" if tensors else ""
        symptom = (
            f"{culprits} differ{where}, without a majority that shows which is right"
            if undecided
            else f"{culprits} holds other weights than the rest{where}"
        )
        symptom += f"; equal after {self.equal_at:,} steps, not after {step + 1:,}"
        return make_alarm(
            "weights_differ", step, "rollback", symptom, 1.0,
            ranks=ranks, hosts=[hosts[rank] for rank in ranks], tensors=tensors, equal_at=self.equal_at,
        )  # fmt: skip

    def _differing_tensors(self) -> list[str]:
        """Names of the tensors that differ, by one digest each; only computed if something differs."""
        held = {f"{part}|{name}": int(digest([t])) for part, tensors in self._by_shard().items() for name, t in tensors}
        keys = differing_keys(self.world.gather({f"{self.world.pp_rank}|{key}": value for key, value in held.items()}))
        return sorted({key.split("|")[-1] for key in keys})


def _signature(held: Sequence[tuple[str, Tensor]]) -> str:
    return str(xxhash.xxh3_64("\n".join(f"{name} {tuple(t.shape)}" for name, t in held).encode()).hexdigest())


def differing_keys(by_rank: Sequence[dict[str, int]]) -> set[str]:
    """Keys whose holders have different values."""
    values: dict[str, set[int]] = {}
    for held in by_rank:
        for key, value in held.items():
            values.setdefault(key, set()).add(value)
    return {key for key, distinct in values.items() if len(distinct) > 1}


def differing_ranks(by_rank: Sequence[dict[str, int]]) -> tuple[list[int], bool]:
    """Ranks that differ from the majority for some key, and whether some key has no majority."""
    ranks: set[int] = set()
    undecided = False
    for key in differing_keys(by_rank):
        holders = [rank for rank, held in enumerate(by_rank) if key in held]
        minority = minority_ranks([by_rank[rank][key] for rank in holders])
        ranks |= {holders[i] for i in minority}
        undecided = undecided or len(minority) == len(holders)
    return sorted(ranks), undecided


def _copy_to_host(numbers: Tensor) -> Callable[[], list[int]]:
    """Starts an asynchronous copy; the returned function waits for it, and for nothing later on the device."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    pinned.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return pinned.tolist()

    return read
