"""Activation recomputation (`memory.activations`) and offloading (`memory.offload_activations`).

Compiled blocks leave recomputation to torch's partitioner, whose budget is one number for all graphs: just below 1 it
recomputes everything that needs no matmul (norms, activation functions, weight casts), lower also matmuls, the cheapest
per byte first. Other blocks use checkpoints. Gradients are the same bit for bit.

Offloading copies what a block saves to pinned host buffers on its own stream while the next blocks run, and back one
block ahead of the backward pass. A block of 1B parameters saves 2.3 GiB for 32k tokens in 10 ms, in which PCIe 5 moves
half a GiB: use it with `activations: full`, where only the block's input moves, 128 MiB. No buffer is reused before the
streams have synchronized, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch._functorch.config as partitioner
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bessemer.errors import UserError
from bessemer.model.attention import AttentionInputs
from bessemer.model.quantized import stored_tensors
from bessemer.model.transformer import Decoder, TransformerBlock
from bessemer.parallel import nf4 as nf4  # registers an operator
from bessemer.train.memory.tiles import fits, tiled

How = str | float  # none, selective, full, or the share of activations to save
FREE = 0.99  # a budget that needs no recomputed matmul: a third less memory than none for Llama's blocks
aten = torch.ops.aten
# Selective saves the outputs of matmuls and attention, so that neither runs again. Measured on Llama's blocks (ffn =
# 4 x width, fp32): none saves 25 widths per token, selective 14 for no more FLOPs that torch counts, a checkpoint
# around the feed-forward part 9 for 18 % more, full 1 for 24 % more.
SAVED_OPS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default,
    aten._scaled_mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, torch.ops.bessemer.nf4_product.default,
    torch.ops.bessemer.nf4_sharded_product.default,
}  # fmt: skip


def apply(model: Decoder, how: How, offload: bool = False) -> None:
    """Set the recomputation of the model's blocks, compiled or not. Call it after `compile_blocks`; calling it again
    with another setting recompiles."""
    blocks = list(model.blocks)
    if not blocks and (how != "none" or offload):
        raise UserError(
            f"memory.activations: {how} needs the model's layers, and none were found in {model.shape.wrapped[:40]}: "
            "write none"
        )
    compiled = [getattr(block, "compiled", None) is not None for block in blocks]
    budget = FREE if how == "selective" else 1.0 if isinstance(how, str) else float(how)
    if any(compiled) and partitioner.activation_memory_budget != budget:
        partitioner.activation_memory_budget = budget  # type: ignore[assignment]
        torch.compiler.reset()  # graphs compiled with the other budget
    store = Offload(model) if offload else None
    recomputed, random = _recomputed(how, len(blocks)), _has_dropout(model)
    for i, block in enumerate(blocks):
        plain = getattr(block.forward, "plain", block.forward)
        run = plain
        if recomputed[i] and (how == "full" or not compiled[i]):
            more: dict[str, Any] = {"context_fn": _keep_products} if how == "selective" else {}
            # Saving the generator's state costs launches, and is only needed with dropout.
            run = partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=random, **more)
            if how == "full" and compiled[i] and not random:
                run = _by_length(cast("TransformerBlock", block), run)
        block.forward = plain if run is plain and store is None else _trained(block, plain, run, store, i == 0)


def _recomputed(how: How, layers: int) -> list[bool]:
    """Which uncompiled blocks are checkpointed. A share is a share of the layers, evenly spread."""
    if isinstance(how, str):
        return [how != "none"] * layers
    full_layers = round((1 - how) * layers)
    return [(i + 1) * full_layers // layers > i * full_layers // layers for i in range(layers)]


def _trained(
    block: nn.Module, plain: Callable[..., Any], run: Callable[..., Any], store: Offload | None, first: bool
) -> Callable[..., Any]:
    """`run` in training, `plain` in evaluation and generation."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        with store.layer(first) if store is not None else nullcontext():
            return run(*args, **kwargs)

    forward.plain = plain  # type: ignore[attr-defined]
    return forward


def _by_length(block: TransformerBlock, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, or `tiled` for long rows."""

    def run(x_BTW: Tensor, place: AttentionInputs, cache: Any = None) -> Any:
        if cache is None and fits(block, x_BTW, place):
            return tiled(block, x_BTW, place)
        return forward(x_BTW, place, cache)

    return run


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in SAVED_OPS or "varlen_attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(model: nn.Module) -> bool:
    """Whether any module has dropout: a `dropout` attribute of ours, or torch's layer."""
    shares = (m.p if isinstance(m, nn.Dropout) else getattr(m, "dropout", 0.0) for m in model.modules())
    return any(isinstance(share, float) and share > 0 for share in shares)


LEAST_BYTES = 1 << 20  # below, a copy costs more than the memory it saves


@dataclass
class OffloadedPiece:
    """One storage that is copied out and back."""

    layer: Layer
    host: Tensor  # uint8
    device: Tensor | None  # uint8; until it is copied out, and again once it is copied back


@dataclass
class SavedView:
    """A saved tensor as a view of its storage."""

    piece: OffloadedPiece
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Layer:
    """What one call of a block saved, by storage address."""

    pieces: dict[int, OffloadedPiece] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None  # the last copy, out or back
    before: Layer | None = None  # in the same forward pass
    returned: bool = False
    views: int = 0  # handed to autograd and not yet used


class Offload:
    """Saved-tensor hooks around blocks. One object for all: a block is fetched during the backward of the next one."""

    def __init__(self, model: nn.Module) -> None:
        parameter = next(model.parameters())
        self.device = parameter.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        stored = (tensor for parameter in model.parameters() for tensor in stored_tensors(parameter))
        self.kept = {tensor.untyped_storage().data_ptr() for tensor in stored}
        self.last: Layer | None = None
        self.free: dict[int, list[Tensor]] = {}  # reusable host buffers by size

    @contextmanager
    def layer(self, first: bool) -> Iterator[None]:
        """Around one block's forward pass, the model's `first` or a later one."""
        before = None if first else self.last
        if first and self.stream is not None:  # unused fetches of the last pass are finished
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if before is not None and before.before is not None:
            self._free_copies(before.before)
        self.last = layer = Layer(before=before)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._out(layer, tensor), self._back):
            yield
        if self.stream is not None:
            layer.copied = self.stream.record_event()

    def _free_copies(self, layer: Layer) -> None:
        """Free the device's tensors of a block two before: the compute stream waits for their copies, done by now."""
        if layer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(layer.copied)
        if not layer.returned:
            for piece in layer.pieces.values():
                piece.device = None

    def _out(self, layer: Layer, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        worthwhile = 2 * tensor.numel() * tensor.element_size() >= size >= LEAST_BYTES
        if tensor.device != self.device or not worthwhile or address in self.kept:
            return tensor
        if address not in layer.pieces:
            data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            waiting, pinned = self.free.get(size), self.stream is not None
            host = waiting.pop() if waiting else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._copy(host, data)
            layer.pieces[address] = OffloadedPiece(layer, host, data)
        layer.views += 1
        return SavedView(
            layer.pieces[address], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _back(self, saved: Any) -> Tensor:
        if not isinstance(saved, SavedView):
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
        """Start copying a block's pieces back, once. Their buffers can be reused by the next forward pass, whose copies
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
        """After what the compute stream has queued, in parallel to what follows."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            to.copy_(source, non_blocking=True)
