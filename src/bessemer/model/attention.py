"""Grouped-query attention with rotary positions, document masks and a key-value cache.

Legend: B batch, T time, S keys so far, N query heads, K key-value heads, D head size, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.rotary import rotate
from bessemer.spec.shape import ModelShape


class LayerCache:
    """Keys and values of one layer during generation, in buffers that double when full."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0

    def extend(self, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return everything so far."""
        new = self.length + k_BTKD.shape[1]
        if self.keys is None or self.values is None or self.keys.shape[1] < new:
            size = 1 << max(new - 1, 15).bit_length()
            grown = [
                torch.empty((x.shape[0], size, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in (k_BTKD, v_BTKD)
            ]
            if self.keys is not None and self.values is not None:
                grown[0][:, : self.length] = self.keys[:, : self.length]
                grown[1][:, : self.length] = self.values[:, : self.length]
            self.keys, self.values = grown
        self.keys[:, self.length : new] = k_BTKD
        self.values[:, self.length : new] = v_BTKD
        self.length = new
        return self.keys[:, :new], self.values[:, :new]


def document_mask(documents_BT: Tensor) -> Tensor:
    """(B, 1, T, T), True where a position may look: not ahead, and only inside its own document."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril_()[:, None]


class Attention(nn.Module):
    """Self-attention. The mask is causal; `mask_B1TT` narrows it to documents."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.width, shape.attention_width, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.attention_width, shape.width, bias=False)
        if shape.qk_norm:
            self.query_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
            self.key_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)

    def forward(
        self,
        x_BTW: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask_B1TT: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        B, T, _ = x_BTW.shape
        q_BTND = self.query(x_BTW).view(B, T, self.shape.heads, self.shape.head_dim)
        k_BTKD = self.key(x_BTW).view(B, T, self.shape.kv_heads, self.shape.head_dim)
        v_BTKD = self.value(x_BTW).view(B, T, self.shape.kv_heads, self.shape.head_dim)
        if self.shape.qk_norm:
            q_BTND, k_BTKD = self.query_norm(q_BTND), self.key_norm(k_BTKD)
        q_BTND, k_BTKD = rotate(q_BTND, *rotary), rotate(k_BTKD, *rotary)
        causal = mask_B1TT is None and T > 1
        if cache is not None:
            assert mask_B1TT is None, "generation has one document"
            before = cache.length
            k_BTKD, v_BTKD = cache.extend(k_BTKD, v_BTKD)
            if before and T > 1:
                S = k_BTKD.shape[1]
                mask_B1TT = torch.ones(T, S, dtype=torch.bool, device=x_BTW.device).tril_(before)[None, None]
                causal = False
        out_BNTD = F.scaled_dot_product_attention(
            q_BTND.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2),
            attn_mask=mask_B1TT, is_causal=causal, enable_gqa=self.shape.kv_heads != self.shape.heads,
        )  # fmt: skip
        return self.out(out_BNTD.transpose(1, 2).reshape(B, T, -1))
