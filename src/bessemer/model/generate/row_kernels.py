"""Kernels of a single row's token: products with what comes before and after them.

A program multiplies a few rows of a weight, whose first numbers it requests before it waits for the kernel before it
(programmatic dependent launch, from Hopper on): memory stays busy between kernels. A norm's scale is a factor of every
product, so sums of squares and products are computed together.
Legend: K inputs of a product, R rows of a weight that a program multiplies, P pairs of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Rows of a weight that a program multiplies, numbers of each that it reads at a time, and its warps.
TILES = {
    "qkv": (4, 2048, 4), "out": (4, 2048, 4), "gate_up": (4, 2048, 4), "down": (2, 2048, 4), "head": (4, 2048, 4),
}  # fmt: skip


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x, norm, weight, rows_R, stride, eps, K: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """(R,) products of rows of the weight with x or its RMS norm."""
    k = tl.arange(0, STEP)
    at_RK = weight + rows_R.to(tl.int64)[:, None] * stride + k[None, :]
    weight_RK = tl.load(at_RK, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    sum_RK = tl.zeros((R, STEP), tl.float32)
    square_K = tl.zeros((STEP,), tl.float32)
    for at in tl.static_range(0, K, STEP):
        x_K = tl.load(x + at + k, mask=at + k < K, other=0.0).to(tl.float32)
        if NORMED:
            square_K += x_K * x_K
            x_K *= tl.load(norm + at + k, mask=at + k < K, other=0.0).to(tl.float32)
        sum_RK += weight_RK.to(tl.float32) * x_K[None, :]
        if at + STEP < K:
            inside_1K = (at + STEP + k < K)[None, :]
            weight_RK = tl.load(at_RK + (at + STEP), mask=inside_1K, other=0.0, eviction_policy="evict_first")
    sum_R = tl.sum(sum_RK, 1)
    if NORMED:
        sum_R *= tl.rsqrt(tl.sum(square_K, 0) / K + eps)
    return sum_R


@triton.jit
def _begin(embedding, tokens, slots, x, stride, K: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if OVERLAP:
        gdc_launch_dependents()
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    token = tl.load(tokens + tl.load(slots))
    tl.store(x + k, tl.load(embedding + token * stride + k, mask=k < K), mask=k < K)


@triton.jit
def _query_key_value(  # type: ignore[no-untyped-def]
    x, norm, weight, q, keys, values, cos, sin, slots, positions, stride, k_b, k_s, v_b, v_s, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotated queries to `q`, rotated keys and values to the cache. A pair of rows is rotated together."""
    if OVERLAP:
        gdc_launch_dependents()
    P: tl.constexpr = R // 2
    HALF: tl.constexpr = D // 2
    first, r = tl.program_id(0) * P, tl.arange(0, R)
    pair_R = first + r // 2
    rows_R = pair_R // HALF * D + pair_R % HALF + r % 2 * HALF
    slot = tl.load(slots).to(tl.int64)
    position = tl.load(positions + slot)
    sum_R = _products(x, norm, weight, rows_R, stride, eps, K, R, STEP, True, OVERLAP)
    a_P, b_P = tl.split(tl.reshape(sum_R, (P, 2)))
    head, i = first // HALF, first % HALF + tl.arange(0, P)
    rotated = (i >= 0) & (head < HEADS + KV_HEADS)
    cos_P = tl.load(cos + position * D + i, mask=rotated, other=1.0).to(tl.float32)
    sin_P = tl.load(sin + position * D + i, mask=rotated, other=0.0).to(tl.float32)
    if head < HEADS:
        target = q + head * D
    elif head < HEADS + KV_HEADS:
        target = keys + slot * k_b + position * k_s + (head - HEADS) * D
    else:
        target = values + slot * v_b + position * v_s + (head - HEADS - KV_HEADS) * D
    tl.store(target + i, a_P * cos_P - b_P * sin_P)
    tl.store(target + HALF + i, b_P * cos_P + a_P * sin_P)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    x, norm, weight, out, stride, eps, F: tl.constexpr, K: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of the normed input; the weight has the rows of the gate, then those of up."""
    if OVERLAP:
        gdc_launch_dependents()
    P: tl.constexpr = R // 2
    first, r = tl.program_id(0) * P, tl.arange(0, R)
    sum_R = _products(x, norm, weight, first + r // 2 + r % 2 * F, stride, eps, K, R, STEP, True, OVERLAP)
    gate_P, up_P = tl.split(tl.reshape(sum_R, (P, 2)))
    tl.store(out + first + tl.arange(0, P), gate_P / (1.0 + tl.exp(-gate_P)) * up_P)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x, norm, weight, out, stride, eps, K: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, NORMED: tl.constexpr,
    ADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The product of x or its norm, or `out` plus it."""
    if OVERLAP:
        gdc_launch_dependents()
    rows_R = tl.program_id(0) * R + tl.arange(0, R)
    sum_R = _products(x, norm, weight, rows_R, stride, eps, K, R, STEP, NORMED, OVERLAP)
    if ADDED:
        sum_R += tl.load(out + rows_R).to(tl.float32)
    tl.store(out + rows_R, sum_R)


