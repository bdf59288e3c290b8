"""Cross-entropy of rows of logits in one visit: loss out, gradient written over the logits.

A row of 128K words in bf16 is 256 KB: it is read for its maximum and sum, read again for the gradient, and written. In
plain torch the same takes six passes over float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8  # the best of 2048 to 16384 and 4 to 32 on an H200, for 50K and 128K words
LOW = -1e30  # below every logit, and finite: infinity less itself is not a number


@triton.jit
def _cross_entropy_rows(  # type: ignore[no-untyped-def]
    logits, stride, targets, weights, nll, loss, correct, words, scale, logit_scale, cap, z,
    CAPPED: tl.constexpr, LEARNS: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    # Each lane keeps its own running maximum and sum: one exponential a word, and no wait for other lanes.
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
        top = tl.where(x > top, x, top)  # a maximum that lets NaN through is not needed: the sum has it
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
        tl.debug_barrier()  # the target's logit is read before anybody writes over it
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
    """(cross-entropy, loss, whether the target is the first of the likeliest words) of each row. If it learns, the
    gradients of `scale` times the weighted sum of losses replace the first `words` columns of the logits."""
    rows = logits_CP.shape[0]
    assert logits_CP.stride(1) == 1
    nll_C, loss_C = (torch.empty(rows, dtype=torch.float32, device=logits_CP.device) for _ in range(2))
    correct_C = torch.empty(rows, dtype=torch.bool, device=logits_CP.device)
    _cross_entropy_rows[(rows,)](
        logits_CP, logits_CP.stride(0), targets_C, weights_C, nll_C, loss_C, correct_C, words, scale, logit_scale,
        cap or 1.0, z, CAPPED=cap is not None, LEARNS=learns, LOW=LOW, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return nll_C, loss_C, correct_C
