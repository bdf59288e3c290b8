"""Context parallel after DeepSpeed-Ulysses: processes share the columns of rows, and around attention exchange columns
of all heads for all columns of some heads. Attention itself is whole: masks, windows and packed documents are as ever.
`ring.py` has the other way.

Legend: B rows, T columns of a row, t those of this process, N and K heads, n those of this process, D head size.

Attention of some queries to a block of keys, with the log-sum-exp by which blocks are merged, and its gradients from
the log-sum-exp of all blocks. One kernel for each kind of device, and plain torch where none serves.

`aten`'s own operators, since `scaled_dot_product_attention` keeps the log-sum-exp to itself.
Legend: B rows, N query heads, K key-value heads, t queries, s keys of the block, D head size, E value size.

Context parallel by a ring: keys and values travel round the processes that share a row, while each attends with its
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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bessemer.model.attention_mask import Attend, AttentionMask


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
class ContextColumns:
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
        self,
        q_BtND: Tensor,
        k_BtKD: Tensor,
        v_BtKE: Tensor,
        sight: AttentionMask,
        window: int,
        scale: float,
        whole: Attend,
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


aten = torch.ops.aten
ALIGNED = 32  # rows of the efficient kernel's log-sum-exp; its bias wants 8, which divides it


def exact(dtype: torch.dtype) -> torch.dtype:
    """In which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel(q_BNtD: Tensor, v_BKsE: Tensor, masked: bool) -> str:
    """Which one serves: cpu, flash, efficient or plain. The last makes logits of B * N * t * s numbers."""
    D, E, dtype, device = q_BNtD.shape[-1], v_BKsE.shape[-1], v_BKsE.dtype, v_BKsE.device.type
    if device == "cpu":
        return "cpu" if D == E else "plain"
    half = dtype in (torch.bfloat16, torch.float16)
    if device != "cuda" or not (half or dtype == torch.float32):
        return "plain"
    if half and not masked and D == E and D % 8 == 0 and D <= 256:
        return "flash"
    step = 8 if half else 4
    return "efficient" if D % step == 0 and E % step == 0 else "plain"


