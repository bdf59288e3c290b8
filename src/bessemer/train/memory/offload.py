"""Activations in the host's memory between forward and backward: `memory.offload_activations`.

What a block saves goes to page-locked buffers by a stream of its own while the next blocks run, and comes back one
block ahead of the backward pass. A block of 1B parameters saves 2.3 GiB for 32k tokens in 10 ms, in which PCIe 5 moves
half a GiB: this is for use with `activations: full`, where only the block's input travels, 128 MiB.
Nothing is reused before the streams have waited for each other, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LEAST_BYTES = 1 << 20  # below, a copy costs more than its room is worth


@dataclass
class OffloadedPiece:
    """One storage on its way out and back."""

    layer: Layer
    host: Tensor  # uint8
    device: Tensor | None  # uint8; kept until the copy out has ended, and again from the copy back on


@dataclass
class View:
    """How a saved tensor lies in its storage."""

    piece: OffloadedPiece
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Layer:
    """What one call of a block saved, by the address of the storage."""

    pieces: dict[int, OffloadedPiece] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None  # the last copy, out or back
    before: Layer | None = None  # in the same forward pass
    returned: bool = False
    views: int = 0  # given to autograd and not yet asked for


class Offload:
    """The hooks around a model's blocks. One for all of them, since a block is fetched during the one after it."""

    def __init__(self, model: nn.Module) -> None:
        parameter = next(model.parameters())
        self.device = parameter.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.kept = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.last: Layer | None = None
        self.free: dict[int, list[Tensor]] = {}  # host buffers by size, to be used again

    @contextmanager
    def layer(self, first: bool) -> Iterator[None]:
        """Around one block's forward pass, the model's `first` or a later one."""
        before = None if first else self.last
        if first and self.stream is not None:  # what the last pass fetched and did not use is on no way any more
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if before is not None and before.before is not None:
            self._let_go(before.before)
        self.last = layer = Layer(before=before)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._out(layer, tensor), self._back):
            yield
        if self.stream is not None:
            layer.copied = self.stream.record_event()

    def _let_go(self, layer: Layer) -> None:
        """The device's copies of a block two before: the compute stream waits for their way out, which is past."""
        if layer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(layer.copied)
        if not layer.returned:
            for piece in layer.pieces.values():
                piece.device = None

    def _out(self, layer: Layer, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        whole = 2 * tensor.numel() * tensor.element_size() >= size >= LEAST_BYTES
        if tensor.device != self.device or not whole or address in self.kept:
            return tensor
        if address not in layer.pieces:
            data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            waiting, pinned = self.free.get(size), self.stream is not None
            host = waiting.pop() if waiting else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._copy(host, data)
            layer.pieces[address] = OffloadedPiece(layer, host, data)
        layer.views += 1
        return View(layer.pieces[address], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _back(self, saved: Any) -> Tensor:
        if not isinstance(saved, View):
            assert isinstance(saved, Tensor)
            return saved
        layer = saved.piece.layer
        self._fetch(layer)
        if layer.before is not None:
            self._fetch(layer.before)  # while this one's backward pass runs
        if layer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(layer.copied)
        data = saved.piece.device
        assert data is not None
        tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
        tensor.set_(data.untyped_storage(), saved.offset, saved.size, saved.stride)
        layer.views -= 1
        if not layer.views:
            layer.pieces.clear()  # autograd holds what it still needs
        return tensor

    def _fetch(self, layer: Layer) -> None:
        """Start the way back of a block's pieces, once. Their buffers are free for the next forward pass, whose copies
        follow on the same stream."""
        if layer.returned:
            return
        layer.returned = True
        for piece in layer.pieces.values():
            if piece.device is None:
                piece.device = torch.empty_like(piece.host, device=self.device, pin_memory=False)
                self._copy(piece.device, piece.host)
            self.free.setdefault(piece.host.numel(), []).append(piece.host)
        if self.stream is not None:
            layer.copied = self.stream.record_event()

    def _copy(self, to: Tensor, source: Tensor) -> None:
        """In the order of the compute stream, beside it."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            to.copy_(source, non_blocking=True)
