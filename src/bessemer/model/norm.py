"""RMSNorm and LayerNorm, with the weight stored as its distance from an offset where a family has it so (Gemma: 1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.spec.shape import ModelShape


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.size, self.eps, self.offset = (size,), eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            # Of mixed types torch has no kernel, and takes six passes.
            return F.rms_norm(x, self.size, self.weight.to(x.dtype), self.eps)
        # In float32 up to the last product, as Gemma was trained.
        exact = x if x.dtype == torch.float64 else x.float()
        weight = self.weight.to(exact.dtype) + self.offset
        return (F.rms_norm(exact, self.size, None, self.eps) * weight).to(x.dtype)


def make_norm(shape: ModelShape, size: int | None = None) -> nn.Module:
    """The norm that the shape asks for, over the width or another size."""
    if shape.norm == "layer":
        return nn.LayerNorm(size or shape.width, eps=shape.norm_eps)
    return RMSNorm(size or shape.width, shape.norm_eps, shape.norm_offset)
