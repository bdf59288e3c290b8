"""One transformer layer: a token mixer (attention or Mamba-2) and a feed-forward part, with their norms."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention import Attention, LatentAttention, LayerCache, Place, Rotary
from bessemer.model.layers import FeedForward, make_norm
from bessemer.model.mamba import Mamba2, MambaCache
from bessemer.model.moe import MixtureOfExperts
from bessemer.spec.shape import ModelShape

Cache = LayerCache | MambaCache
Entered = tuple[Tensor | None, Tensor, Tensor, Tensor]


class Compiled(Protocol):
    """Compiled versions of `TransformerBlock.enter` and `leave`. The attention kernel runs between them, uncompiled, so
    that no mask or document length is part of a graph."""

    def serves(self, block: TransformerBlock, x_BTW: Tensor) -> bool: ...
    def enter(self, block: TransformerBlock, x_BTW: Tensor, rotary: Rotary | None) -> Entered: ...
    def leave(self, block: TransformerBlock, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor: ...


class TransformerBlock(nn.Module):
    """`attention_norm` and `ffn_norm` precede their branch (with `norm_place: post` they follow the residual sum);
    `attention_out_norm` and `ffn_out_norm` normalise a branch's output."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, 0.0
        self.compiled: Compiled | None = None
        before, after = shape.norm_place != "branch", shape.norm_place in ("sandwich", "branch")
        if before:
            self.attention_norm = make_norm(shape)
        if shape.mixer(layer) == "mamba":
            assert shape.mamba is not None
            self.mamba = Mamba2(shape.width, shape.mamba, shape.norm_eps)
        else:
            self.attention = LatentAttention(shape, layer) if shape.mla else Attention(shape, layer)
        self.has_attention = shape.mixer(layer) == "attention"
        if after:
            self.attention_out_norm = make_norm(shape)
        self.has_ffn = shape.ffn > 0 or shape.has_experts(layer)
        if not self.has_ffn:
            return
        if before and shape.parallel != "one_norm":
            self.ffn_norm = make_norm(shape)
        if shape.has_experts(layer):
            assert shape.moe is not None
            self.ffn: nn.Module = MixtureOfExperts(shape.width, shape.moe, shape.activation, shape.gated)
        else:
            self.ffn = FeedForward(shape.width, shape.ffn, shape.activation, shape.gated, shape.ffn_bias)
        if after:
            self.ffn_out_norm = make_norm(shape)

    def new_cache(self) -> Cache:
        return LayerCache() if self.has_attention else self.mamba.new_cache()

    def mix(self, x_BTW: Tensor, place: Place, cache: Cache | None) -> Tensor:
        if self.has_attention:
            assert not isinstance(cache, MambaCache)
            return self._drop(self.attention(x_BTW, place, cache))
        assert not isinstance(cache, LayerCache)
        return self._drop(self.mamba(x_BTW, place.sight, cache))

    def feed(self, x_BTW: Tensor, router_mask_BT: Tensor | None) -> Tensor:
        if isinstance(self.ffn, MixtureOfExperts):
            return self._drop(self.ffn(x_BTW, router_mask_BT))
        return self._drop(self.ffn(x_BTW))

    def _drop(self, x_BTW: Tensor) -> Tensor:
        return F.dropout(x_BTW, self.dropout, self.training) if self.dropout else x_BTW

    def mixer_input(self, x_BTW: Tensor) -> Tensor:
        return x_BTW if self.shape.norm_place in ("post", "branch") else self.attention_norm(x_BTW)

    def finish(self, x_BTW: Tensor, h_BTW: Tensor | None, mixed_BTW: Tensor, router_mask_BT: Tensor | None) -> Tensor:
        """Everything after the mixer, whose input was `h_BTW`."""
        norm_place = self.shape.norm_place
        if self.shape.parallel != "none":
            g_BTW = h_BTW if self.shape.parallel == "one_norm" else self.ffn_norm(x_BTW)
            assert g_BTW is not None
            return x_BTW + mixed_BTW + self.feed(g_BTW, router_mask_BT)
        if norm_place == "post":
            x_BTW = self.attention_norm(x_BTW + mixed_BTW)
            return self.ffn_norm(x_BTW + self.feed(x_BTW, router_mask_BT))
        after = norm_place in ("sandwich", "branch")
        x_BTW = x_BTW + (self.attention_out_norm(mixed_BTW) if after else mixed_BTW)
        if not self.has_ffn:
            return x_BTW
        fed_BTW = self.feed(x_BTW if norm_place == "branch" else self.ffn_norm(x_BTW), router_mask_BT)
        return x_BTW + (self.ffn_out_norm(fed_BTW) if after else fed_BTW)

    def enter(self, x_BTW: Tensor, rotary: Rotary | None) -> Entered:
        """From the block's input to attention's: q, k, v and the normed input (None if nothing else reads it, as its
        gradient would be zeros)."""
        h_BTW = self.mixer_input(x_BTW)
        return h_BTW if self.shape.parallel == "one_norm" else None, *self.attention.project(h_BTW, rotary)

    def leave(self, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
        """From attention's output to the block's output."""
        return self.finish(x_BTW, h_BTW, self._drop(self.attention.out(out_BTNE.flatten(2))), None)

    def forward(self, x_BTW: Tensor, place: Place, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and cache is None and self.compiled.serves(self, x_BTW):
            h_BTW, q_BTND, k_BTKD, v_BTKE = self.compiled.enter(self, x_BTW, self.attention.rotary(place))
            out_BTNE = self.attention.attend(q_BTND, k_BTKD, v_BTKE, place)
            return self.compiled.leave(self, x_BTW, h_BTW, out_BTNE)
        h_BTW = self.mixer_input(x_BTW)
        return self.finish(x_BTW, h_BTW, self.mix(h_BTW, place, cache), place.sight.counted_BT)
