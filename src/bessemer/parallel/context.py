"""Context parallelism: ranks share the columns of rows. There are two methods.

Ulysses (DeepSpeed): around attention, ranks exchange some columns of all heads for all columns of some heads. Attention
itself is unchanged: masks, windows and packed documents work as usual.

Ring attention (Liu et al. 2023): keys and values travel around the ranks while each attends with its own queries to the
block that it holds; blocks are merged by their log-sum-exp. The number of heads is no limit. Each of n ranks holds T /
n columns of queries, keys and values, one block in transit and, in the backward pass, their gradients; masks are built
for a strip of queries at a time. Each block visits every rank in each pass, whatever a window hides: keys and values n
- 1 times forward and backward, their float32 gradients n times. A row is split into 2n pieces, and rank r holds pieces
r and 2n - 1 - r, so that all ranks have equal work under causality.

Block attention calls `aten` operators, since `scaled_dot_product_attention` does not return the log-sum-exp. Legend: B
rows, T columns of a row, t those of this rank (queries of a block), s keys of a block, N and K heads, n those of this
rank, D head size, E value size.
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


def _all_to_all(x: Tensor, group: Any, to_heads: bool) -> Tensor:
    """(B, t, N, D) -> (B, T, n, D), or back."""
    split, joined = (2, 1) if to_heads else (1, 2)  # heads or columns
    parts = x.unflatten(split, (dist.get_world_size(group), -1)).movedim(split, 0).contiguous()  # (size, B, t, n, D)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)


class _AllToAll(torch.autograd.Function):
    """Its gradient is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _all_to_all(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _all_to_all(grad, ctx.group, not ctx.to_heads), None, None


@dataclass(frozen=True)
class UlyssesAttention:
    """Ulysses: this rank's columns of every row, and the exchange with the other ranks."""

    group: Any
    rank: int
    size: int

    def pieces(self, length: int, rank: int) -> tuple[range, ...]:
        """The contiguous column ranges of a rank, of a row of this length."""
        share = length // self.size
        return (range(rank * share, (rank + 1) * share),)

    def part(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """This rank's columns, of a row of this length."""
        return _column_indices(self.pieces(length, self.rank), str(device))

    def whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """(B, T) from the (B, t) of all ranks."""
        joined = np.concatenate(parts, axis=1)
        order = [i for rank in range(self.size) for piece in self.pieces(joined.shape[1], rank) for i in piece]
        rows = np.empty_like(joined)
        rows[:, order] = joined
        return rows

    def attend(
        self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor, attention_mask: AttentionMask, window: int, scale: float,
        attend_full_rows: Attend,
    ) -> Tensor:  # fmt: skip
        """(B, t, N, E): this rank's columns of full-row attention, computed for some of the heads."""
        return self.columns(attend_full_rows(*self.heads(q_BtND, k_BtKD, v_BtKE)))

    def heads(self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All columns of some heads. If there are fewer key-value heads than ranks, they are repeated."""
        copies = self.size // gcd(k_BtKD.shape[2], self.size)
        if copies > 1:
            k_BtKD, v_BtKE = (x.repeat_interleave(copies, dim=2) for x in (k_BtKD, v_BtKE))
        q, k, v = (_AllToAll.apply(x, self.group, True) for x in (q_BtND, k_BtKD, v_BtKE))
        return q, k, v

    def columns(self, out_BTnE: Tensor) -> Tensor:
        """Back to some columns of all heads."""
        out: Tensor = _AllToAll.apply(out_BTnE, self.group, False)
        return out


@cache
def _column_indices(pieces: tuple[range, ...], device: str) -> Tensor:
    """Copied to a device once for all batches."""
    return torch.tensor([i for piece in pieces for i in piece], device=device)


aten = torch.ops.aten
ALIGNED = 32  # row alignment of the efficient kernel's log-sum-exp; its bias needs 8


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def select_kernel(q_BNtD: Tensor, v_BKsE: Tensor, masked: bool) -> str:
    """The supported kernel: cpu, flash, efficient or plain. The last builds logits of B * N * t * s numbers."""
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
    """(B, N, t, E) and the log-sum-exp (B, N, t): 0 and -inf for queries without visible keys."""
    name = select_kernel(q_BNtD, v_BKsE, mask_B1ts is not None) if chosen == "auto" else chosen
    k, v = _repeat_heads(q_BNtD, k_BKsD), _repeat_heads(q_BNtD, v_BKsE)
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
    if mask_B1ts is not None:  # kernels disagree on rows without keys
        has_keys_B1t = mask_B1ts.any(dim=-1)
        out, lse = out.where(has_keys_B1t[..., None], 0), lse.where(has_keys_B1t, float("-inf"))
    return out, lse


def block_gradients(
    grad_BNtE: Tensor, q_BNtD: Tensor, k_BKsD: Tensor, v_BKsE: Tensor, out_BNtE: Tensor, lse_BNt: Tensor,
    mask_B1ts: Tensor | None, causal: bool, scale: float, chosen: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v through this block. `out` and `lse` are those of all blocks together: attention weights
    are exp(logit - lse) in every block."""
    name = select_kernel(q_BNtD, v_BKsE, mask_B1ts is not None) if chosen == "auto" else chosen
    k, v = _repeat_heads(q_BNtD, k_BKsD), _repeat_heads(q_BNtD, v_BKsE)
    bias = None if mask_B1ts is None else _bias(mask_B1ts, q_BNtD)
    lse = lse_BNt.contiguous()
    if name == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BNtE, q_BNtD, k, v, out_BNtE, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif name == "flash":
        unused = torch.zeros((), dtype=torch.int64, device=q_BNtD.device)  # dropout state
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_BNtE, q_BNtD, k, v, out_BNtE, lse, None, None, q_BNtD.shape[2], k.shape[2], 0.0, causal, unused,
            unused, scale=scale,
        )  # fmt: skip
    elif name == "efficient":
        unused = torch.zeros((), dtype=torch.int64, device=q_BNtD.device)
        lse = F.pad(lse, (0, -lse.shape[-1] % ALIGNED), value=float("inf"))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad_BNtE, q_BNtD, k, v, bias, out_BNtE, lse, unused, unused, 0.0, (True, True, True, False), causal,
            scale=scale,
        )  # fmt: skip
    else:
        dtype = sum_dtype(q_BNtD.dtype)
        probs = torch.exp(_logits(q_BNtD, k, bias, causal, scale) - lse[..., None])
        grad = grad_BNtE.to(dtype)
        mean = (grad * out_BNtE.to(dtype)).sum(dim=-1, keepdim=True)
        inner = probs * (_product(grad, v.transpose(-1, -2)) - mean) * scale
        grads = _product(inner, k), _product(inner.transpose(-1, -2), q_BNtD), _product(probs.transpose(-1, -2), grad)
    dq, dk, dv = grads[:3]
    return dq, _sum_groups(dk, k_BKsD), _sum_groups(dv, v_BKsE)


def _repeat_heads(q_BNtD: Tensor, x_BKsD: Tensor) -> Tensor:
    """Repeat key-value heads for each of their query heads."""
    groups = q_BNtD.shape[1] // x_BKsD.shape[1]
    return x_BKsD if groups == 1 else x_BKsD.repeat_interleave(groups, dim=1)


def _sum_groups(grad_BNsD: Tensor, like_BKsD: Tensor) -> Tensor:
    """The reverse, summed in at least float32."""
    grad = grad_BNsD.to(sum_dtype(like_BKsD.dtype))
    return grad.unflatten(1, (like_BKsD.shape[1], -1)).sum(dim=2)


def _bias(mask_B1ts: Tensor, q_BNtD: Tensor) -> Tensor:
    """0 or -inf for all heads. On a GPU rows are aligned to 32 numbers, as the kernel requires."""
    (B, N), (t, s) = q_BNtD.shape[:2], mask_B1ts.shape[-2:]
    padded = s if q_BNtD.device.type == "cpu" else -(-s // ALIGNED) * ALIGNED
    bias = q_BNtD.new_zeros(len(mask_B1ts), 1, t, padded)[..., :s].masked_fill_(~mask_B1ts, float("-inf"))
    return bias.expand(B, N, t, s)


def _logits(q_BNtD: Tensor, k_BNsD: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    logits = _product(q_BNtD, k_BNsD.transpose(-1, -2)) * scale
    if causal:
        t, s = logits.shape[-2:]
        logits = logits.masked_fill(~torch.ones(t, s, dtype=torch.bool, device=logits.device).tril(), float("-inf"))
    return logits if bias is None else logits + bias


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = sum_dtype(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)


STRIP = 512  # queries per mask
ALL = slice(None)


@dataclass(frozen=True)
class Tile:
    """Some of this rank's queries and some keys of a block. The queries see all of them, those not ahead (`causal`), or
    what the mask of the columns in `masked` allows."""

    queries: slice
    keys: slice
    causal: bool = False
    masked: tuple[range, range] | None = None


@dataclass(frozen=True)
class RingAttention(UlyssesAttention):
    """Ring attention: each rank exchanges blocks with its neighbours."""

    strip: int = STRIP

    def pieces(self, length: int, rank: int) -> tuple[range, ...]:
        size = length // (2 * self.size)
        return tuple(range(i * size, (i + 1) * size) for i in (rank, 2 * self.size - 1 - rank))

    def attend(
        self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor, attention_mask: AttentionMask, window: int, scale: float,
        attend_full_rows: Attend,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x.to(v_BtKE.dtype).transpose(1, 2) for x in (q_BtND, k_BtKD, v_BtKE))
        out_BNtE: Tensor = _RingAttention.apply(q, k, v, self, attention_mask, window, scale)
        return out_BNtE.transpose(1, 2)

    def tiles(self, attention_mask: AttentionMask, window: int, length: int, source: int) -> Iterator[Tile]:
        """The work with the block of rank `source`. In the rank's own block, each query's diagonal tile comes first:
        from then on its log-sum-exp is finite."""
        assert attention_mask.causal and attention_mask.prefix_BT is None, "the plan uses rings only for causal rows"
        if not attention_mask.plain(window, length):
            yield from self._masked_tiles(attention_mask, window if window < length else 0, length, source)
        elif source == self.rank:
            yield Tile(ALL, ALL, causal=True)
        elif source < self.rank:  # its late piece comes after both of ours
            yield Tile(ALL, slice(0, length // (2 * self.size)))
        else:  # both of its pieces lie between ours
            yield Tile(slice(length // (2 * self.size), None), ALL)

    def _masked_tiles(self, attention_mask: AttentionMask, window: int, length: int, source: int) -> Iterator[Tile]:
        """Strip by strip, from the first key that any of its rows sees; with short documents most tiles are skipped."""
        earliest, latest = attention_mask.document_starts(length)
        size = length // (2 * self.size)
        for i, query_piece in enumerate(self.pieces(length, self.rank)):
            for first in query_piece[:: self.strip]:
                queries = range(first, min(first + self.strip, query_piece.stop))
                low = max(earliest[first], first - window + 1 if window and not attention_mask.has_global else 0)
                for j, key_piece in reversed(list(enumerate(self.pieces(length, source)))):
                    keys = range(max(key_piece.start, low), min(key_piece.stop, queries.stop))
                    if not keys:
                        continue
                    in_window = not window or queries[-1] - keys.start < window
                    same_document = latest[queries[-1]] <= keys.start
                    all_visible = keys[-1] <= first and same_document and in_window and not attention_mask.blocks[0]
                    yield Tile(
                        _shift(queries, i * size - query_piece.start), _shift(keys, j * size - key_piece.start),
                        masked=None if all_visible else (queries, keys),
                    )  # fmt: skip

    def pass_on(self, tensors: tuple[Tensor, ...], tag: int) -> Callable[[], tuple[Tensor, ...]]:
        """Start sending tensors to the next rank and receiving those of the previous one; returns a function that waits
        for both. All ranks call this in the same order; `tag` distinguishes concurrent transfers."""
        received = tuple(torch.empty_like(x) for x in tensors)
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [
            dist.P2POp(move, x, group=self.group, group_peer=peer, tag=len(tensors) * tag + i)
            for move, peer, some in ((dist.isend, following, tensors), (dist.irecv, previous, received))
            for i, x in enumerate(some)
        ]
        pending = dist.batch_isend_irecv(moves)

        def wait() -> tuple[Tensor, ...]:
            for work in pending:
                work.wait()
            return received

        return wait


def _shift(columns: range, offset: int) -> slice:
    return slice(columns.start + offset, columns.stop + offset)


def _tile_mask(tile: Tile, attention_mask: AttentionMask, window: int, device: torch.device) -> Tensor | None:
    """(B or 1, 1, queries, keys), True where a query may attend."""
    if tile.masked is None:
        return None
    q_t1, k_s = (torch.arange(x.start, x.stop, device=device) for x in tile.masked)
    rows = attention_mask.rows
    b_B111 = torch.arange(rows, device=device)[:, None, None, None]
    return attention_mask.can_attend(window)(b_B111, 0, q_t1[:, None], k_s).expand(rows, 1, len(q_t1), len(k_s))


class _RingAttention(torch.autograd.Function):
    """Attention over all blocks. In the backward pass keys and values travel again, followed by the sums of their
    gradients, until those arrive at their owner."""

    @staticmethod
    def forward(
        ctx: Any, q_BNtD: Tensor, k_BKtD: Tensor, v_BKtE: Tensor, ring: RingAttention, attention_mask: AttentionMask,
        window: int, scale: float,
    ) -> Tensor:  # fmt: skip
        B, N, t, _ = q_BNtD.shape
        dtype = sum_dtype(v_BKtE.dtype)
        out = q_BNtD.new_zeros(B, N, t, v_BKtE.shape[-1], dtype=dtype)
        lse = q_BNtD.new_full((B, N, t), float("-inf"), dtype=dtype)
        local_kv = block = k_BKtD.contiguous(), v_BKtE.contiguous()
        for hop in range(ring.size):
            receive = ring.pass_on(block, 0) if hop + 1 < ring.size else None
            k, v = block
            for tile in ring.tiles(attention_mask, window, t * ring.size, (ring.rank - hop) % ring.size):
                q_slice, k_slice = tile.queries, tile.keys
                mask = _tile_mask(tile, attention_mask, window, q_BNtD.device)
                block_kv = k[:, :, k_slice], v[:, :, k_slice]
                new, new_lse = attend_block(q_BNtD[:, :, q_slice], *block_kv, mask, tile.causal, scale)
                total_lse = torch.logaddexp(lse[:, :, q_slice], new_lse)
                old_share, new_share = ((x - total_lse).exp()[..., None] for x in (lse[:, :, q_slice], new_lse))
                out[:, :, q_slice] = out[:, :, q_slice] * old_share + new * new_share
                lse[:, :, q_slice] = total_lse
            block = receive() if receive else block  # type: ignore[assignment]
        out = out.to(v_BKtE.dtype)
        ctx.save_for_backward(q_BNtD, *local_kv, out, lse)
        ctx.settings = ring, attention_mask, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_BNtE: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, local_k, local_v, out, lse = ctx.saved_tensors
        ring, attention_mask, window, scale = ctx.settings
        dtype, t = lse.dtype, q.shape[2]
        grad_q, block, receive_sums = torch.zeros_like(q, dtype=dtype), (local_k, local_v), None
        for hop in range(ring.size):
            receive = ring.pass_on(block, 0) if hop + 1 < ring.size else None
            k, v = block
            sums = tuple(torch.zeros_like(x, dtype=dtype) for x in block)
            for tile in ring.tiles(attention_mask, window, t * ring.size, (ring.rank - hop) % ring.size):
                q_slice, k_slice = tile.queries, tile.keys
                grads = block_gradients(
                    grad_BNtE[:, :, q_slice], q[:, :, q_slice], k[:, :, k_slice], v[:, :, k_slice],
                    out[:, :, q_slice], lse[:, :, q_slice],
                    _tile_mask(tile, attention_mask, window, q.device), tile.causal, scale,
                )  # fmt: skip
                for total, part in zip((grad_q[:, :, q_slice], *(x[:, :, k_slice] for x in sums)), grads, strict=True):
                    total += part
            if receive_sums:
                for total, received in zip(sums, receive_sums(), strict=True):
                    total += received
            receive_sums = ring.pass_on(sums, 1)
            block = receive() if receive else block
        assert receive_sums is not None
        result = (x.to(q.dtype) for x in (grad_q, *receive_sums()))
        return *result, None, None, None, None
