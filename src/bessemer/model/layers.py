"""RMSNorm and LayerNorm, with the weight stored as its distance from an offset where a family has it so (Gemma: 1).

The feed-forward part: down(activation(up(x))), or gated: down(activation(gate(x)) * up(x)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.spec.shape import Activation, ModelShape


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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """`gate` is there only where it is gated."""

    def __init__(self, width: int, inner: int, activation: Activation, gated: bool, bias: bool = False) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activate(self.up(x_BTW)))
        return self.down(self.activate(self.gate(x_BTW)) * self.up(x_BTW))
