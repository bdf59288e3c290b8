"""What changed between two checkpoints, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """One tensor. `relative` is |b - a| / |a| (Euclidean), `largest` the largest change of an element; both are 0 for
    equal bits, inf where a number became NaN or infinite, None where the tensor is only in one or of another shape."""

    name: str
    what: str  # same, changed, only in A, only in B, or the two shapes
    relative: float | None = None
    largest: float | None = None


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[Change]:
    """Every tensor of either, in the order of a. Holds two tensors at a time."""
    for name in a:
        yield _change(name, a[name], b[name]) if name in b else Change(name, "only in A")
    for name in b:
        if name not in a:
            yield Change(name, "only in B")


def _change(name: str, a: Tensor, b: Tensor) -> Change:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Change(name, f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}".replace("torch.", ""))
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    if torch.equal(*bits):
        return Change(name, "same", 0.0, 0.0)
    moved = (bits[0] != bits[1]).view(-1, a.element_size()).any(1)
    wide = torch.float64 if a.is_floating_point() else torch.int64  # counts beyond 2**53 have no float of their own
    change = (b.reshape(-1)[moved].to(wide) - a.reshape(-1)[moved].to(wide)).double().abs()
    change = change.nan_to_num(math.inf, math.inf)
    size = a.double().nan_to_num(0.0, 0.0, 0.0).norm().item()
    return Change(name, "changed", change.norm().item() / size if size else math.inf, change.max().item())
