"""Decoding on a GPU with torch.compile: one graph reaches from one attention to the next, for any number of rows.

The residual sum, the norm, rotary positions and the write into the cache become a few kernels. The attention kernel
runs between the graphs, so no length is part of one. All layers share the compiled code.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention import Attention, Rotary
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.generate.cache import SlotKV
from bessemer.model.layers import FeedForward
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import Decoder, TransformerBlock

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_Joined = tuple[nn.Parameter, nn.Parameter | None]  # weight and bias; parameters, whose sizes are fixed in a graph


def can_compile(model: Decoder) -> bool:
    """Whether every block has an attention layer with keys and values and a dense feed-forward part."""
    return all(
        type(block) is TransformerBlock
        and isinstance(getattr(block, "attention", None), Attention)
        and not isinstance(getattr(block, "ffn", None), MixtureOfExperts)
        for block in model.blocks
    )


class CompiledDecoding:
    """One token of every row through all blocks. Query, key and value become one product, and so do gate and up: their
    weights are made views of one tensor, so they keep their values, take no more memory and may change in place."""

    def __init__(self, model: Decoder, backend: str = "inductor") -> None:
        self.model = model
        self.join()
        compiled = torch.compile(fullgraph=True, dynamic=True, backend=backend)
        self._enter, self._between, self._finish = compiled(_enter), compiled(_between), compiled(_finish)

    def join(self) -> None:
        """Make the weights views of joined tensors; those that are already stay."""
        blocks: Any = list(self.model.blocks)
        attentions = [block.attention for block in blocks]
        self.qkv = [join_weights([a.query, a.key, a.value]) for a in attentions]
        self.gate_up = [None if b.ffn.gate is None else join_weights([b.ffn.gate, b.ffn.up]) for b in blocks]

    def run(self, tokens_B1: Tensor, mask: AttentionMask, caches: list[SlotKV]) -> Tensor:
        """Logits (B, 1, V)."""
        model = self.model
        mask.configure(model.shape)
        x_B1W = model.embed(tokens_B1, mask)
        inputs = model.attention_inputs(x_B1W, mask)
        blocks: Any = list(model.blocks)

        def entered(i: int) -> tuple[Any, ...]:
            return blocks[i], self.qkv[i], blocks[i].attention.rotary(inputs), *_written(caches[i])

        h_B1W, q_B1ND = self._enter(x_B1W, *entered(0))
        for i, block in enumerate(blocks):
            out_B1NE = block.attention.attend(q_B1ND, caches[i].keys, caches[i].values, inputs)
            left = (block, self.gate_up[i], x_B1W, h_B1W, out_B1NE)
            if i + 1 < len(blocks):
                x_B1W, h_B1W, q_B1ND = self._between(*left, *entered(i + 1))
        norms = [module for name in ("norm", "transform") if (module := getattr(model, name, None)) is not None]
        return model.logits(self._finish(*left, norms), _product)


def join_weights(layers: list[nn.Linear]) -> _Joined | None:
    """Weight and bias of several layers with one input as one, of which theirs become views; None if they cannot be."""
    if any(type(layer) is not nn.Linear or type(layer.weight.data) is not Tensor for layer in layers):
        return None  # adapters, or weights divided over ranks
    frozen = partial(nn.Parameter, requires_grad=False)
    weight, bias = _join([layer.weight for layer in layers]), None
    if layers[0].bias is not None:
        bias = frozen(_join([layer.bias for layer in layers]))
    return frozen(weight), bias


def _join(parts: list[Tensor]) -> Tensor:
    """The rows of several parameters as one tensor, of which they become views. Parameters that were joined before
    keep their memory, so that several generators of one model share it."""
    first, rows, at = parts[0].data, sum(len(part) for part in parts), parts[0].data_ptr()
    adjacent = True
    for part in parts:
        adjacent &= part.is_contiguous() and part.data_ptr() == at
        at += part.numel() * part.element_size()
    if adjacent and first.untyped_storage().nbytes() >= at - first.untyped_storage().data_ptr():
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    joined = torch.cat([part.data for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joined


def _written(cache: SlotKV) -> tuple[Tensor, ...]:
    assert cache.keys is not None and cache.values is not None
    assert cache.batch.slots_BT is not None and cache.batch.positions_BT is not None
    return cache.keys, cache.values, cache.batch.slots_BT, cache.batch.positions_BT


def _apply(layer: nn.Module, x_B1W: Tensor) -> Tensor:
    if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter:
        return _product(x_B1W, layer.weight, layer.bias)
    return cast("Tensor", layer(x_B1W))  # an adapter, or weights divided over ranks


def _product(x_B1W: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, with a kernel of its own for a single row on a GPU."""
    if not x_B1W.is_cuda or len(x_B1W) > 1 or weight.dtype not in _KERNEL_TYPES:
        return F.linear(x_B1W, weight, bias)
    from bessemer.model.generate.kernels import single_row_product

    y_B1W = single_row_product(x_B1W.reshape(-1), weight).view(1, 1, -1)
    return y_B1W if bias is None else y_B1W + bias