def attend_block(
    q_BNtD: Tensor, k_BKsD: Tensor, v_BKsE: Tensor, mask_B1ts: Tensor | None, causal: bool, scale: float,
    chosen: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(B, N, t, E) and the log-sum-exp (B, N, t): 0 and -inf of queries that see nothing here."""
    name = kernel(q_BNtD, v_BKsE, mask_B1ts is not None) if chosen == "auto" else chosen
    k, v = _repeated(q_BNtD, k_BKsD), _repeated(q_BNtD, v_BKsE)
    bias = None if mask_B1ts is None else _bias(mask_B1ts, q_BNtD)
    if name == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNtD, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif name == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q_BNtD, k, v, 0.0, causal, scale=scale)
    elif name == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BNtD, k, v, bias, True, 0.0, causal, scale=scale)
        lse = lse[:, :, : q_BNtD.shape[2]]
    else:
        logits = _logits(q_BNtD, k, bias, causal, scale)
        lse = logits.logsumexp(dim=-1)
        out = _product(torch.exp(logits - lse[..., None]), v)
    if mask_B1ts is not None:  # kernels disagree on rows without a key
        seen_B1t = mask_B1ts.any(dim=-1)
        out, lse = out.where(seen_B1t[..., None], 0), lse.where(seen_B1t, float("-inf"))
    return out, lse


def block_gradients(
    grad_BNtE: Tensor, q_BNtD: Tensor, k_BKsD: Tensor, v_BKsE: Tensor, out_BNtE: Tensor, lse_BNt: Tensor,
    mask_B1ts: Tensor | None, causal: bool, scale: float, chosen: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of q, k and v, through this block. `out` and `lse` are those of all blocks together: shares of keys are
    exp(logit - lse), whichever block they are in."""
    name = kernel(q_BNtD, v_BKsE, mask_B1ts is not None) if chosen == "auto" else chosen
    k, v = _repeated(q_BNtD, k_BKsD), _repeated(q_BNtD, v_BKsE)
    bias = None if mask_B1ts is None else _bias(mask_B1ts, q_BNtD)
    lse = lse_BNt.contiguous()
    if name == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BNtE, q_BNtD, k, v, out_BNtE, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif name == "flash":
        unused = torch.zeros((), dtype=torch.int64, device=q_BNtD.device)  # of dropout
        found = aten._scaled_dot_product_flash_attention_backward(
            grad_BNtE, q_BNtD, k, v, out_BNtE, lse, None, None, q_BNtD.shape[2], k.shape[2], 0.0, causal, unused,
            unused, scale=scale,
        )  # fmt: skip
    elif name == "efficient":
        unused = torch.zeros((), dtype=torch.int64, device=q_BNtD.device)
        lse = F.pad(lse, (0, -lse.shape[-1] % ALIGNED), value=float("inf"))
        found = aten._scaled_dot_product_efficient_attention_backward(
            grad_BNtE, q_BNtD, k, v, bias, out_BNtE, lse, unused, unused, 0.0, (True, True, True, False), causal,
            scale=scale,
        )  # fmt: skip
    else:
        kind = exact(q_BNtD.dtype)
        shares = torch.exp(_logits(q_BNtD, k, bias, causal, scale) - lse[..., None])
        grad = grad_BNtE.to(kind)
        within = (grad * out_BNtE.to(kind)).sum(dim=-1, keepdim=True)
        inner = shares * (_product(grad, v.transpose(-1, -2)) - within) * scale
        found = _product(inner, k), _product(inner.transpose(-1, -2), q_BNtD), _product(shares.transpose(-1, -2), grad)
    dq, dk, dv = found[:3]
    return dq, _summed(dk, k_BKsD), _summed(dv, v_BKsE)


def _repeated(q_BNtD: Tensor, x_BKsD: Tensor) -> Tensor:
    """Key-value heads once for each of their query heads."""
    groups = q_BNtD.shape[1] // x_BKsD.shape[1]
    return x_BKsD if groups == 1 else x_BKsD.repeat_interleave(groups, dim=1)


def _summed(grad_BNsD: Tensor, like_BKsD: Tensor) -> Tensor:
    """The other way, in exact sums."""
    grad = grad_BNsD.to(exact(like_BKsD.dtype))
    return grad.unflatten(1, (like_BKsD.shape[1], -1)).sum(dim=2)


def _bias(mask_B1ts: Tensor, q_BNtD: Tensor) -> Tensor:
    """0 or -inf for all heads. On a GPU its rows lie at multiples of 32 numbers, as the kernel wants them."""
    (B, N), (t, s) = q_BNtD.shape[:2], mask_B1ts.shape[-2:]
    wide = s if q_BNtD.device.type == "cpu" else -(-s // ALIGNED) * ALIGNED
    bias = q_BNtD.new_zeros(len(mask_B1ts), 1, t, wide)[..., :s].masked_fill_(~mask_B1ts, float("-inf"))
    return bias.expand(B, N, t, s)


def _logits(q_BNtD: Tensor, k_BNsD: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    logits = _product(q_BNtD, k_BNsD.transpose(-1, -2)) * scale
    if causal:
        t, s = logits.shape[-2:]
        logits = logits.masked_fill(~torch.ones(t, s, dtype=torch.bool, device=logits.device).tril(), float("-inf"))
    return logits if bias is None else logits + bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    kind = exact(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(kind) @ b.to(kind)


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
class Ring(ContextColumns):
    """This process's part of every row, and the others who have the rest, each of whom talks to the next."""

    strip: int = STRIP

    def pieces(self, length: int, rank: int) -> tuple[range, ...]:
        size = length // (2 * self.size)
        return tuple(range(i * size, (i + 1) * size) for i in (rank, 2 * self.size - 1 - rank))

    def attend(
        self,
        q_BtND: Tensor,
        k_BtKD: Tensor,
        v_BtKE: Tensor,
        sight: AttentionMask,
        window: int,
        scale: float,
        whole: Attend,
    ) -> Tensor:
        q, k, v = (x.to(v_BtKE.dtype).transpose(1, 2) for x in (q_BtND, k_BtKD, v_BtKE))
        out_BNtE: Tensor = _Merged.apply(q, k, v, self, sight, window, scale)
        return out_BNtE.transpose(1, 2)

    def tiles(self, sight: AttentionMask, window: int, length: int, source: int) -> Iterator[Tile]:
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

    def _narrow_tiles(self, sight: AttentionMask, window: int, length: int, source: int) -> Iterator[Tile]:
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


def _mask(tile: Tile, sight: AttentionMask, window: int, device: torch.device) -> Tensor | None:
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
        ctx: Any,
        q_BNtD: Tensor,
        k_BKtD: Tensor,
        v_BKtE: Tensor,
        ring: Ring,
        sight: AttentionMask,
        window: int,
        scale: float,
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
