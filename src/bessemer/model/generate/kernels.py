"""Decoding kernels for a GPU: attention of one new token of every row to its cached keys, and products of a single row.

Each row reads only the keys that it has. They are divided among several programs (flash-decoding), so that few rows
still fill the device; a second kernel combines their results. Query heads that share keys are computed together: keys
and values are read once.
Legend: B rows, C cache rows, S cached positions, N query heads, K key-value heads, G = N / K, D and E sizes of a head's
keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 64  # keys that a program reads at a time
WEIGHTS = 512  # weights of an output that a program reads at a time


@triton.jit
def _partial(  # type: ignore[no-untyped-def]
    q, k, v, slots, starts, out, lse, scale, cap, window,
    q_b, q_n, k_b, k_s, k_k, v_b, v_s, v_k,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr,
    G_PAD: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, CAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(starts + row) + 1
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - first, PARTS), STEP) * STEP
    low = first + part * share
    high = tl.minimum(low + share, length)
    g, d, e = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    heads = head * G + g
    k_row, v_row = k + slot * k_b + head * k_k, v + slot * v_b + head * v_k
    if OVERLAP:  # the kernel before computes the query and the last key and value
        gdc_launch_dependents()
        gdc_wait()
    q_GD = tl.load(
        q + row * q_b + heads[:, None] * q_n + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0
    )
    top_G = tl.full((G_PAD,), float("-inf"), tl.float32)
    sum_G = tl.zeros((G_PAD,), tl.float32)
    acc_GE = tl.zeros((G_PAD, E_PAD), tl.float32)
    for at in range(low, high, STEP):
        s = at + tl.arange(0, STEP)
        inside = s < high
        k_DS = tl.load(k_row + s[None, :] * k_s + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        logit_GS = tl.dot(q_GD, k_DS) * scale
        if CAPPED:
            x = logit_GS / cap
            logit_GS = cap * (2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)
        logit_GS = tl.where(inside[None, :], logit_GS, float("-inf"))
        new_G = tl.maximum(top_G, tl.max(logit_GS, 1))
        weight_GS = tl.exp(logit_GS - new_G[:, None])
        keep_G = tl.exp(top_G - new_G)
        v_SE = tl.load(v_row + s[:, None] * v_s + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
        acc_GE = acc_GE * keep_G[:, None] + tl.dot(weight_GS.to(v_SE.dtype), v_SE)
        sum_G = sum_G * keep_G + tl.sum(weight_GS, 1)
        top_G = new_G
    place = ((row * tl.num_programs(1) + head) * G + g) * PARTS + part
    has = sum_G > 0
    tl.store(lse + place, tl.where(has, top_G + tl.log(tl.where(has, sum_G, 1.0)), float("-inf")), mask=g < G)
    out_GE = acc_GE / tl.where(has, sum_G, 1.0)[:, None]
    tl.store(out + place[:, None] * E + e[None, :], out_GE, mask=(g < G)[:, None] & (e < E)[None, :])


@triton.jit
def _combine(out, lse, result, E: tl.constexpr, E_PAD: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    row, p, e = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, E_PAD)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    lse_P = tl.load(lse + row * PARTS + p)
    weight_P = tl.exp(lse_P - tl.max(lse_P, 0))
    weight_P = weight_P / tl.sum(weight_P, 0)
    out_PE = tl.load(out + (row * PARTS + p)[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
    tl.store(result + row * E + e, tl.sum(out_PE * weight_P[:, None], 0), mask=e < E)


def decode_attention(
    q_BND: Tensor, k_CSKD: Tensor, v_CSKE: Tensor, slots_B: Tensor, starts_B: Tensor, window: int, scale: float,
    cap: float | None, overlap: bool = False,
) -> Tensor:  # fmt: skip
    """(B, N, E). Row b attends to keys 0 to starts_B[b] of cache row slots_B[b], or to the last `window` of them.

    With `overlap` the kernels start while the one before still runs."""
    (B, N, D), K, E = q_BND.shape, k_CSKD.shape[2], v_CSKE.shape[-1]
    q_BND, G, parts = q_BND.to(k_CSKD.dtype).contiguous(), N // K, 8 if B * K >= 64 else 32
    out = torch.empty(B * N * parts, E, dtype=torch.float32, device=q_BND.device)
    lse = torch.empty(B * N * parts, dtype=torch.float32, device=q_BND.device)
    result = torch.empty(B, N, E, dtype=v_CSKE.dtype, device=q_BND.device)
    sizes: dict[str, Any] = {"D_PAD": max(16, triton.next_power_of_2(D)), "E_PAD": max(16, triton.next_power_of_2(E))}
    early: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    _partial[(B, K, parts)](
        q_BND, k_CSKD, v_CSKE, slots_B, starts_B, out, lse, scale, cap or 0.0, window,
        q_BND.stride(0), q_BND.stride(1), *k_CSKD.stride()[:3], *v_CSKE.stride()[:3],
        G=G, D=D, E=E, G_PAD=max(16, triton.next_power_of_2(G)), PARTS=parts, STEP=BLOCK,
        CAPPED=cap is not None, OVERLAP=overlap, **sizes, **early,
    )  # fmt: skip
    _combine[(B * N,)](out, lse, result, E=E, E_PAD=sizes["E_PAD"], PARTS=parts, OVERLAP=overlap, **early)
    return result


@triton.jit
def _output(x, weight, out, row, K: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0)
    weight_row = weight + n.to(tl.int64) * row
    sum_K = tl.zeros((STEP,), tl.float32)
    for at in range(0, K, STEP):
        k = at + tl.arange(0, STEP)
        x_K = tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        weight_K = tl.load(weight_row + k, mask=k < K, other=0.0, eviction_policy="evict_first").to(tl.float32)
        sum_K += weight_K * x_K
    tl.store(out + n, tl.sum(sum_K, 0))


def single_row_product(x_K: Tensor, weight_NK: Tensor) -> Tensor:
    """(N,). A program for each output reads the weights at nearly the memory's bandwidth; cuBLAS at half of it."""
    N, K = weight_NK.shape
    out_N = torch.empty(N, dtype=x_K.dtype, device=x_K.device)
    _output[(N,)](x_K, weight_NK, out_N, weight_NK.stride(0), K=K, STEP=WEIGHTS, num_warps=4)
    return out_N
