"""AdamW as one Triton kernel, and Muon's step as two, around its iteration: weights in fp32, or split into bf16 and the
remaining 16 bits; moments in fp32.

AdamW moves 28 bytes per parameter (26 split, with bf16 gradients) at the rate of a copy. On an H200 torch's fused
kernel reaches two thirds of that, and torch.compile of the same arithmetic half (docs/decisions.md).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _unbiased(exponent):  # type: ignore[no-untyped-def]
    """1 - e^exponent, by its series where the subtraction would cancel."""
    series = -exponent * (1 + exponent * (0.5 + exponent * (0.16666667 + exponent * 0.041666667)))
    return tl.where(exponent > -0.02, series, 1 - tl.exp(exponent))


@triton.jit
def _read_weight(weight, remainder, lanes, inside, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:
        high = tl.load(weight + lanes, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(remainder + lanes, mask=inside, other=0).to(tl.int32)
        w = (high + low).to(tl.float32, bitcast=True)
    else:
        w = tl.load(weight + lanes, mask=inside, other=0.0)
    return w


@triton.jit
def _write_weight(weight, remainder, w, lanes, inside, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        bits = tl.where(w != w, 0x7FC00000, bits)
        high = (bits + 0x8000) & -0x10000  # like `low_memory.split_weights`: ties round up
        tl.store(weight + lanes, (high >> 16).to(tl.int16), mask=inside)
        tl.store(remainder + lanes, (bits - high).to(tl.int16), mask=inside)
    else:
        tl.store(weight + lanes, w, mask=inside)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, remainder, grad, first, second, size, count, reject, divisor, lr, decay, new1, new2, log1, log2, eps,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(reject) != 0:
        return
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < size
    rate = tl.load(lr)
    after = tl.load(count) + 1
    g = tl.load(grad + lanes, mask=inside, other=0.0).to(tl.float32) / tl.load(divisor)
    m = tl.load(first + lanes, mask=inside, other=0.0)
    v = tl.load(second + lanes, mask=inside, other=0.0)
    w = _read_weight(weight, remainder, lanes, inside, SPLIT)
    m += new1 * (g - m)
    v += new2 * (g * g - v)
    w -= rate * tl.load(decay) * w
    denominator = tl.sqrt(v / _unbiased(after * log2)) + eps
    w -= rate * (m / _unbiased(after * log1)) / denominator
    tl.store(first + lanes, m, mask=inside)
    tl.store(second + lanes, v, mask=inside)
    _write_weight(weight, remainder, w, lanes, inside, SPLIT)


def adamw(
    betas: tuple[float, float], eps: float, weight: Tensor, grad: Tensor, state: dict[str, Tensor], count: Tensor,
    reject: Tensor, divisor: Tensor, lr: Tensor, decay: Tensor,
) -> None:  # fmt: skip
    """One step of a flat piece, unless `reject` is 1; the arguments are those of `low_memory.update`."""
    import torch

    split, size = "remainder" in state, weight.numel()
    held = weight.view(torch.int16) if split else weight
    shares = (1 - beta for beta in betas)  # in float64: in float32 1 - 0.999 is wrong in the fifth digit
    logs = (math.log(beta) if beta else -math.inf for beta in betas)
    _adamw[(triton.cdiv(size, BLOCK),)](
        held, state["remainder"] if split else held, grad, state["exp_avg"], state["exp_avg_sq"], size, count, reject,
        divisor, lr, decay, *shares, *logs, eps, SPLIT=split, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _momentum(  # type: ignore[no-untyped-def]
    buffer, grad, out, size, reject, divisor, new, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < size
    g = tl.load(grad + lanes, mask=inside, other=0.0).to(tl.float32) / tl.load(divisor)
    m = tl.load(buffer + lanes, mask=inside, other=0.0)
    m += new * (g - m)
    matrix = g + (1 - new) * (m - g) if NESTEROV else m
    tl.store(out + lanes, matrix.to(out.dtype.element_ty), mask=inside)
    tl.store(buffer + lanes, m, mask=inside & (tl.load(reject) == 0))


def momentum(
    beta: float, nesterov: bool, buffer: Tensor, grad: Tensor, out: Tensor, reject: Tensor, divisor: Tensor
) -> None:
    """Updates the buffer unless `reject` is 1; `out` is the matrix to orthogonalize, in its own precision."""
    size = buffer.numel()
    _momentum[(triton.cdiv(size, BLOCK),)](
        buffer, grad, out, size, reject, divisor, 1 - beta, NESTEROV=nesterov, BLOCK=BLOCK, num_warps=WARPS
    )


@triton.jit
def _apply(  # type: ignore[no-untyped-def]
    weight, remainder, update, size, reject, rate, shrink, SPLIT: tl.constexpr, CAUTIOUS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(reject) != 0:
        return
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < size
    u = tl.load(update + lanes, mask=inside, other=0.0).to(tl.float32)
    w = _read_weight(weight, remainder, lanes, inside, SPLIT)
    decayed = w - shrink * w
    if CAUTIOUS:
        decayed = tl.where(u * w > 0, decayed, w)
    _write_weight(weight, remainder, decayed - rate * u, lanes, inside, SPLIT)


def apply_update(
    weight: Tensor, remainder: Tensor | None, update: Tensor, reject: Tensor, rate: float, shrink: float,
    cautious: bool,
) -> None:  # fmt: skip
    """weight (1 - shrink) - rate update, unless `reject` is 1; with `cautious` only weights that the update makes
    smaller shrink."""
    import torch

    held, size = weight if remainder is None else weight.view(torch.int16), weight.numel()
    _apply[(triton.cdiv(size, BLOCK),)](
        held, held if remainder is None else remainder, update, size, reject, rate, shrink,
        SPLIT=remainder is not None, CAUTIOUS=cautious, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
