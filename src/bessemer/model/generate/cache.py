"""Key-value caches of many requests: each request owns a slot, one row of every layer's cache.

A `SlotBatch` says which slots and positions a forward pass writes and reads; all layers share it. A slot keeps its
contents after its request has ended, until another one takes it: a later prompt with the same beginning reuses them.
Legend: B rows of a pass, T its positions, S keys, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bessemer.model.attention import LayerCache
from bessemer.model.encoder_decoder import CrossBlock, CrossCache, EncoderDecoder
from bessemer.model.mamba import MambaCache
from bessemer.model.transformer import Decoder

Rows = slice | Tensor  # a slice is a view of the cache, a tensor of slot numbers copies


@dataclass
class SlotBatch:
    """The slots of one forward pass, set before it."""

    slots: int  # besides these there is one more row, which padding rows write to
    capacity: int  # most positions of a slot
    allocated: int = 0  # positions that the caches have room for now
    rows: Rows = field(default_factory=lambda: slice(0, 1))  # which slots are read
    slots_BT: Tensor | None = None  # where each new token is written: its slot and its position there
    positions_BT: Tensor | None = None
    start: int = 0  # position of the first new token, if all rows share it
    fresh: bool = False  # nothing is cached before these tokens: the pass attends to its own keys alone
    direct: bool = False  # the attention kernel finds the slots itself, so layers pass it the complete cache
    reach: int = 0  # keys that are read of each slot

    @property
    def null_slot(self) -> int:
        return self.slots

    def allocate(self, positions: int) -> None:
        """Make room for this many positions, in powers of two. The caches grow at their next use."""
        if positions > self.allocated:
            self.allocated = min(self.capacity, 1 << max(positions - 1, 63).bit_length())


def grow(tensor: Tensor | None, rows: int, size: int, like: Tensor) -> Tensor:
    """A tensor of (rows, size, ...) that begins with the contents of a smaller one."""
    grown = like.new_zeros((rows, size, *like.shape[2:]))
    if tensor is not None:
        grown[:, : tensor.shape[1]] = tensor
    return grown


class SlotKV(LayerCache):
    """Keys and values of one attention layer."""

    def __init__(self, batch: SlotBatch) -> None:
        self.keys = self.values = None
        self.batch = batch

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.batch.start

    def extend(self, k_BTKD: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        batch = self.batch
        if self.keys is None or self.values is None or self.keys.shape[1] < batch.allocated:
            self.keys = grow(self.keys, batch.slots + 1, batch.allocated, k_BTKD)
            self.values = grow(self.values, batch.slots + 1, batch.allocated, v_BTKE)
        self.keys[batch.slots_BT, batch.positions_BT] = k_BTKD
        self.values[batch.slots_BT, batch.positions_BT] = v_BTKE
        if batch.fresh:
            return k_BTKD, v_BTKE
        if batch.direct:
            return self.keys, self.values
        return self.keys[batch.rows, : batch.reach], self.values[batch.rows, : batch.reach]

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.keys, self.values) if x is not None]


class SlotState(MambaCache):
    """The convolution's history and the state of one Mamba layer. A slot that starts at 0 has neither."""

    def __init__(self, batch: SlotBatch) -> None:
        self.batch = batch
        self.slot_tensors: dict[str, Tensor] = {}

    def _get(self, name: str) -> Tensor | None:
        if self.batch.fresh or name not in self.slot_tensors:
            return None
        return self.slot_tensors[name][self.batch.rows]

    def _set(self, name: str, value: Tensor | None) -> None:
        if value is None:
            return
        if name not in self.slot_tensors:
            self.slot_tensors[name] = value.new_zeros((self.batch.slots + 1, *value.shape[1:]))
        self.slot_tensors[name][self.batch.rows] = value

    @property
    def history_BKX(self) -> Tensor | None:  # type: ignore[override]  # noqa: N802
        return self._get("history")

    @history_BKX.setter
    def history_BKX(self, value: Tensor | None) -> None:  # noqa: N802
        self._set("history", value)

    @property
    def state_BGRPN(self) -> Tensor | None:  # type: ignore[override]  # noqa: N802
        return self._get("state")

    @state_BGRPN.setter
    def state_BGRPN(self, value: Tensor | None) -> None:  # noqa: N802
        self._set("state", value)

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.batch.start

    @length.setter
    def length(self, value: int) -> None:
        pass  # the batch knows it

    def tensors(self) -> list[Tensor]:
        return list(self.slot_tensors.values())


class SlotCross(SlotKV, CrossCache):
    """A decoder layer's own cache, and the keys and values of the encoded prompts, padded to the longest."""

    def __init__(self, batch: SlotBatch) -> None:
        SlotKV.__init__(self, batch)
        self.encoded: list[Tensor] = []  # keys and values, (slots, S, K, D)
        self.readable: Tensor | None = None  # (slots, S)

    def store(self, slot: int, kv_BKSD: tuple[Tensor, Tensor]) -> None:
        """Store the encoder's keys and values of one prompt."""
        k_BSKD, v_BSKD = (x.transpose(1, 2) for x in kv_BKSD)
        rows, length = self.batch.slots + 1, k_BSKD.shape[1]
        if self.readable is None or self.readable.shape[1] < length:
            size = 1 << max(length - 1, 15).bit_length()
            before = self.encoded or (None, None)
            self.encoded = [grow(x, rows, size, like) for x, like in zip(before, (k_BSKD, v_BSKD), strict=True)]
            self.readable = grow(self.readable, rows, size, torch.ones(1, 1, dtype=torch.bool, device=k_BSKD.device))
        for stored, x in zip(self.encoded, (k_BSKD, v_BSKD), strict=True):
            stored[slot, :length] = x[0]
        self.readable[slot] = torch.arange(self.readable.shape[1], device=self.readable.device) < length

    @property
    def encoded_BKSD(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # noqa: N802
        k, v = (x[self.batch.rows].transpose(1, 2) for x in self.encoded)
        return k, v

    @property
    def mask_B1TS(self) -> Tensor | None:  # type: ignore[override]  # noqa: N802
        assert self.readable is not None
        return self.readable[self.batch.rows][:, None, None]

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.encoded, *([] if self.readable is None else [self.readable])]


class SlotCaches:
    """The caches of all layers of a model."""

    def __init__(self, model: Decoder, batch: SlotBatch) -> None:
        self.layers: list[Any] = []
        for block in model.blocks:
            if isinstance(model, EncoderDecoder) and not isinstance(block, CrossBlock):
                continue  # the encoder caches nothing
            kind = SlotCross if isinstance(block, CrossBlock) else SlotKV if block.has_attention else SlotState
            self.layers.append(kind(batch))
        self.has_states = any(isinstance(layer, SlotState) for layer in self.layers)  # cannot be cut to a prefix

    @property
    def allocated(self) -> int:
        """Positions that the caches have room for already."""
        return min((len(layer.keys[0]) if layer.keys is not None else 0) for layer in self.layers)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Copy a slot, or its first `length` positions."""
        for layer in self.layers:
            for tensor in layer.tensors():
                cut = slice(length) if length is not None and type(layer) is SlotKV else slice(None)
                tensor[target, cut] = tensor[source, cut]
