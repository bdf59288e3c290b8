"""The feed-forward part: down(activation(up(x))), or gated: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.spec.shape import Activation

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
