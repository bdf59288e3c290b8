"""Context parallel by a ring: keys and values travel round the processes that share a row, while each attends with its
own queries to the block that it has at the time; blocks are merged by their log-sum-exp (Liu et al. 2023, "Ring
Attention with Blockwise Transformers"). The number of heads sets no limit, as it does for an exchange of heads.

Of T columns each of n processes has T / n, of queries, keys and values, beside one block that arrives while another is
worked on, and in the backward pass their gradients: memory goes with T / n, and so does that of masks, which are made
for a strip of queries at a time. Every block passes every process, in each pass and whatever a window hides: n - 1
times keys and values forward, the same backward, and n times their gradients in float32.

A row is cut in 2n pieces, of which process r has those numbered r and 2n - 1 - r: an early and a late one, which
together see as much under causality as those of any other.

Legend: B rows, T columns of a row, t those of this process, N and K heads, D head size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.model.sight import Attend, Sight
from bessemer.parallel.blocks import attend_block, block_gradients, exact
from bessemer.parallel.context import Columns

STRIP = 512  # queries that a mask is made for at a time
ALL = slice(None)


@dataclass(frozen=True)
class Tile:
    """Some of this process's queries and some keys of a block, of which they see all, those not ahead (`causal`), or
    what a mask of columns `places` says."""

    queries: slice
    keys: slice
    causal: bool = False
    places: tuple[range, range] | None = None


@dataclass(frozen=True)
class Ring(Columns):
    """This process's part of every row, and the others who have the rest, each of whom talks to the next."""

    strip: int = STRIP

    def pieces(self, length: int, rank: int) -> tuple[range, ...]:
        size = length // (2 * self.size)
        return tuple(range(i * size, (i + 1) * size) for i in (rank, 2 * self.size - 1 - rank))

    def attend(
        self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor, sight: Sight, window: int, scale: float, whole: Attend
    ) -> Tensor:
        q, k, v = (x.to(v_BtKE.dtype).transpose(1, 2) for x in (q_BtND, k_BtKD, v_BtKE))
        out_BNtE: Tensor = _Merged.apply(q, k, v, self, sight, window, scale)
        return out_BNtE.transpose(1, 2)

    def tiles(self, sight: Sight, window: int, length: int, source: int) -> Iterator[Tile]:
        """What there is to do with the block of process `source`. Of one's own block a query's tile with itself comes
        first: from there on it has seen something, and log-sum-exps are finite."""
        assert sight.causal and sight.prefix_BT is None, "the plan refuses the ring where rows look ahead"
        if not sight.plain(window, length):
            yield from self._narrow_tiles(sight, window if window < length else 0, length, source)
        elif source == self.rank:
            yield Tile(ALL, ALL, causal=True)
        elif source < self.rank:  # its late piece is behind both of ours
            yield Tile(ALL, slice(0, length // (2 * self.size)))
        else:  # both of its pieces are between ours
            yield Tile(slice(length // (2 * self.size), None), ALL)

    def _narrow_tiles(self, sight: Sight, window: int, length: int, source: int) -> Iterator[Tile]:
        """Strip by strip, from the first key that any row of it sees on; most are skipped where documents are short."""
        earliest, latest = sight.begins(length)
        size = length // (2 * self.size)
        for i, mine in enumerate(self.pieces(length, self.rank)):
            for first in mine[:: self.strip]:
                queries = range(first, min(first + self.strip, mine.stop))
                low = max(earliest[first], first - window + 1 if window else 0)
                for j, theirs in reversed(list(enumerate(self.pieces(length, source)))):
                    keys = range(max(theirs.start, low), min(theirs.stop, queries.stop))
                    if not keys:
                        continue
                    near = not window or queries[-1] - keys.start < window
                    every = keys[-1] <= first and latest[queries[-1]] <= keys.start and near and not sight.blocks[0]
                    yield Tile(
                        _inside(queries, i * size - mine.start), _inside(keys, j * size - theirs.start),
                        places=None if every else (queries, keys),
                    )  # fmt: skip

    def pass_on(self, tensors: tuple[Tensor, ...], tag: int) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to send tensors to the next process, and to receive the same of the one before; the call that waits for
        both. All do this in the same order; `tag` tells apart what is under way at the same time."""
        found = tuple(torch.empty_like(x) for x in tensors)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [
            dist.P2POp(move, x, group=self.group, group_peer=peer, tag=len(tensors) * tag + i)
            for move, peer, some in ((dist.isend, after, tensors), (dist.irecv, before, found))
            for i, x in enumerate(some)
        ]
        under_way = dist.batch_isend_irecv(moves)

        def wait() -> tuple[Tensor, ...]:
            for work in under_way:
                work.wait()
            return found

        return wait


def _inside(places: range, offset: int) -> slice:
    return slice(places.start + offset, places.stop + offset)


def _mask(tile: Tile, sight: Sight, window: int, device: torch.device) -> Tensor | None:
    """(B or 1, 1, queries, keys), True where a query may look."""
    if tile.places is None:
        return None
    q_t1, k_s = (torch.arange(x.start, x.stop, device=device) for x in tile.places)
    rows = 1 if sight.documents_BT is None else len(sight.documents_BT)
    b_B111 = torch.arange(rows, device=device)[:, None, None, None]
    return sight.sees(window)(b_B111, 0, q_t1[:, None], k_s).expand(rows, 1, len(q_t1), len(k_s))


class _Merged(torch.autograd.Function):
    """Attention to all blocks. Backward keys and values go round again, and the sums of their gradients with them, one
    process behind, until they are home."""

    @staticmethod
    def forward(
        ctx: Any, q_BNtD: Tensor, k_BKtD: Tensor, v_BKtE: Tensor, ring: Ring, sight: Sight, window: int, scale: float
    ) -> Tensor:
        B, N, t, _ = q_BNtD.shape
        kind = exact(v_BKtE.dtype)
        out = q_BNtD.new_zeros(B, N, t, v_BKtE.shape[-1], dtype=kind)
        lse = q_BNtD.new_full((B, N, t), float("-inf"), dtype=kind)
        own = block = k_BKtD.contiguous(), v_BKtE.contiguous()
        for hop in range(ring.size):
            coming = ring.pass_on(block, 0) if hop + 1 < ring.size else None
            k, v = block
            for tile in ring.tiles(sight, window, t * ring.size, (ring.rank - hop) % ring.size):
                at, to = tile.queries, tile.keys
                mask = _mask(tile, sight, window, q_BNtD.device)
                new, new_lse = attend_block(q_BNtD[:, :, at], k[:, :, to], v[:, :, to], mask, tile.causal, scale)
                both = torch.logaddexp(lse[:, :, at], new_lse)
                kept, added = ((x - both).exp()[..., None] for x in (lse[:, :, at], new_lse))
                out[:, :, at] = out[:, :, at] * kept + new * added
                lse[:, :, at] = both
            block = coming() if coming else block  # type: ignore[assignment]
        out = out.to(v_BKtE.dtype)
        ctx.save_for_backward(q_BNtD, *own, out, lse)
        ctx.asked = ring, sight, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_BNtE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, own_k, own_v, out, lse = ctx.saved_tensors
        ring, sight, window, scale = ctx.asked
        kind, t = lse.dtype, q.shape[2]
        grad_q, block, homing = torch.zeros_like(q, dtype=kind), (own_k, own_v), None
        for hop in range(ring.size):
            coming = ring.pass_on(block, 0) if hop + 1 < ring.size else None
            k, v = block
            sums = tuple(torch.zeros_like(x, dtype=kind) for x in block)
            for tile in ring.tiles(sight, window, t * ring.size, (ring.rank - hop) % ring.size):
                at, to = tile.queries, tile.keys
                found = block_gradients(
                    grad_BNtE[:, :, at], q[:, :, at], k[:, :, to], v[:, :, to], out[:, :, at], lse[:, :, at],
                    _mask(tile, sight, window, q.device), tile.causal, scale,
                )  # fmt: skip
                for total, part in zip((grad_q[:, :, at], *(x[:, :, to] for x in sums)), found, strict=True):
                    total += part
            if homing:
                for total, before in zip(sums, homing(), strict=True):
                    total += before
            homing = ring.pass_on(sums, 1)
            block = coming() if coming else block
        assert homing is not None
        grads = (x.to(q.dtype) for x in (grad_q, *homing()))
        return *grads, None, None, None, None
