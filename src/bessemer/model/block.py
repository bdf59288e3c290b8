"""One layer: a mixer of positions (attention or a state space) and a feed-forward part, with their norms."""

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
    """`Block.enter` and `Block.leave` as faster functions, for the inputs that they serve. Attention's own kernel runs
    between them, so that no mask and no border of a document is part of what was compiled."""

    def serves(self, block: TransformerBlock, x_BTW: Tensor) -> bool: ...
    def enter(self, block: TransformerBlock, x_BTW: Tensor, rotary: Rotary | None) -> Entered: ...
    def leave(self, block: TransformerBlock, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor: ...


class TransformerBlock(nn.Module):
    """`attention_norm` and `ffn_norm` stand before their branch, or after the sum with placement `post`;
    `attention_out_norm` and `ffn_out_norm` on what a branch adds."""

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

    def feed(self, x_BTW: Tensor, counted_BT: Tensor | None) -> Tensor:
        if isinstance(self.ffn, MixtureOfExperts):
            return self._drop(self.ffn(x_BTW, counted_BT))
        return self._drop(self.ffn(x_BTW))

    def _drop(self, x_BTW: Tensor) -> Tensor:
        return F.dropout(x_BTW, self.dropout, self.training) if self.dropout else x_BTW

    def inlet(self, x_BTW: Tensor) -> Tensor:
        """What the mixer reads."""
        return x_BTW if self.shape.norm_place in ("post", "branch") else self.attention_norm(x_BTW)

    def join(self, x_BTW: Tensor, h_BTW: Tensor | None, mixed_BTW: Tensor, counted_BT: Tensor | None) -> Tensor:
        """All that follows the mixer, which read `h_BTW`."""
        where = self.shape.norm_place
        if self.shape.parallel != "none":
            g_BTW = h_BTW if self.shape.parallel == "one_norm" else self.ffn_norm(x_BTW)
            assert g_BTW is not None
            return x_BTW + mixed_BTW + self.feed(g_BTW, counted_BT)
        if where == "post":
            x_BTW = self.attention_norm(x_BTW + mixed_BTW)
            return self.ffn_norm(x_BTW + self.feed(x_BTW, counted_BT))
        after = where in ("sandwich", "branch")
        x_BTW = x_BTW + (self.attention_out_norm(mixed_BTW) if after else mixed_BTW)
        if not self.has_ffn:
            return x_BTW
        fed_BTW = self.feed(x_BTW if where == "branch" else self.ffn_norm(x_BTW), counted_BT)
        return x_BTW + (self.ffn_out_norm(fed_BTW) if after else fed_BTW)

    def enter(self, x_BTW: Tensor, rotary: Rotary | None) -> Entered:
        """From a block's input to what attention reads: h for those that read it twice, q, k, v. What nobody reads is
        not given: its gradient would be a tensor of zeros."""
        h_BTW = self.inlet(x_BTW)
        return h_BTW if self.shape.parallel == "one_norm" else None, *self.attention.project(h_BTW, rotary)

    def leave(self, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
        """From what attention gave to the block's output."""
        return self.join(x_BTW, h_BTW, self._drop(self.attention.out(out_BTNE.flatten(2))), None)

    def forward(self, x_BTW: Tensor, place: Place, cache: Cache | None = None) -> Tensor:
        if self.compiled is not None and cache is None and self.compiled.serves(self, x_BTW):
            h_BTW, q_BTND, k_BTKD, v_BTKE = self.compiled.enter(self, x_BTW, self.attention.rotary(place))
            out_BTNE = self.attention.attend(q_BTND, k_BTKD, v_BTKE, place)
            return self.compiled.leave(self, x_BTW, h_BTW, out_BTNE)
        h_BTW = self.inlet(x_BTW)
        return self.join(x_BTW, h_BTW, self.mix(h_BTW, place, cache), place.sight.counted_BT)
