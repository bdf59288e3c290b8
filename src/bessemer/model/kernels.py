"""Triton kernel that writes the dense numbers of a weight in NF4 (quantized.py): half a byte read per number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # bytes of codes


@triton.jit
def _dequantize(codes, scales, maxima, offset, levels, dynamic, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at * 2 < count
    byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    block = at // 32  # of 64 numbers
    unit = tl.load(dynamic + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
    scale = unit * tl.load(maxima + block // 256, mask=inside, other=0.0) + tl.load(offset)
    first = tl.load(levels + (byte >> 4)) * scale
    second = tl.load(levels + (byte & 15)) * scale
    both = tl.interleave(first, second)
    lanes = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(out + lanes, both, mask=lanes < count)


def dequantize_nf4(
    codes: Tensor, scales: Tensor, maxima: Tensor, offset: Tensor, levels: Tensor, dynamic: Tensor, count: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    out = torch.empty(count, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(len(codes), BLOCK),)
    # Without fusion a product and a sum round twice, as in torch.
    _dequantize[grid](
        codes, scales, maxima, offset, levels, dynamic, out, count, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
    )
    return out
