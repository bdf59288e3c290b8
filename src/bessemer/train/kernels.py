"""Triton kernels: cross-entropy of logits with its gradient in one visit, and casts to fp8, with one scale per
tensor, in the two layouts that matmuls need, fused with SwiGLU.

A row of 128K logits in bf16 is 256 KB: the cross-entropy reads it for maximum and sum, reads it again for the gradient,
and writes it. Plain torch needs six passes over float32.

Hopper multiplies fp8 only if the summed dimension is contiguous in both factors, so the backward pass needs most
tensors row-major and transposed. torch.compile stores the transpose byte by byte, at half the memory bandwidth; here a
tile is transposed on chip. A scale needs the tensor's largest number first, from a separate pass that leaves one
maximum per program; the casts reduce these again instead of waiting for another launch.

Legend: R rows (tokens), F inner width, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # the best of 2048 to 16384 and 4 to 32 on an H200, for vocabularies of 50K and 128K
LOW = -1e30  # below every logit, and finite: inf - inf is NaN


@triton.jit
def _cross_entropy_rows(  # type: ignore[no-untyped-def]
    logits, stride, targets, weights, nll, loss, correct, words, scale, logit_scale, cap, z,
    CAPPED: tl.constexpr, LEARNS: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    # Each lane has its own running maximum and sum: one exponential per id, and no synchronization.
    top = tl.full((BLOCK,), LOW, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    best = lanes  # where each lane's maximum is
    for start in range(0, words, BLOCK):
        inside = start + lanes < words
        x = tl.load(logits + start + lanes, mask=inside, other=0.0).to(tl.float32) * logit_scale
        if CAPPED:
            x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
        x = tl.where(inside, x, LOW)
        fade = tl.exp(-tl.abs(x - top))
        total = tl.where(x > top, total * fade + 1, total + fade)
        best = tl.where(x > top, start + lanes, best)
        top = tl.where(x > top, x, top)  # NaN is lost here but kept in the sum
    highest = tl.max(top, axis=0)
    norm = highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))
    target = tl.load(targets + row)
    at_target = tl.load(logits + target).to(tl.float32) * logit_scale
    if CAPPED:
        at_target = cap * (2 * tl.sigmoid(2 * at_target / cap) - 1)
    tl.store(nll + row, norm - at_target)
    tl.store(loss + row, norm - at_target + z * norm * norm)
    tl.store(correct + row, tl.min(tl.where(top == highest, best, words), axis=0) == target)
    if LEARNS:
        weight = tl.load(weights + row).to(tl.float32) * scale * logit_scale
        share = weight * (1 + 2 * z * norm)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for start in range(0, words, BLOCK):
            inside = start + lanes < words
            x = tl.load(logits + start + lanes, mask=inside, other=0.0).to(tl.float32) * logit_scale
            if CAPPED:
                x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
            gradient = share * tl.exp(x - norm) - tl.where(start + lanes == target, weight, 0.0)
            if CAPPED:
                gradient *= 1 - (x / cap) * (x / cap)
            tl.store(logits + start + lanes, gradient.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_rows_(
    logits_CP: Tensor, words: int, targets_C: Tensor, weights_C: Tensor, scale: float, learns: bool,
    logit_scale: float = 1.0, cap: float | None = None, z: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(cross-entropy, loss, whether the target is the most likely id) of each row. If it `learns`, the gradients of
    `scale` times the weighted sum of losses replace the first `words` columns of the logits."""
    rows = logits_CP.shape[0]
    assert logits_CP.stride(1) == 1
    nll_C, loss_C = (torch.empty(rows, dtype=torch.float32, device=logits_CP.device) for _ in range(2))
    correct_C = torch.empty(rows, dtype=torch.bool, device=logits_CP.device)
    _cross_entropy_rows[(rows,)](
        logits_CP, logits_CP.stride(0), targets_C, weights_C, nll_C, loss_C, correct_C, words, scale, logit_scale,
        cap or 1.0, z, CAPPED=cap is not None, LEARNS=learns, LOW=LOW, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return nll_C, loss_C, correct_C


PROGRAMS = 1024  # of the pass for maxima
FLAT, TILE = 2048, 64
FOUR = """{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{kind}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{kind}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
}}"""
TO_E4M3, TO_E5M2 = tl.constexpr(FOUR.format(kind="e4m3")), tl.constexpr(FOUR.format(kind="e5m2"))
TINY = 1e-12  # smallest maximum: a tensor of zeros stays zeros


@triton.jit
def _scale(largest, most: tl.constexpr, PROGRAMS: tl.constexpr, TINY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor that makes the largest number `most`, so that no cast overflows. Maxima ignore NaN; the sum keeps it,
    so that the guard sees it."""
    maxima = tl.load(largest + tl.arange(0, PROGRAMS))
    top = tl.max(maxima, axis=0) + tl.sum(maxima * 0.0, axis=0)
    return most / tl.where(top < TINY, TINY, top)


@triton.jit
def _gate(g, u):  # type: ignore[no-untyped-def]
    return g * tl.sigmoid(g) * u


@triton.jit
def _gate_gradients(dh, g, u):  # type: ignore[no-untyped-def]
    sigmoid = tl.sigmoid(g)
    return dh * u * sigmoid * (1 + g * (1 - sigmoid)), dh * g * sigmoid


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    dh, gu, largest, rows, F: tl.constexpr, BACKWARD: tl.constexpr, FLAT: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Each program's largest magnitude of SwiGLU's output, or of both its gradients."""
    lanes = tl.arange(0, FLAT)
    most, poison = tl.zeros((FLAT,), tl.float32), tl.zeros((FLAT,), tl.float32)
    total = rows.to(tl.int64) * F
    for start in range(tl.program_id(0).to(tl.int64) * FLAT, total, PROGRAMS * FLAT):
        at = start + lanes
        inside, row, column = at < total, at // F, at % F
        g = tl.load(gu + row * (2 * F) + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(gu + row * (2 * F) + F + column, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
            dg, du = _gate_gradients(d, g, u)
            most, poison = tl.maximum(most, tl.maximum(tl.abs(dg), tl.abs(du))), poison + (dg + du) * 0.0
        else:
            h = _gate(g, u)
            most, poison = tl.maximum(most, tl.abs(h)), poison + h * 0.0
    tl.store(largest + tl.program_id(0), tl.max(most, axis=0) + tl.sum(poison, axis=0))


@triton.jit
def _cast_gated(  # type: ignore[no-untyped-def]
    gu, largest, out, scale, rows, F: tl.constexpr, MOST: tl.constexpr, FLAT: tl.constexpr, PROGRAMS: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    times = _scale(largest, MOST, PROGRAMS, TINY)
    at = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    inside, row, column = at < rows.to(tl.int64) * F, at // F, at % F
    g = tl.load(gu + row * (2 * F) + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu + row * (2 * F) + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (_gate(g, u) * times).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(scale, 1 / times)


@triton.jit
def _store(out, value, row, column, stride):  # type: ignore[no-untyped-def]
    tl.store(out.to(tl.pointer_type(tl.uint8), bitcast=True) + row[:, None] * stride + column[None, :], value)


@triton.jit
def _bytes(value, E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to fp8 as uint8, four at a time into a full register: Triton's own cast fills halves of registers, and ptxas
    12.8 then reads uninitialised registers if one is both stored in a row and used otherwise."""
    cast: tl.constexpr = TO_E5M2 if E5M2 else TO_E4M3
    return tl.inline_asm_elementwise(cast, "=r,r,r,r,r", [value], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _store_turned(out, words, quad, column, rows):  # type: ignore[no-untyped-def]
    """Store transposed: each word holds four rows of a column."""
    words_of = out.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.store(words_of + column[None, :] * (rows // 4) + quad[:, None], words)


@triton.jit
def _cast_gate_gradients(  # type: ignore[no-untyped-def]
    dh, gu, largest, h_scale, out, turned, h_turned, scale, rows, F: tl.constexpr, MOST: tl.constexpr,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Rows and columns are full tiles, as fp8 matmuls require."""
    times, h_times = _scale(largest, MOST, PROGRAMS, TINY), 1 / tl.load(h_scale)
    quad = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    f = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    dg_words = tl.zeros((TILE // 4, TILE), tl.uint32)
    du_words, h_words = dg_words, dg_words
    for place in tl.static_range(4):
        r = 4 * quad + place
        d = tl.load(dh + r[:, None] * F + f[None, :]).to(tl.float32)
        g = tl.load(gu + r[:, None] * (2 * F) + f[None, :]).to(tl.float32)
        u = tl.load(gu + r[:, None] * (2 * F) + F + f[None, :]).to(tl.float32)
        dg, du = _gate_gradients(d, g, u)
        dg, du = _bytes(dg * times, E5M2=True), _bytes(du * times, E5M2=True)
        _store(out, dg, r, f, 2 * F)
        _store(out, du, r, f + F, 2 * F)
        h = _bytes(_gate(g, u) * h_times, E5M2=False)
        dg_words |= dg.to(tl.uint32) << (8 * place)
        du_words |= du.to(tl.uint32) << (8 * place)
        h_words |= h.to(tl.uint32) << (8 * place)
    _store_turned(turned, dg_words, quad, f, rows.to(tl.int64))
    _store_turned(turned, du_words, quad, f + F, rows.to(tl.int64))
    _store_turned(h_turned, h_words, quad, f, rows.to(tl.int64))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1 / times)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, times, out, turned, rows, W: tl.constexpr, E5M2: tl.constexpr, BOTH: tl.constexpr, TILE: tl.constexpr
):
    quad = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    w = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    words, by = tl.zeros((TILE // 4, TILE), tl.uint32), tl.load(times)
    for place in tl.static_range(4):
        r = 4 * quad + place
        value = _bytes(tl.load(x + r[:, None] * W + w[None, :]).to(tl.float32) * by, E5M2)
        if BOTH:
            _store(out, value, r, w, W)
        words |= value.to(tl.uint32) << (8 * place)
    _store_turned(turned, words, quad, w, rows.to(tl.int64))


def gated(gu_RF2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """SwiGLU of the concatenated gate and up outputs in fp8, and its scale."""
    rows, F = gu_RF2.shape[0], gu_RF2.shape[1] // 2
    largest, scale = _floats(gu_RF2, PROGRAMS), _floats(gu_RF2, 1)
    _largest[(PROGRAMS,)](gu_RF2, gu_RF2, largest, rows, F, BACKWARD=False, FLAT=FLAT, PROGRAMS=PROGRAMS)
    out_RF = torch.empty(rows, F, dtype=dtype, device=gu_RF2.device)
    _cast_gated[(triton.cdiv(rows * F, FLAT),)](
        gu_RF2, largest, out_RF, scale, rows, F, MOST=_most(dtype), FLAT=FLAT, PROGRAMS=PROGRAMS, TINY=TINY
    )
    return out_RF, scale


def gate_gradients(
    dh_RF: Tensor, gu_RF2: Tensor, h_scale: Tensor, dtype: torch.dtype, h_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gated`'s input row-major and transposed, their scale, and its output transposed."""
    rows, F = dh_RF.shape
    assert rows % TILE == 0 and F % TILE == 0 and dh_RF.is_contiguous() and gu_RF2.is_contiguous()
    largest, scale = _floats(dh_RF, PROGRAMS), _floats(dh_RF, 1)
    _largest[(PROGRAMS,)](dh_RF, gu_RF2, largest, rows, F, BACKWARD=True, FLAT=FLAT, PROGRAMS=PROGRAMS)
    out_RF2 = torch.empty(rows, 2 * F, dtype=dtype, device=dh_RF.device)
    turned_F2R = torch.empty(2 * F, rows, dtype=dtype, device=dh_RF.device)
    h_FR = torch.empty(F, rows, dtype=h_dtype, device=dh_RF.device)
    _cast_gate_gradients[(rows // TILE, F // TILE)](
        dh_RF, gu_RF2, largest, h_scale, out_RF2, turned_F2R, h_FR, scale, rows, F, MOST=_most(dtype),
        TILE=TILE, PROGRAMS=PROGRAMS, TINY=TINY,
    )  # fmt: skip
    return out_RF2, turned_F2R, scale, h_FR


def turned(x_RW: Tensor, times: Tensor, dtype: torch.dtype, both: bool) -> tuple[Tensor, Tensor]:
    """x times a factor in fp8: row-major if `both`, and transposed."""
    rows, W = x_RW.shape
    assert rows % TILE == 0 and W % TILE == 0 and x_RW.is_contiguous()
    out_RW = torch.empty(rows if both else 0, W, dtype=dtype, device=x_RW.device)
    turned_WR = torch.empty(W, rows, dtype=dtype, device=x_RW.device)
    _turn[(rows // TILE, W // TILE)](
        x_RW, times, out_RW, turned_WR, rows, W, E5M2=dtype == torch.float8_e5m2, BOTH=both, TILE=TILE
    )
    return out_RW, turned_WR


def _floats(like: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device=like.device)


def _most(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max)