def _tiles(name: str, outputs: int, K: int, overlap: bool, pairs: int = 0) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants of a product. `pairs` is what the pairs of a program must divide."""
    rows, step, warps = TILES[name]
    rows = max(2, min(rows, 2 * (pairs & -pairs))) if pairs else min(rows, outputs & -outputs)
    step = min(step, triton.next_power_of_2(K))
    more: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    return (outputs // rows,), {"K": K, "R": rows, "STEP": step, "OVERLAP": overlap, "num_warps": warps, **more}


def begin(embedding_VW: Tensor, token_S: Tensor, slots_B: Tensor, overlap: bool) -> Tensor:
    """(W,) the embedding of the slot's last token."""
    W = embedding_VW.shape[1]
    x_W = torch.empty(W, dtype=embedding_VW.dtype, device=embedding_VW.device)
    grid = (triton.cdiv(W, 1024),)
    _begin[grid](embedding_VW, token_S, slots_B, x_W, embedding_VW.stride(0), K=W, STEP=1024, OVERLAP=overlap)
    return x_W


def query_key_value(
    x_W: Tensor, norm_W: Tensor, eps: float, weight: Tensor, keys: Tensor, values: Tensor,
    rotary: tuple[Tensor, Tensor], slots_B: Tensor, position_S: Tensor, heads: int, overlap: bool,
) -> Tensor:  # fmt: skip
    """(N, D) queries; keys and values go into the cache (C, S, K, D)."""
    kv_heads, D = keys.shape[2:]
    q_ND = torch.empty(heads, D, dtype=x_W.dtype, device=x_W.device)
    grid, constants = _tiles("qkv", len(weight), len(x_W), overlap, D // 2)
    _query_key_value[grid](
        x_W, norm_W, weight, q_ND, keys, values, *rotary, slots_B, position_S, weight.stride(0),
        *keys.stride()[:2], *values.stride()[:2], eps, HEADS=heads, KV_HEADS=kv_heads, D=D, **constants,
    )  # fmt: skip
    return q_ND


def gated(x_W: Tensor, norm_W: Tensor, eps: float, weight: Tensor, overlap: bool) -> Tensor:
    """(F,)."""
    F = len(weight) // 2
    out_F = torch.empty(F, dtype=x_W.dtype, device=x_W.device)
    grid, constants = _tiles("gate_up", len(weight), len(x_W), overlap, F)
    _gated[grid](x_W, norm_W, weight, out_F, weight.stride(0), eps, F=F, **constants)
    return out_F


def add_product(name: str, x_K: Tensor, weight: Tensor, out_N: Tensor, overlap: bool) -> None:
    """`out_N` += weight @ x."""
    grid, constants = _tiles(name, len(weight), len(x_K), overlap)
    _product[grid](x_K, None, weight, out_N, weight.stride(0), 0.0, NORMED=False, ADDED=True, **constants)


def head(x_W: Tensor, norm_W: Tensor, eps: float, weight: Tensor, overlap: bool) -> Tensor:
    """(V,) logits."""
    out_V = torch.empty(len(weight), dtype=x_W.dtype, device=x_W.device)
    grid, constants = _tiles("head", len(weight), len(x_W), overlap)
    _product[grid](x_W, norm_W, weight, out_V, weight.stride(0), eps, NORMED=True, ADDED=False, **constants)
    return out_V
