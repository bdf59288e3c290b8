"""Which positions may attend to which: within their document, not ahead of themselves, not beyond a window. A document
may have branches: continuations of one prefix that do not see each other, such as the two answers of a preference pair.
A row may also hold a prefix tree: texts in which every common beginning stands once (`until_BT` and `depth_BT`).

One `AttentionMask` describes a batch and serves every layer. What a backend needs (dense mask, FlexAttention block
mask, cu_seqlens) is built once per window and cached. Legend: B rows, T queries, S keys (the queries are the last T of
them), n tiles of TILE positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bessemer.spec.shape import ModelShape

TILE = 128  # FlexAttention's block
MaskFunction = Callable[[Any, Any, Any, Any], Tensor]  # (row, head, query, key) -> bool
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k and v of full rows


class ContextExchange(Protocol):
    """Context parallelism as the model sees it: which columns of a row this rank holds, and attention over all of them.
    `attend_full_rows` is the attention of a single rank."""

    @property
    def size(self) -> int: ...
    def part(self, length: int, device: torch.device | str = "cpu") -> Tensor: ...
    def attend(
        self, q_BtND: Tensor, k_BtKD: Tensor, v_BtKE: Tensor, attention_mask: AttentionMask, window: int, scale: float,
        attend_full_rows: Attend,
    ) -> Tensor: ...  # fmt: skip


@dataclass
class AttentionMask:
    """The mask of one batch. Without documents, a row is one document. `prefix_BT` marks positions that their whole
    document may attend to, ahead or not (prefix-LM). A document's number occurs only once in a row."""

    documents_BT: Tensor | None = None
    prefix_BT: Tensor | None = None
    causal: bool = True
    blocks: tuple[int, int] = (0, 0)
    global_tokens: int = 0  # the first positions of a document that windows and blocks do not limit (Longformer)
    global_BT: Tensor | None = None  # or these positions, of full rows; they attend and are attended to everywhere
    branches_BT: Tensor | None = None  # 0: the beginning of a document; each other number is a continuation of it
    until_BT: Tensor | None = None  # of a prefix tree in preorder: the column at which a position's continuations end
    depth_BT: Tensor | None = None  # with `until_BT`: each position's place in its text
    router_mask_BT: Tensor | None = None  # positions that count for router balance; None: all
    cu_seqlens: tuple[Tensor, int] | None = None  # from `compute_cu_seqlens`, if the host computed them
    exchange: ContextExchange | None = None  # context parallelism; `documents_BT` still covers full rows
    starts_B: Tensor | None = None  # generation: the position of each row's first query, if rows differ
    keys: int = 0  # generation, with `starts_B`: cached keys of each row
    slots_B: Tensor | None = None  # generation on a GPU: keys and values are the complete cache, and these its rows
    separate: bool = False  # generation: each document is cached alone, so its rotary positions start at 0
    backend: str | None = None  # generation: attention backend instead of the layers' own
    virtual: int = 0  # trained keys before every document, which are not columns; positions begin after them
    _masks: dict[tuple[int, int, int], Tensor | None] = field(default_factory=dict)
    _tiles: dict[tuple[int, int], Any] = field(default_factory=dict)
    _starts: tuple[list[int], list[int]] | None = None

    def configure(self, shape: ModelShape) -> None:
        """Take over what the model's shape says of masks."""
        self.causal, self.blocks, self.global_tokens = shape.causal, shape.blocks, shape.global_tokens

    def plain(self, window: int, length: int) -> bool:
        """Whether the mask is causality alone or nothing: fused kernels then need no mask tensor."""
        windowed = (window and window < length) or self.blocks[0]
        single = self.documents_BT is None and self.prefix_BT is None and self.branches_BT is None
        return single and self.until_BT is None and self.starts_B is None and not windowed

    @property
    def rows(self) -> int:
        """Rows that the mask distinguishes; 1 if it is the same for all."""
        masks = (self.documents_BT, self.prefix_BT, self.branches_BT, self.global_BT, self.until_BT)
        return next((len(x) for x in masks if x is not None), 1)

    def scattered(self, window: int, length: int) -> bool:
        """Whether document lengths and a window cannot express the mask."""
        limited = bool((window and window < length) or self.blocks[0])
        parted = self.prefix_BT is not None or self.branches_BT is not None or self.until_BT is not None
        return parted or self.blocks[0] > 0 or (limited and self.has_global)

    @property
    def has_global(self) -> bool:
        return self.global_tokens > 0 or self.global_BT is not None

    def is_global(self) -> Callable[[Any, Any], Tensor] | None:
        """Predicate over (row, position); None if no position is global."""
        if self.global_BT is None and self.global_tokens and self.documents_BT is not None:
            columns = torch.arange(self.documents_BT.shape[1], device=self.documents_BT.device)
            starts_BT = torch.where(_starts_document(self.documents_BT), columns, 0).cummax(dim=1).values
            self.global_BT = columns - starts_BT < self.global_tokens
        global_BT, count = self.global_BT, self.global_tokens
        if global_BT is not None:
            return lambda b, position: global_BT[b, position]
        return (lambda b, position: position < count) if count else None

    def can_attend(self, window: int) -> MaskFunction:
        """Predicate over broadcastable (row, head, query, key) indices. Every form of the mask derives from it."""
        is_global = self.is_global() if window or self.blocks[0] else None
        causal, documents_BT, prefix_BT, (size, before) = self.causal, self.documents_BT, self.prefix_BT, self.blocks
        branches_BT, until_BT, depth_BT = self.branches_BT, self.until_BT, self.depth_BT

        def can_attend(b: Any, h: Any, q: Any, k: Any) -> Tensor:
            visible = k <= q if causal else (k >= 0) & (q >= 0)
            if causal and prefix_BT is not None:
                visible = visible | prefix_BT[b, k]
            near = visible
            if window and depth_BT is not None:
                near = near & (depth_BT[b, q] - depth_BT[b, k] < window)
            elif window:
                near = near & (q - k < window) & (k - q < window)
            if size:  # every query sees the first block
                distance = q // size - k // size
                near = near & (((distance <= before) & (distance >= -before)) | (k < size))
            visible = near if is_global is None else near | (visible & (is_global(b, q) | is_global(b, k)))
            if documents_BT is not None:
                visible = visible & (documents_BT[b, q] == documents_BT[b, k])
            if branches_BT is not None:
                visible = visible & ((branches_BT[b, k] == 0) | (branches_BT[b, k] == branches_BT[b, q]))
            if until_BT is not None:
                visible = visible & (q < until_BT[b, k])
            return visible

        return can_attend

    def mask(self, window: int, T: int, S: int, device: torch.device) -> Tensor | None:
        """Dense mask (B or 1, 1, T, S), True where a query may attend; None if everywhere. At 32K tokens it takes a
        gigabyte per row; longer rows use `block_mask` or `cu_seqlens_on`."""
        if not self.causal and self.plain(window, S):
            return None
        assert T == S or self.documents_BT is None, "generation has one document"
        key = (window if window < S else 0, T, S)
        if key not in self._masks and self.starts_B is not None:
            q_B1T1 = (self.starts_B[:, None] + torch.arange(T, device=device))[:, None, :, None]
            self._masks[key] = self.can_attend(key[0])(0, 0, q_B1T1, torch.arange(S, device=device))
        if key not in self._masks:
            b_B111 = torch.arange(self.rows, device=device)[:, None, None, None]
            q_T1, k_S = torch.arange(S - T, S, device=device)[:, None], torch.arange(S, device=device)
            self._masks[key] = self.can_attend(key[0])(b_B111, 0, q_T1, k_S).expand(len(b_B111), 1, T, S)
        return self._masks[key]

    def block_mask(self, window: int, T: int, device: torch.device) -> Any:
        """FlexAttention's BlockMask, computed from tile borders in (T / 128)^2 steps; torch's own builder visits all
        T^2 pairs. A fully masked tile may be listed as partial, which is slower but correct."""
        from torch.nn.attention.flex_attention import BlockMask

        key = (window if window < T else 0, T)
        if key not in self._tiles:
            any_Bnn, all_Bnn = self._tile_visibility(*key, device)
            partial, full = (_to_kv_blocks(x) for x in (any_Bnn & ~all_Bnn, all_Bnn))
            self._tiles[key] = BlockMask.from_kv_blocks(
                *partial, *full, BLOCK_SIZE=TILE, mask_mod=self.can_attend(key[0]), seq_lengths=(T, T)
            )
        return self._tiles[key]

    def _tile_visibility(self, window: int, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two (B or 1, n, n) tensors: whether a query tile sees any position of a key tile, and whether it sees all."""
        k0_n = torch.arange(0, T, TILE, device=device)
        q0_n1 = k0_n[:, None]
        k1_n, q1_n1 = k0_n + TILE - 1, q0_n1 + TILE - 1
        any_Bnn = all_Bnn = torch.ones(1, len(k0_n), len(k0_n), dtype=torch.bool, device=device)
        if self.causal:
            any_Bnn, all_Bnn = (k0_n <= q1_n1)[None], (k1_n <= q0_n1)[None]
            if self.prefix_BT is not None:
                prefix_B1nt = self.prefix_BT.bool().unflatten(1, (-1, TILE))[:, None]
                any_Bnn, all_Bnn = any_Bnn | prefix_B1nt.any(-1), all_Bnn | prefix_B1nt.all(-1)
        causal_any, causal_all = any_Bnn, all_Bnn
        if window:
            near, far = _distance_range(q0_n1, q1_n1, k0_n, k1_n)
            # In a tree, positions are closer than their columns.
            reached = near < window if self.depth_BT is None else torch.ones_like(near, dtype=torch.bool)
            any_Bnn, all_Bnn = any_Bnn & reached, all_Bnn & (far < window)
        size, before = self.blocks
        if size:
            near, far = _distance_range(*(x // size for x in (q0_n1, q1_n1, k0_n, k1_n)))
            any_Bnn = any_Bnn & ((near <= before) | (k0_n < size))
            all_Bnn = all_Bnn & ((far <= before) | (k1_n < size))
        if (window or size) and (is_global := self.is_global()) is not None:
            rows = 1 if self.global_BT is None else len(self.global_BT)
            flags_Bnt = is_global(torch.arange(rows, device=device)[:, None], torch.arange(T, device=device)[None])
            flags_Bnt = flags_Bnt.expand(rows, T).unflatten(1, (-1, TILE))
            some_Bn, every_Bn = flags_Bnt.any(-1), flags_Bnt.all(-1)
            any_Bnn = any_Bnn | (causal_any & (some_Bn[:, :, None] | some_Bn[:, None]))
            all_Bnn = all_Bnn | (causal_all & (every_Bn[:, :, None] | every_Bn[:, None]))
        if self.documents_BT is not None:
            low_Bn, high_Bn = self.documents_BT.unflatten(1, (-1, TILE)).aminmax(dim=-1)
            any_Bnn = any_Bnn & (low_Bn[:, :, None] <= high_Bn[:, None]) & (low_Bn[:, None] <= high_Bn[:, :, None])
            all_Bnn = all_Bnn & (low_Bn[:, :, None] == high_Bn[:, None]) & (low_Bn[:, None] == high_Bn[:, :, None])
        if self.branches_BT is not None:
            low_Bn, high_Bn = self.branches_BT.unflatten(1, (-1, TILE)).aminmax(dim=-1)
            low_Bn1, high_Bn1, low_B1n, high_B1n = (
                low_Bn[..., None],
                high_Bn[..., None],
                low_Bn[:, None],
                high_Bn[:, None],
            )
            any_Bnn = any_Bnn & ((low_B1n == 0) | ((low_Bn1 <= high_B1n) & (low_B1n <= high_Bn1)))
            all_Bnn = all_Bnn & ((high_B1n == 0) | ((low_Bn1 == high_B1n) & (low_B1n == high_Bn1)))
        if self.until_BT is not None:
            first_Bn, last_Bn = self.until_BT.unflatten(1, (-1, TILE)).aminmax(dim=-1)
            any_Bnn, all_Bnn = any_Bnn & (last_Bn[:, None] > q0_n1), all_Bnn & (first_Bn[:, None] > q1_n1)
        return any_Bnn, all_Bnn

    def cu_seqlens_on(self, B: int, T: int, device: torch.device) -> tuple[Tensor, int]:
        """`compute_cu_seqlens` on the device. If computed there, the host waits for the device once per batch."""
        if self.cu_seqlens is None:
            rows_BT = torch.zeros(B, T, dtype=torch.int32) if self.documents_BT is None else self.documents_BT
            self.cu_seqlens = compute_cu_seqlens(rows_BT)
        if self.cu_seqlens[0].device != device:
            self.cu_seqlens = self.cu_seqlens[0].to(device, non_blocking=True), self.cu_seqlens[1]
        return self.cu_seqlens

    def document_starts(self, T: int) -> tuple[list[int], list[int]]:
        """For each column, where its document starts: the earliest and the latest over all rows. Waits for the device
        if the host does not know the borders."""
        if self.documents_BT is None:
            return [0] * T, [0] * T
        if self._starts is None:
            borders = (self.cu_seqlens or compute_cu_seqlens(self.documents_BT))[0].cpu().long()
            starts_BT = (borders[:-1] % T).repeat_interleave(borders.diff()).view(-1, T)
            low_T, high_T = starts_BT.aminmax(dim=0)
            self._starts = low_T.tolist(), high_T.tolist()
        return self._starts

    def row_length(self, start: int, T: int) -> int:
        """Columns of a full row: `start` cached ones and T new ones for every context-parallel rank."""
        if self.starts_B is not None:
            return self.keys
        return start + T * (self.exchange.size if self.exchange else 1)

    def local_columns(self, start: int, T: int, device: torch.device) -> slice | Tensor:
        """The columns of their rows that these T positions are."""
        return (
            slice(start, start + T) if self.exchange is None else self.exchange.part(self.row_length(start, T), device)
        )

    def rotary_columns(self, start: int, T: int, device: torch.device) -> slice | Tensor:
        """Rows of the rotary table for these T positions. In training only distances matter, and columns serve."""
        shifted = self.separate or self.branches_BT is not None or self.depth_BT is not None or self.virtual
        if self.starts_B is not None or shifted:
            return self.positions(start, T, device)
        return self.local_columns(start, T, device)

    def positions(self, start: int, T: int, device: torch.device) -> Tensor:
        """(B or 1, T): each position counted from the start of its document."""
        if self.starts_B is not None:
            return self.starts_B[:, None] + torch.arange(T, device=device) + self.virtual
        if self.depth_BT is not None:
            return self.depth_BT
        S = self.row_length(start, T) if self.documents_BT is None else self.documents_BT.shape[1]
        columns = positions = torch.arange(S, device=device)[None]
        if self.documents_BT is not None:
            starts = torch.where(_starts_document(self.documents_BT), columns, 0).cummax(dim=1).values
            positions = columns - starts
        if self.branches_BT is not None:  # each branch continues at the end of the document's beginning
            positions = positions - _branch_offsets(self.documents_BT, self.branches_BT, columns)
        return positions[:, self.local_columns(start, T, device)] + self.virtual

    def key_positions(self, S: int, device: torch.device) -> Tensor:
        """(B or 1, S): the positions of all keys."""
        return torch.arange(S, device=device)[None] if self.starts_B is not None else self.positions(0, S, device)


def compute_cu_seqlens(documents_BT: Tensor) -> tuple[Tensor, int]:
    """Cumulative document lengths over all rows (int32, FlashAttention's cu_seqlens) and the longest document. Call it
    on the host copy: on a device it waits for all queued work."""
    begins = _starts_document(documents_BT).flatten().nonzero().flatten()
    borders = torch.cat((begins, begins.new_tensor([documents_BT.numel()])))
    return borders.int(), int(borders.diff().max())


def _starts_document(documents_BT: Tensor) -> Tensor:
    """True where a document starts."""
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return starts_BT


def _branch_offsets(documents_BT: Tensor | None, branches_BT: Tensor, columns_1T: Tensor) -> Tensor:
    """(B, T): how many columns of other branches lie between a branch and the beginning that it continues."""
    borders_BT = (
        torch.zeros_like(branches_BT, dtype=torch.bool) if documents_BT is None else _starts_document(documents_BT)
    )
    borders_BT[:, 0] = True
    inside_BT = branches_BT > 0
    after_BT = torch.ones_like(inside_BT)
    after_BT[:, 1:] = ~inside_BT[:, :-1]
    first_BT = torch.where(inside_BT & (borders_BT | after_BT), columns_1T, 0).cummax(dim=1).values
    own_BT = torch.where(_starts_document(branches_BT) | borders_BT, columns_1T, 0).cummax(dim=1).values
    return torch.where(inside_BT, own_BT - first_BT, 0)


def _distance_range(q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest distance between two ranges, ends included."""
    return torch.maximum(q0 - k1, k0 - q1).clamp(min=0), torch.maximum(q1 - k0, k1 - q0)


def _to_kv_blocks(visible_Bnn: Tensor) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile visits, and which: FlexAttention's layout, one head for all."""
    order_Bnn = visible_Bnn.int().argsort(dim=-1, descending=True, stable=True)
    return visible_Bnn.sum(-1).int()[:, None], order_Bnn.int()[:, None].contiguous()
