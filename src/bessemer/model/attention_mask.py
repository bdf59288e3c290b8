"""Which positions may look at which: inside their document, not ahead, not beyond a window.

One `AttentionMask` describes a batch and serves every layer; what a backend needs is made once for each window and
kept. Legend: B rows, T queries, S keys (the queries are the last T of them), n tiles of TILE positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

TILE = 128  # FlexAttention's block
Rule = Callable[[Any, Any, Any, Any], Tensor]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k and v of whole rows


class Exchange(Protocol):
    """Of processes that share the columns of rows: which are this one's, and how it attends to all of them. `whole` is
    attention as it is without the others."""

    @property
    def size(self) -> int: ...
    def part(self, length: int, device: torch.device | str = "cpu") -> Tensor: ...
    def attend(
        self,
        q_BtND: Tensor,
        k_BtKD: Tensor,
        v_BtKE: Tensor,
        sight: AttentionMask,
        window: int,
        scale: float,
        whole: Attend,
    ) -> Tensor: ...


@dataclass
class AttentionMask:
    """Of one batch. Without documents a row is one document; `prefix_BT` marks positions that all of their document
    may see, whether ahead or not (prefix-LM). Numbers of documents do not come back in a row."""

    documents_BT: Tensor | None = None
    prefix_BT: Tensor | None = None
    causal: bool = True
    blocks: tuple[int, int] = (0, 0)
    counted_BT: Tensor | None = None  # positions that routers balance over; None: all
    borders: tuple[Tensor, int] | None = None  # `document_borders`, where the host knows them
    exchange: Exchange | None = None  # where processes share rows; documents are of whole rows all the same
    _masks: dict[tuple[int, int, int], Tensor | None] = field(default_factory=dict)
    _tiles: dict[tuple[int, int], Any] = field(default_factory=dict)
    _begins: tuple[list[int], list[int]] | None = None

    def plain(self, window: int, length: int) -> bool:
        """Nothing but causality, or nothing at all: what fused kernels do without a mask."""
        narrow = (window and window < length) or self.blocks[0]
        return self.documents_BT is None and self.prefix_BT is None and not narrow

    def sees(self, window: int) -> Rule:
        """(row, head, query, key) -> may it look? Of positions that broadcast; every mask comes from this."""
        causal, documents_BT, prefix_BT, (size, before) = self.causal, self.documents_BT, self.prefix_BT, self.blocks

        def rule(b: Any, h: Any, q: Any, k: Any) -> Tensor:
            seen = k <= q if causal else (k >= 0) & (q >= 0)
            if causal and prefix_BT is not None:
                seen = seen | prefix_BT[b, k]
            if window:
                seen = seen & (q - k < window) & (k - q < window)
            if size:  # the first block stays in sight of all
                apart = q // size - k // size
                seen = seen & (((apart <= before) & (apart >= -before)) | (k < size))
            if documents_BT is not None:
                seen = seen & (documents_BT[b, q] == documents_BT[b, k])
            return seen

        return rule

    def mask(self, window: int, T: int, S: int, device: torch.device) -> Tensor | None:
        """(B or 1, 1, T, S), True where a query may look; None if everywhere. A gigabyte a row at 32K tokens: `tiles`
        and `document_borders` serve longer rows."""
        if not self.causal and self.plain(window, S):
            return None
        assert T == S or self.documents_BT is None, "generation has one document"
        key = (window if window < S else 0, T, S)
        if key not in self._masks:
            given = self.documents_BT if self.documents_BT is not None else self.prefix_BT
            b_B111 = torch.arange(1 if given is None else len(given), device=device)[:, None, None, None]
            q_T1, k_S = torch.arange(S - T, S, device=device)[:, None], torch.arange(S, device=device)
            self._masks[key] = self.sees(key[0])(b_B111, 0, q_T1, k_S).expand(len(b_B111), 1, T, S)
        return self._masks[key]

    def tiles(self, window: int, T: int, device: torch.device) -> Any:
        """FlexAttention's BlockMask. From the borders of tiles, in (T / 128)^2 steps: torch's own way looks at all T^2
        pairs. A tile with nothing to see may be listed, where the rule hides all of it: slower, not wrong."""
        from torch.nn.attention.flex_attention import BlockMask

        key = (window if window < T else 0, T)
        if key not in self._tiles:
            some_Bnn, every_Bnn = self._tile_sight(*key, device)
            partly, wholly = (_listed(x) for x in (some_Bnn & ~every_Bnn, every_Bnn))
            self._tiles[key] = BlockMask.from_kv_blocks(
                *partly, *wholly, BLOCK_SIZE=TILE, mask_mod=self.sees(key[0]), seq_lengths=(T, T)
            )
        return self._tiles[key]

    def _tile_sight(self, window: int, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B or 1, n, n) twice: whether a tile of queries may see some, and whether it sees all of a tile of keys."""
        k0_n = torch.arange(0, T, TILE, device=device)
        q0_n1 = k0_n[:, None]
        k1_n, q1_n1 = k0_n + TILE - 1, q0_n1 + TILE - 1
        some_Bnn = every_Bnn = torch.ones(1, len(k0_n), len(k0_n), dtype=torch.bool, device=device)
        if self.causal:
            some_Bnn, every_Bnn = (k0_n <= q1_n1)[None], (k1_n <= q0_n1)[None]
            if self.prefix_BT is not None:
                prefix_B1nt = self.prefix_BT.bool().unflatten(1, (-1, TILE))[:, None]
                some_Bnn, every_Bnn = some_Bnn | prefix_B1nt.any(-1), every_Bnn | prefix_B1nt.all(-1)
        if window:
            near, far = _apart(q0_n1, q1_n1, k0_n, k1_n)
            some_Bnn, every_Bnn = some_Bnn & (near < window), every_Bnn & (far < window)
        size, before = self.blocks
        if size:
            near, far = _apart(*(x // size for x in (q0_n1, q1_n1, k0_n, k1_n)))
            some_Bnn = some_Bnn & ((near <= before) | (k0_n < size))
            every_Bnn = every_Bnn & ((far <= before) | (k1_n < size))
        if self.documents_BT is not None:
            low_Bn, high_Bn = self.documents_BT.unflatten(1, (-1, TILE)).aminmax(dim=-1)
            some_Bnn = some_Bnn & (low_Bn[:, :, None] <= high_Bn[:, None]) & (low_Bn[:, None] <= high_Bn[:, :, None])
            every_Bnn = every_Bnn & (low_Bn[:, :, None] == high_Bn[:, None]) & (low_Bn[:, None] == high_Bn[:, :, None])
        return some_Bnn, every_Bnn

    def lengths(self, B: int, T: int, device: torch.device) -> tuple[Tensor, int]:
        """`document_borders` on the device. Made there they are read back once a batch, and the host waits."""
        if self.borders is None:
            rows_BT = torch.zeros(B, T, dtype=torch.int32) if self.documents_BT is None else self.documents_BT
            self.borders = document_borders(rows_BT)
        if self.borders[0].device != device:
            self.borders = self.borders[0].to(device, non_blocking=True), self.borders[1]
        return self.borders

    def begins(self, T: int) -> tuple[list[int], list[int]]:
        """Where the document of each column begins, in the row where that is earliest and in the one where it is
        latest. For the host, which waits for a device if it does not know the borders."""
        if self.documents_BT is None:
            return [0] * T, [0] * T
        if self._begins is None:
            borders = (self.borders or document_borders(self.documents_BT))[0].cpu().long()
            begins_BT = (borders[:-1] % T).repeat_interleave(borders.diff()).view(-1, T)
            low_T, high_T = begins_BT.aminmax(dim=0)
            self._begins = low_T.tolist(), high_T.tolist()
        return self._begins

    def reach(self, start: int, T: int) -> int:
        """How many columns rows have, of which `start` came before these T; with those of other processes."""
        return start + T * (self.exchange.size if self.exchange else 1)

    def columns(self, start: int, T: int, device: torch.device) -> slice | Tensor:
        """Which columns of their rows these T are."""
        return slice(start, start + T) if self.exchange is None else self.exchange.part(self.reach(start, T), device)

    def positions(self, start: int, T: int, device: torch.device) -> Tensor:
        """(B or 1, T): each position counted from the beginning of its document."""
        S = self.reach(start, T) if self.documents_BT is None else self.documents_BT.shape[1]
        places = torch.arange(S, device=device)[None]
        if self.documents_BT is not None:
            places = places - torch.where(_fresh(self.documents_BT), places, 0).cummax(dim=1).values
        return places[:, self.columns(start, T, device)]


def document_borders(documents_BT: Tensor) -> tuple[Tensor, int]:
    """Where each document begins, the rows laid end to end, and where the last one ends (int32); the longest's length.
    Call it on the host's copy: on a device it waits for everything queued before."""
    begins = _fresh(documents_BT).flatten().nonzero().flatten()
    borders = torch.cat((begins, begins.new_tensor([documents_BT.numel()])))
    return borders.int(), int(borders.diff().max())


def _fresh(documents_BT: Tensor) -> Tensor:
    """True where a document begins."""
    fresh_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    fresh_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return fresh_BT


def _apart(q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest distance between two ranges, their ends among them."""
    return torch.maximum(q0 - k1, k0 - q1).clamp(min=0), torch.maximum(q1 - k0, k1 - q0)


def _listed(seen_Bnn: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each tile of queries looks at, and which: as FlexAttention wants them, with one head for all."""
    order_Bnn = seen_Bnn.int().argsort(dim=-1, descending=True, stable=True)
    return seen_Bnn.sum(-1).int()[:, None], order_Bnn.int()[:, None].contiguous()
