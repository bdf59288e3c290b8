"""Context parallel after DeepSpeed-Ulysses: processes share the columns of rows, and around attention exchange columns
of all heads for all columns of some heads. Attention itself is whole: masks, windows and packed documents are as ever.
`ring.py` has the other way.

Legend: B rows, T columns of a row, t those of this process, N and K heads, n those of this process, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.model.sight import Attend, Sight


def _send(x: Tensor, group: Any, to_heads: bool) -> Tensor:
    """(B, t, N, D) -> (B, T, n, D), or back."""
    size = dist.get_world_size(group)
    if to_heads:
        parts = x.unflatten(2, (size, -1)).movedim(2, 0).contiguous()  # (size, B, t, n, D): heads of each
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return found.movedim(0, 1).flatten(1, 2)  # columns of each, in order
    parts = x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()  # (size, B, t, n, D): columns of each
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found.movedim(0, 2).flatten(2, 3)  # heads of each, in order


class _Exchanged(torch.autograd.Function):
    """Its gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _send(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _send(grad, ctx.group, not ctx.to_heads), None, None


@dataclass(frozen=True)
class Columns:
    """This process's part of every row, and the others who have the rest."""

    group: Any
    rank: int
    size: int

    def pieces(self, length: int, rank: int) -> tuple[range, ...]:
        """The columns of a process, of a row of so many, where they lie together."""
        share = length // self.size
        return (range(rank * share, (rank + 1) * share),)

    def part(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """This one's columns, of a row of so many."""
        return _numbers(self.pieces(length, self.rank), str(device))

    def whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """(B, T) from the (B, t) of each process."""
        laid = np.concatenate(parts, axis=1)
        order = [i for rank in range(self.size) for piece in self.pieces(laid.shape[1], rank) for i in piece]
        found = np.empty_like(laid)
        found[:, order] = laid
        return found

    def attend(
        self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor, sight: Sight, window: int, scale: float, whole: Attend
    ) -> Tensor:
        """(B, t, N, E): this one's columns of what `whole` makes of all, with some of the heads."""
        return self.columns(whole(*self.heads(q_BtND, k_BtKD, v_BtKE)))

    def heads(self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All columns of some heads. Fewer key-value heads than processes are sent to several."""
        copies = self.size // gcd(k_BtKD.shape[2], self.size)
        if copies > 1:
            k_BtKD, v_BtKE = (x.repeat_interleave(copies, dim=2) for x in (k_BtKD, v_BtKE))
        q, k, v = (_Exchanged.apply(x, self.group, True) for x in (q_BtND, k_BtKD, v_BtKE))
        return q, k, v

    def columns(self, out_BTnE: Tensor) -> Tensor:
        """Some columns of all heads again."""
        out: Tensor = _Exchanged.apply(out_BTnE, self.group, False)
        return out


@cache
def _numbers(pieces: tuple[range, ...], device: str) -> Tensor:
    """Copied to a device once for all batches."""
    return torch.tensor([i for piece in pieces for i in piece], device=device)
