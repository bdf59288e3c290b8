"""Silent corruption: replicas that must hold the same bits are compared by a digest of those bits.

The digest is integer arithmetic on the device, so it is the same whatever the order of the reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash
from torch import Tensor, nn

from bessemer.dtensor import is_dtensor
from bessemer.guard.detect.alarm import Alarm, alarm
from bessemer.parallel.shard import local
from bessemer.parallel.world import World

CHUNK = 1 << 24  # integers worked on at a time: 64 MiB of scratch
_ODD = 0x9E3779B97F4A7C15  # an odd number is invertible modulo a power of two, so no change can vanish in a product


def _bits(tensor: Tensor) -> Tensor:
    """The raw bits as a flat integer tensor, of 32 bits where the size allows."""
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
    """An int64 scalar on the device. Any single flipped bit changes it, and so do swapped values or tensors.

    Each integer is multiplied by an odd number that depends on its place, modulo 2^32: one change in one place always
    changes its product, and a sum of otherwise equal products with it.
    """
    total: Tensor | None = None
    places: dict[torch.device, Tensor] = {}
    for number, tensor in enumerate(tensors):
        for at, part in enumerate(_bits(tensor).split(CHUNK)):
            if part.device not in places or len(places[part.device]) < len(part):
                places[part.device] = 2 * torch.arange(len(part), dtype=torch.int32, device=part.device) + 1
            products = part.to(torch.int32) * places[part.device][: len(part)]
            factor = _signed(_ODD * (2 * (number * 1_000_003 + at) + 1))
            term = products.sum(dtype=torch.int64) * factor
            total = term if total is None else total + term.to(total.device)
    return total if total is not None else torch.zeros((), dtype=torch.int64)


def odd_ones_out(digests: Sequence[int]) -> list[int]:
    """Which replicas differ from the majority. Without a majority nobody can say, and all are suspect."""
    if not digests:
        return []
    value, votes = Counter(digests).most_common(1)[0]
    if 2 * votes <= len(digests) and votes < len(digests):
        return list(range(len(digests)))
    return [rank for rank, found in enumerate(digests) if found != value]


def part_of(parameter: Tensor) -> str:
    """Which part of a divided tensor this process holds: others that say the same hold the same. Empty for a whole."""
    if not is_dtensor(parameter):
        return ""
    mesh = parameter.device_mesh
    at = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), parameter.placements, strict=True)
    return " ".join(f"{name} {place}" for name, place, placement in at if not placement.is_replicate())


class ReplicaCheck:
    """What several processes hold alike of a model: whole replicas, and what is whole beside divided tensors.

    `take` gives work to the device and waits for nothing; `compare` reads it, one step later, with one message of the
    hosts. On a CPU 10 M parameters take some 60 ms.
    """

    def __init__(self, model: nn.Module, world: World, every: int | None) -> None:
        self.model, self.world, self.every = model, world, every if world.size > 1 else None
        self.equal_at: int | None = None  # steps done when all were last found alike
        self._taken: tuple[int, list[str], Callable[[], list[int]]] | None = None

    def _classes(self) -> dict[str, list[tuple[str, Tensor]]]:
        """Parameters by the part that is held of them. Experts that lie apart are nobody else's."""
        found: dict[str, list[tuple[str, Tensor]]] = {}
        for name, parameter in self.model.named_parameters():
            if not getattr(parameter, "apart", False):
                found.setdefault(part_of(parameter), []).append((name, local(parameter.detach())))
        return found

    def start(self, step: int) -> None:
        """The loop begins at a step. What was loaded is taken to be alike; a rollback goes to such a state."""
        self._taken = None
        self.equal_at = step if self.equal_at is None else min(step, self.equal_at)

    def due(self, done: int) -> bool:
        return self.every is not None and done % self.every == 0

    def take(self, step: int) -> None:
        """Digests after the update of a step, left on the device."""
        if self.every is None:
            return
        classes = self._classes()
        names = [f"stage {self.world.pp_rank} {part} {_signature(held)}" for part, held in classes.items()]
        digests = [digest(tensor for _, tensor in held) for held in classes.values()]
        self._taken = step, names, _on_its_way(torch.stack(digests))

    def compare(self, step: int, hosts: Sequence[str]) -> list[Alarm]:
        """What was taken at a step, if anything was: an alarm that names those who differ from the rest."""
        if self._taken is None or self._taken[0] != step:
            return []
        _, names, read = self._taken
        self._taken = None
        odd, undecided = differing(self.world.gather(dict(zip(names, read(), strict=True))))
        if not odd:
            self.equal_at = step + 1
            return []
        tensors = self._differing_tensors()
        said = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in odd)
        where = f" in {', '.join(tensors[:4])}{' and others' if len(tensors) > 4 else ''}" if tensors else ""
        symptom = (
            f"{said} differ{where}, without a majority that would tell which is right"
            if undecided
            else f"{said} holds other weights than the rest{where}"
        )
        symptom += f"; alike after {self.equal_at:,} steps, not after {step + 1:,}"
        return alarm(
            "weights_differ", step, "rollback", symptom, 1.0,
            ranks=odd, hosts=[hosts[rank] for rank in odd], tensors=tensors, equal_at=self.equal_at,
        )  # fmt: skip

    def _differing_tensors(self) -> list[str]:
        """Their names, by one digest each; only asked for when something differs."""
        held = {f"{part}|{name}": int(digest([t])) for part, kept in self._classes().items() for name, t in kept}
        found = odd_keys(self.world.gather({f"{self.world.pp_rank}|{key}": value for key, value in held.items()}))
        return sorted({key.split("|")[-1] for key in found})


def _signature(held: Sequence[tuple[str, Tensor]]) -> str:
    return str(xxhash.xxh3_64("\n".join(f"{name} {tuple(t.shape)}" for name, t in held).encode()).hexdigest())


def odd_keys(everyone: Sequence[dict[str, int]]) -> set[str]:
    """Keys under which not all who have them hold the same."""
    values: dict[str, set[int]] = {}
    for held in everyone:
        for key, value in held.items():
            values.setdefault(key, set()).add(value)
    return {key for key, found in values.items() if len(found) > 1}


def differing(everyone: Sequence[dict[str, int]]) -> tuple[list[int], bool]:
    """Ranks that differ from the majority of those with the same key, and whether some key has none."""
    odd: set[int] = set()
    undecided = False
    for key in odd_keys(everyone):
        holders = [rank for rank, held in enumerate(everyone) if key in held]
        found = odd_ones_out([everyone[rank][key] for rank in holders])
        odd |= {holders[i] for i in found}
        undecided = undecided or len(found) == len(holders)
    return sorted(odd), undecided


def _on_its_way(numbers: Tensor) -> Callable[[], list[int]]:
    """Numbers sent to the host; the call waits for the device to have computed them, and for nothing later."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    sent = torch.cuda.Event()
    sent.record()

    def read() -> list[int]:
        sent.synchronize()
        return here.tolist()

    return read
