"""Attention with grouped queries, and multi-head latent attention; a key-value cache for both.

Legend: B batch, T time, S keys so far, N query heads, K key-value heads, D head size, E value size, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.model.attend import attend
from bessemer.model.norm import RMSNorm, make_norm
from bessemer.model.rotary import rotate
from bessemer.model.sight import Sight
from bessemer.spec.shape import ModelShape

Rotary = tuple[Tensor, Tensor]
LATENT_EPS = 1e-6  # DeepSeek's norms inside the waist keep this whatever the model's own epsilon is


@dataclass(frozen=True)
class Place:
    """What a layer knows of its batch besides the hidden states."""

    sight: Sight
    rotary: Rotary | None = None  # of plain layers
    local: Rotary | None = None  # of windowed layers where they have their own
    bias_1NTS: Tensor | None = None  # ALiBi's or T5's


class LayerCache:
    """Keys and values of one layer during generation, in buffers that double when full."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0

    def extend(self, k_BTKD: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return everything so far."""
        new = self.length + k_BTKD.shape[1]
        if self.keys is None or self.values is None or self.keys.shape[1] < new:
            size = 1 << max(new - 1, 15).bit_length()
            grown = [
                torch.empty((x.shape[0], size, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in (k_BTKD, v_BTKE)
            ]
            if self.keys is not None and self.values is not None:
                grown[0][:, : self.length] = self.keys[:, : self.length]
                grown[1][:, : self.length] = self.values[:, : self.length]
            self.keys, self.values = grown
        self.keys[:, self.length : new] = k_BTKD
        self.values[:, self.length : new] = v_BTKE
        self.length = new
        return self.keys[:, :new], self.values[:, :new]


class SelfAttention(nn.Module, ABC):
    """What both kinds share: they differ in how queries, keys and values are made."""

    out: nn.Linear

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.shape, self.window = shape, shape.window(layer)
        self.interleaved = shape.layer_rope(layer).interleaved
        self.local = shape.local_theta is not None and self.window > 0
        self.scale = shape.attention_scale if shape.attention_scale is not None else shape.key_dim**-0.5
        self.dropout, self.backend = 0.0, "auto"

    @abstractmethod
    def project(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, N, D), k (B, T, K, D) with their positions in them, and v (B, T, K, E)."""

    def rotary(self, place: Place) -> Rotary | None:
        return place.local if self.local else place.rotary

    def forward(self, x_BTW: Tensor, place: Place, cache: LayerCache | None = None) -> Tensor:
        q_BTND, k_BSKD, v_BSKE = self.project(x_BTW, self.rotary(place))
        if cache is not None:
            k_BSKD, v_BSKE = cache.extend(k_BSKD, v_BSKE)
        return self.out(self.attend(q_BTND, k_BSKD, v_BSKE, place).flatten(2))

    def attend(self, q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, place: Place) -> Tensor:
        """(B, T, N, E), by the backend that was chosen."""

        def whole(q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor) -> Tensor:
            return attend(
                q_BTND, k_BSKD, v_BSKE, place.sight, self.window, self.scale, self.shape.attention_cap,
                place.bias_1NTS, self.dropout if self.training else 0.0, self.backend,
            )  # fmt: skip

        exchange = place.sight.exchange
        if exchange is None:
            return whole(q_BTND, k_BSKD, v_BSKE)
        return exchange.attend(q_BTND, k_BSKD, v_BSKE, place.sight, self.window, self.scale, whole)


class Attention(SelfAttention):
    """As many key-value heads as query heads (MHA), one (MQA), or some (GQA)."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__(shape, layer)
        kv_width = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.width, shape.attention_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.attention_width, shape.width, bias=shape.out_bias)
        if shape.qk_norm != "none":
            whole = shape.qk_norm == "full"
            self.query_norm = make_norm(shape, shape.attention_width if whole else shape.head_dim)
            self.key_norm = make_norm(shape, kv_width if whole else shape.head_dim)

    def project(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.query(x_BTW), self.key(x_BTW), self.value(x_BTW)
        if self.shape.qk_norm == "full":
            q, k = self.query_norm(q), self.key_norm(k)
        q_BTND, k_BTKD, v_BTKD = (x.unflatten(-1, (-1, self.shape.head_dim)) for x in (q, k, v))
        if self.shape.qk_norm == "head":
            q_BTND, k_BTKD = self.query_norm(q_BTND), self.key_norm(k_BTKD)
        if rotary is not None:
            q_BTND, k_BTKD = (rotate(x, *rotary, self.interleaved) for x in (q_BTND, k_BTKD))
        return q_BTND, k_BTKD, v_BTKD


class LatentAttention(SelfAttention):
    """DeepSeek's MLA. The cache holds whole keys and values: simple, where serving would keep the waist."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__(shape, layer)
        assert shape.mla is not None
        self.mla = mla = shape.mla
        if mla.q_rank is None:
            self.query = nn.Linear(shape.width, shape.heads * shape.key_dim, bias=False)
        else:
            self.query_down = nn.Linear(shape.width, mla.q_rank, bias=shape.qkv_bias)
            self.query_norm = RMSNorm(mla.q_rank, LATENT_EPS)
            self.query = nn.Linear(mla.q_rank, shape.heads * shape.key_dim, bias=False)
        self.kv_down = nn.Linear(shape.width, mla.kv_rank + mla.rope_dim, bias=shape.qkv_bias)
        self.kv_norm = RMSNorm(mla.kv_rank, LATENT_EPS)
        self.kv = nn.Linear(mla.kv_rank, shape.heads * (mla.nope_dim + mla.value_dim), bias=False)
        self.out = nn.Linear(shape.heads * mla.value_dim, shape.width, bias=shape.out_bias)

    def project(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        mla, heads = self.mla, self.shape.heads
        q = x_BTW if mla.q_rank is None else self.query_norm(self.query_down(x_BTW))
        q_BTND = self.query(q).unflatten(-1, (heads, -1))
        waist, k_rope = self.kv_down(x_BTW).split((mla.kv_rank, mla.rope_dim), dim=-1)
        kv = self.kv(self.kv_norm(waist)).unflatten(-1, (heads, -1))
        k_nope, v_BTNE = kv.split((mla.nope_dim, mla.value_dim), dim=-1)
        q_nope, q_rope = q_BTND.split((mla.nope_dim, mla.rope_dim), dim=-1)
        k_rope = k_rope[:, :, None]  # one for all heads
        if rotary is not None:
            q_rope, k_rope = (rotate(x, *rotary, self.interleaved) for x in (q_rope, k_rope))
        q_BTND = torch.cat((q_nope, q_rope), dim=-1)
        k_BTND = torch.cat((k_nope, k_rope.expand(-1, -1, heads, -1)), dim=-1)
        return q_BTND, k_BTND, v_BTNE