def _enter(
    x_B1W: Tensor, block: TransformerBlock, joined: _Joined | None, rotary: Rotary | None, keys: Tensor,
    values: Tensor, slots: Tensor, positions: Tensor,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """From a block's input to its query; keys and values go into the cache. Returns the normed input if the
    feed-forward part reads it."""
    h_B1W, attention = block.mixer_input(x_B1W), cast("Attention", block.attention)
    if joined is None:
        q_B1ND, k_B1KD, v_B1KE = attention.project(h_B1W, rotary)
    else:
        sizes = [layer.out_features for layer in (attention.query, attention.key, attention.value)]
        q, k, v = _product(h_B1W, *joined).split(sizes, dim=-1)
        q_B1ND, k_B1KD, v_B1KE = attention.arrange(q, k, v, rotary)
    keys[slots, positions] = k_B1KD.to(keys.dtype)
    values[slots, positions] = v_B1KE.to(values.dtype)
    return h_B1W if block.shape.parallel == "one_norm" else None, q_B1ND


def _leave(
    block: TransformerBlock, joined: _Joined | None, x_B1W: Tensor, h_B1W: Tensor | None, out_B1NE: Tensor
) -> Tensor:
    if joined is None:
        return block.leave(x_B1W, h_B1W, out_B1NE)
    ffn = cast("FeedForward", block.ffn)

    def feed(x_B1W: Tensor, router_mask_BT: Tensor | None) -> Tensor:
        gate, up = _product(x_B1W, *joined).chunk(2, dim=-1)
        return _apply(ffn.down, ffn.activate(gate) * up)

    return block.finish(x_B1W, h_B1W, _apply(block.attention.out, out_B1NE.flatten(2)), None, feed)


def _between(
    block: TransformerBlock, gate_up: _Joined | None, x_B1W: Tensor, h_B1W: Tensor | None, out_B1NE: Tensor,
    following: TransformerBlock, qkv: _Joined | None, rotary: Rotary | None, keys: Tensor, values: Tensor,
    slots: Tensor, positions: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """From one attention to the next."""
    x_B1W = _leave(block, gate_up, x_B1W, h_B1W, out_B1NE)
    return x_B1W, *_enter(x_B1W, following, qkv, rotary, keys, values, slots, positions)


def _finish(
    block: TransformerBlock, gate_up: _Joined | None, x_B1W: Tensor, h_B1W: Tensor | None, out_B1NE: Tensor,
    norms: list[nn.Module],
) -> Tensor:  # fmt: skip
    x_B1W = _leave(block, gate_up, x_B1W, h_B1W, out_B1NE)
    for norm in norms:
        x_B1W = norm(x_B1W)
    return x_B1W
