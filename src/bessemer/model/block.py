"""One layer: a mixer of positions (attention or a state space) and a feed-forward part, with their norms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.attention import Attention, LatentAttention, LayerCache, Place
from bessemer.model.ffn import FeedForward
from bessemer.model.mamba import Mamba2, MambaCache
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.norm import make_norm
from bessemer.spec.shape import ModelShape

Cache = LayerCache | MambaCache


class Block(nn.Module):
    """`attention_norm` and `ffn_norm` stand before their branch, or after the sum with placement `post`;
    `attention_out_norm` and `ffn_out_norm` on what a branch adds."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, 0.0
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

    def feed(self, x_BTW: Tensor, place: Place) -> Tensor:
        if isinstance(self.ffn, MixtureOfExperts):
            return self._drop(self.ffn(x_BTW, place.sight.counted_BT))
        return self._drop(self.ffn(x_BTW))

    def _drop(self, x_BTW: Tensor) -> Tensor:
        return F.dropout(x_BTW, self.dropout, self.training) if self.dropout else x_BTW

    def forward(self, x_BTW: Tensor, place: Place, cache: Cache | None = None) -> Tensor:
        if self.shape.parallel != "none":
            h_BTW = self.attention_norm(x_BTW)
            g_BTW = h_BTW if self.shape.parallel == "one_norm" else self.ffn_norm(x_BTW)
            return x_BTW + self.mix(h_BTW, place, cache) + self.feed(g_BTW, place)
        where = self.shape.norm_place
        if where == "post":
            x_BTW = self.attention_norm(x_BTW + self.mix(x_BTW, place, cache))
            return self.ffn_norm(x_BTW + self.feed(x_BTW, place))
        if where == "pre":
            x_BTW = x_BTW + self.mix(self.attention_norm(x_BTW), place, cache)
            return x_BTW + self.feed(self.ffn_norm(x_BTW), place) if self.has_ffn else x_BTW
        h_BTW = x_BTW if where == "branch" else self.attention_norm(x_BTW)
        x_BTW = x_BTW + self.attention_out_norm(self.mix(h_BTW, place, cache))
        if not self.has_ffn:
            return x_BTW
        h_BTW = x_BTW if where == "branch" else self.ffn_norm(x_BTW)
        return x_BTW + self.ffn_out_norm(self.feed(h_BTW, place))
