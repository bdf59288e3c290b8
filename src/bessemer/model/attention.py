"""Attention: the plain-torch reference, the fused backends and the rule that selects one per call, and the layers
(grouped-query and multi-head latent attention) with their key-value cache.

Legend: B batch, T queries, S keys, N query heads, K key-value heads, D head size, E value size, W width.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bessemer.model.attention_mask import TILE, AttentionMask
from bessemer.model.layers import RMSNorm, make_norm, rotate
from bessemer.spec.shape import ModelShape

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BACKENDS = ("sdpa", *KERNELS, "flex", "varlen", "math")  # sdpa: torch picks the kernel; math: the reference


@dataclass(frozen=True)
class AttentionCall:
    """The properties of a call that decide which backends support it."""

    T: int
    S: int
    D: int
    E: int
    dtype: torch.dtype
    device: str
    masked: bool = False  # beyond causality
    scattered: bool = (
        False  # masked by a prefix, blocks or global positions, which document lengths and windows cannot express
    )
    capped: bool = False
    bias: bool = False
    learned: bool = False  # the bias requires a gradient
    dropout: bool = False


def unsupported_reason(backend: str, call: AttentionCall) -> str | None:
    """Why a backend cannot run a call; None if it can."""
    assert backend in BACKENDS, backend
    if backend == "math" or (backend == "sdpa" and not call.capped):
        return None
    half, even = call.dtype in (torch.bfloat16, torch.float16), call.D == call.E and call.D <= 256 and call.D % 8 == 0
    reasons = {
        "no soft-cap": call.capped and backend != "flex",
        "needs a GPU": call.device != "cuda",
        "fewer queries than keys (generation)": call.T != call.S,
        "needs bfloat16 or float16": not half and backend in ("cudnn", "flash", "varlen"),
        "needs keys and values of one size, a multiple of 8 up to 256": not even and backend in ("flash", "varlen"),
        "no masks": call.masked and backend == "flash",
        "the length of masked rows must be a multiple of 8": call.masked and call.T % 8 and backend in KERNELS,
        f"the row length must be a multiple of {TILE}": call.T % TILE and backend == "flex",
        "no prefixes, blocks or global positions": call.scattered and backend == "varlen",
        "no bias": call.bias and backend in ("flash", "varlen"),
        "no gradient of a bias": call.learned and backend in ("cudnn", "flex"),
        "no dropout": call.dropout and backend in ("flex", "varlen"),
    }
    return next((reason for reason, true in reasons.items() if true), None)


def select_backend(backend: str, call: AttentionCall) -> str:
    """The requested backend if it supports the call; otherwise torch's kernel choice; otherwise (soft-caps) the
    reference. Both fallbacks build masks of B * T * S bytes and the reference logits of B * N * T * S * 4 bytes: fine
    for generation and short rows, not for long ones."""
    names = ("sdpa", "math") if backend == "auto" else (backend, "sdpa", "math")
    return next(name for name in names if unsupported_reason(name, call) is None)


def attend(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, attention_mask: AttentionMask, window: int,
    scale: float, cap: float | None = None,
    bias_1NTS: Tensor | None = None, dropout: float = 0.0, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Returns (B, T, N, E). `cap` bounds the scaled logits by a tanh; `bias_1NTS` is added after that."""
    T, S, device = q_BTND.shape[1], k_BSKD.shape[1], q_BTND.device
    if attention_mask.slots_B is not None and device.type != "cuda":
        k_BSKD, v_BSKE = (x[attention_mask.slots_B, : attention_mask.keys] for x in (k_BSKD, v_BSKE))
        S = attention_mask.keys
    elif attention_mask.slots_B is not None:
        from bessemer.model.generate.kernels import decode_attention

        assert attention_mask.starts_B is not None
        rows = attention_mask.slots_B, attention_mask.starts_B
        return decode_attention(q_BTND[:, 0], k_BSKD, v_BSKE, *rows, window, scale, cap)[:, None]
    call = AttentionCall(
        T, S, q_BTND.shape[-1], v_BSKE.shape[-1], v_BSKE.dtype, device.type, masked=not attention_mask.plain(window, S),
        scattered=attention_mask.scattered(window, S), capped=cap is not None,
        bias=bias_1NTS is not None, learned=bias_1NTS is not None and bias_1NTS.requires_grad, dropout=dropout > 0,
    )  # fmt: skip
    chosen = select_backend(backend, call)
    if chosen == "varlen":
        return attend_varlen(q_BTND, k_BSKD, v_BSKE, attention_mask, window, scale)
    q_BNTD, k_BKSD, v_BKSE = q_BTND.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKE.transpose(1, 2)
    if chosen == "flex":
        return attend_flex(q_BNTD, k_BKSD, v_BKSE, attention_mask, window, scale, cap, bias_1NTS).transpose(1, 2)
    causal = attention_mask.causal and T > 1
    fused = chosen != "math" and bias_1NTS is None and not call.masked and (T == S or not causal)
    mask = None if fused or (T == 1 and not call.masked) else attention_mask.mask(window, T, S, device)
    if chosen == "math":
        return attend_reference(q_BNTD, k_BKSD, v_BKSE, mask, scale, cap, bias_1NTS, dropout).transpose(1, 2)
    if bias_1NTS is not None:
        bias = bias_1NTS.to(v_BSKE.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    groups = q_BNTD.shape[1] // k_BKSD.shape[1]
    # The memory-efficient kernel lacks grouped queries; under a mask torch would fall back to full logits without this.
    if groups > 1 and (chosen == "efficient" or (chosen == "sdpa" and mask is not None and device.type == "cuda")):
        k_BKSD, v_BKSE, groups = k_BKSD.repeat_interleave(groups, 1), v_BKSE.repeat_interleave(groups, 1), 1
    with sdpa_kernel(KERNELS[chosen]) if chosen in KERNELS else nullcontext():
        out_BNTE = F.scaled_dot_product_attention(
            q_BNTD, k_BKSD, v_BKSE, mask, dropout, is_causal=causal and fused, scale=scale, enable_gqa=groups > 1
        )
    return out_BNTE.transpose(1, 2)


def attend_flex(
    q_BNTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, attention_mask: AttentionMask, window: int, scale: float,
    cap: float | None = None, bias_1NTS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """FlexAttention: no mask memory, fully masked tiles are skipped. Compiled on a GPU; has no backward on a CPU."""
    B, N, T, _ = q_BNTD.shape
    bias_BNTS = None if bias_1NTS is None else bias_1NTS.expand(B, N, T, T)

    def score(logit: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            logit = cap * torch.tanh(logit / cap)
        return logit if bias_BNTS is None else logit + bias_BNTS[b, h, q, k]

    dtype = v_BKSE.dtype  # autocast does not reach inside, and norms may have left q and k in float32
    return _flex_attention(q_BNTD.device.type)(
        q_BNTD.to(dtype), k_BKSD.to(dtype), v_BKSE, score_mod=None if cap is None and bias_1NTS is None else score,
        block_mask=attention_mask.block_mask(window, T, q_BNTD.device), scale=scale, enable_gqa=k_BKSD.shape[1] != N,
        kernel_options=None if bias_1NTS is None else {"num_stages": 2},  # three stages of a bias overflow an H200
    )  # fmt: skip


@cache
def _flex_attention(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cuda":
        return flex_attention
    # One graph per size, window and mask kind. Beyond the limit (8 by default) torch would compute full logits; with
    # `fullgraph` it fails instead.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def attend_varlen(
    q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, attention_mask: AttentionMask, window: int, scale: float
) -> Tensor:
    """Flash attention over concatenated documents (varlen), none of which attends to another."""
    from torch.nn.attention.varlen import varlen_attn

    B, T = q_BTND.shape[:2]
    cu_seqlens, longest = attention_mask.cu_seqlens_on(B, T, q_BTND.device)
    left = window - 1 if window and window < T else -1
    q, k, v = (x.to(v_BTKD.dtype).flatten(0, 1) for x in (q_BTND, k_BTKD, v_BTKD))
    # From torch 2.12 on, grouped queries need this argument; earlier versions do not have it.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    sides = (left, 0 if attention_mask.causal else left)
    out: Any = varlen_attn(q, k, v, *lengths, scale=scale, window_size=sides, **grouped)
    return out.unflatten(0, (B, T))


def attend_reference(
    q_BNTD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, mask_B1TS: Tensor | None, scale: float, cap: float | None = None,
    bias_1NTS: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Plain torch in float32 (float64 for float64). Every other backend is compared with it."""
    groups = q_BNTD.shape[1] // k_BKSD.shape[1]
    exact = torch.promote_types(q_BNTD.dtype, torch.float32)
    with torch.autocast(q_BNTD.device.type, enabled=False):
        k_BNSD, v_BNSE = (x.repeat_interleave(groups, dim=1).to(exact) for x in (k_BKSD, v_BKSE))
        logits_BNTS = (q_BNTD.to(exact) @ k_BNSD.transpose(-1, -2)) * scale
        if cap is not None:
            logits_BNTS = cap * torch.tanh(logits_BNTS / cap)
        if bias_1NTS is not None:
            logits_BNTS = logits_BNTS + bias_1NTS.to(exact)
        if mask_B1TS is not None:
            logits_BNTS = logits_BNTS.masked_fill(~mask_B1TS, float("-inf"))
        probs_BNTS = F.dropout(logits_BNTS.softmax(dim=-1), dropout, training=dropout > 0)
        return (probs_BNTS @ v_BNSE).to(q_BNTD.dtype)


def attend_virtual(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, virtual_2nKD: Any, attention_mask: AttentionMask, window: int,
    scale: float, cap: float | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Attention with trained keys and values before those of each document (virtual_tokens.py), by a dense mask."""
    (B, T), S, n, device = q_BTND.shape[:2], k_BSKD.shape[1], virtual_2nKD.shape[1], q_BTND.device
    real_B1TS = attention_mask.mask(window, T, S, device)
    assert real_B1TS is not None, "virtual tokens need causal attention"
    seen_B1Tn = torch.ones(1, 1, T, n, dtype=torch.bool, device=device)
    if window:
        distance_BTn = attention_mask.positions(S - T, T, device)[..., None] - torch.arange(n, device=device)
        seen_B1Tn = (distance_BTn < window)[:, None]
    rows = max(len(real_B1TS), len(seen_B1Tn))
    mask = torch.cat((seen_B1Tn.expand(rows, 1, T, n), real_B1TS.expand(rows, 1, T, S)), dim=-1)
    k_BRKD, v_BRKD = (
        torch.cat((part.to(x.dtype).expand(B, *part.shape), x), dim=1).transpose(1, 2)
        for part, x in zip(virtual_2nKD, (k_BSKD, v_BSKD), strict=True)
    )
    q_BNTD = q_BTND.transpose(1, 2).to(v_BRKD.dtype)
    if cap is not None:
        return attend_reference(q_BNTD, k_BRKD, v_BRKD, mask, scale, cap, None, dropout).transpose(1, 2)
    groups = q_BNTD.shape[1] // k_BRKD.shape[1]
    if groups > 1 and device.type == "cuda":
        k_BRKD, v_BRKD, groups = k_BRKD.repeat_interleave(groups, 1), v_BRKD.repeat_interleave(groups, 1), 1
    out_BNTD = F.scaled_dot_product_attention(
        q_BNTD, k_BRKD.to(q_BNTD.dtype), v_BRKD, mask, dropout, scale=scale, enable_gqa=groups > 1
    )
    return out_BNTD.transpose(1, 2)


Rotary = tuple[Tensor, Tensor]
LATENT_EPS = 1e-6  # of DeepSeek's latent norms, whatever the model's own epsilon is


@dataclass(frozen=True)
class AttentionInputs:
    """What every layer gets besides the hidden states."""

    attention_mask: AttentionMask
    rotary: Rotary | None = None  # of full-attention layers
    local: Rotary | None = None  # of sliding-window layers, if they have their own
    bias_1NTS: Tensor | None = None  # ALiBi's or T5's


class LayerCache:
    """The key-value cache of one layer during generation, in buffers that double when full."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0

    def extend(self, k_BTKD: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values so far."""
        new = self.length + k_BTKD.shape[1]
        if self.keys is None or self.values is None or self.keys.shape[1] < new:
            size = 1 << max(new - 1, 15).bit_length()
            keys, values = (x.new_empty(x.shape[0], size, *x.shape[2:]) for x in (k_BTKD, v_BTKE))
            if self.keys is not None and self.values is not None:
                keys[:, : self.length] = self.keys[:, : self.length]
                values[:, : self.length] = self.values[:, : self.length]
            self.keys, self.values = keys, values
        self.keys[:, self.length : new] = k_BTKD
        self.values[:, self.length : new] = v_BTKE
        self.length = new
        return self.keys[:, :new], self.values[:, :new]


class SelfAttention(nn.Module, ABC):
    """Base of the attention layers, which differ in how they project queries, keys and values."""

    out: nn.Linear

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.shape, self.window = shape, shape.window(layer)
        self.interleaved = shape.layer_rope(layer).interleaved
        self.local = shape.local_theta is not None and self.window > 0
        self.scale = shape.attention_scale if shape.attention_scale is not None else shape.key_dim**-0.5
        self.dropout, self.backend = 0.0, "auto"
        self.prefix: nn.Module | None = None  # of prefix tuning
        self.prompt_keys: Tensor | None = None  # (2, n, K, D): those of a prompt, in generation

    @abstractmethod
    def project(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, N, D) and k (B, T, K, D) with rotary positions applied, and v (B, T, K, E)."""

    def rotary(self, inputs: AttentionInputs) -> Rotary | None:
        return inputs.local if self.local else inputs.rotary

    def forward(self, x_BTW: Tensor, inputs: AttentionInputs, cache: LayerCache | None = None) -> Tensor:
        q_BTND, k_BSKD, v_BSKE = self.project(x_BTW, self.rotary(inputs))
        if cache is not None:
            k_BSKD, v_BSKE = cache.extend(k_BSKD, v_BSKE)
        return self.out(self.attend(q_BTND, k_BSKD, v_BSKE, inputs).flatten(2))

    def attend(self, q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, inputs: AttentionInputs) -> Tensor:
        """(B, T, N, E), with the configured backend."""

        def attend_full_rows(q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor) -> Tensor:
            return attend(
                q_BTND, k_BSKD, v_BSKE, inputs.attention_mask, self.window, self.scale, self.shape.attention_cap,
                inputs.bias_1NTS, self.dropout if self.training else 0.0, inputs.attention_mask.backend or self.backend,
            )  # fmt: skip

        if inputs.attention_mask.virtual:
            virtual = self.prompt_keys if self.prefix is None else self.prefix.virtual
            drop, cap = self.dropout if self.training else 0.0, self.shape.attention_cap
            mask, window = inputs.attention_mask, self.window
            return attend_virtual(q_BTND, k_BSKD, v_BSKE, virtual, mask, window, self.scale, cap, drop)
        exchange = inputs.attention_mask.exchange
        if exchange is None:
            return attend_full_rows(q_BTND, k_BSKD, v_BSKE)
        return exchange.attend(q_BTND, k_BSKD, v_BSKE, inputs.attention_mask, self.window, self.scale, attend_full_rows)


class Attention(SelfAttention):
    """Multi-head (MHA), multi-query (MQA) or grouped-query (GQA) attention, by the number of key-value heads."""

    def __init__(self, shape: ModelShape, layer: int = 0) -> None:
        super().__init__(shape, layer)
        kv_width = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.width, shape.attention_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.attention_width, shape.width, bias=shape.out_bias)
        if shape.qk_norm != "none":
            full = shape.qk_norm == "full"
            self.query_norm = make_norm(shape, shape.attention_width if full else shape.head_dim)
            self.key_norm = make_norm(shape, kv_width if full else shape.head_dim)

    def project(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.arrange(self.query(x_BTW), self.key(x_BTW), self.value(x_BTW), rotary)

    def arrange(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Projections by head, normed and rotated."""
        if self.shape.qk_norm == "full":
            q, k = self.query_norm(q), self.key_norm(k)
        q_BTND, k_BTKD, v_BTKD = (x.unflatten(-1, (-1, self.shape.head_dim)) for x in (q, k, v))
        if self.shape.qk_norm == "head":
            q_BTND, k_BTKD = self.query_norm(q_BTND), self.key_norm(k_BTKD)
        if rotary is not None:
            q_BTND, k_BTKD = (rotate(x, *rotary, self.interleaved) for x in (q_BTND, k_BTKD))
        return q_BTND, k_BTKD, v_BTKD


class LatentAttention(SelfAttention):
    """DeepSeek's multi-head latent attention (MLA): keys and values are computed from a small latent vector, which is
    what generation caches."""

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

    def _projections(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries without and with rotary positions (B, T, N, D each), the latent (B, T, R), and the rotary part of the
        keys (B, T, 1, D), shared by all heads."""
        mla = self.mla
        q = x_BTW if mla.q_rank is None else self.query_norm(self.query_down(x_BTW))
        q_BTND = self.query(q).unflatten(-1, (self.shape.heads, -1))
        q_nope, q_rope = q_BTND.split((mla.nope_dim, mla.rope_dim), dim=-1)
        latent_BTR, k_rope = self.kv_down(x_BTW).split((mla.kv_rank, mla.rope_dim), dim=-1)
        k_rope = k_rope[:, :, None]
        if rotary is not None:
            q_rope, k_rope = (rotate(x, *rotary, self.interleaved) for x in (q_rope, k_rope))
        return q_nope, q_rope, self.kv_norm(latent_BTR), k_rope

    def project(self, x_BTW: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        mla, heads = self.mla, self.shape.heads
        q_nope, q_rope, latent_BTR, k_rope = self._projections(x_BTW, rotary)
        k_nope, v_BTNE = self.kv(latent_BTR).unflatten(-1, (heads, -1)).split((mla.nope_dim, mla.value_dim), dim=-1)
        q_BTND = torch.cat((q_nope, q_rope), dim=-1)
        k_BTND = torch.cat((k_nope, k_rope.expand(-1, -1, heads, -1)), dim=-1)
        return q_BTND, k_BTND, v_BTNE

    def forward(self, x_BTW: Tensor, inputs: AttentionInputs, cache: LayerCache | None = None) -> Tensor:
        """With a cache, attention runs in the latent space: the up-projection of keys moves to the queries and that of
        values behind the weighted sum, so the cache holds only the latent and the keys' rotary part."""
        if cache is None:
            return super().forward(x_BTW, inputs)
        mla = self.mla
        q_nope, q_rope, latent_BTR, k_rope = self._projections(x_BTW, self.rotary(inputs))
        k_BS1R, _ = cache.extend(torch.cat((latent_BTR[:, :, None], k_rope), dim=-1), k_rope[..., :0])
        merged = getattr(self.kv, "merged_weight", None)  # with an adapter
        up_OR = self.kv.weight if merged is None else merged()
        up_NDR = up_OR.view(self.shape.heads, -1, mla.kv_rank)
        up_k, up_v = up_NDR.split((mla.nope_dim, mla.value_dim), dim=1)
        q_BTNR = torch.cat((torch.einsum("btnd,ndr->btnr", q_nope, up_k.to(q_nope.dtype)), q_rope), dim=-1)
        out_BTNR = self.attend(q_BTNR, k_BS1R, k_BS1R[..., : mla.kv_rank], inputs)
        return self.out(torch.einsum("btnr,nvr->btnv", out_BTNR, up_v.to(out_BTNR.dtype)).flatten(2))
