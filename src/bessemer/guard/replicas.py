"""Silent corruption: replicas that must hold the same bits are compared by a digest of those bits.

The digest is integer arithmetic on the device, so it is the same whatever the order of the reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
