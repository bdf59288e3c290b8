"""torch.compile for training: the two parts of a block around its attention, compiled once and used by every layer.

Whole models compile for minutes and came out slower (docs/decisions.md); blocks share one graph. Only training steps of
the planned size and precision are served: evaluation, looks inside, trials and generation have other sizes, hooks or
precisions, each of which would compile again, and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.model.attention import Rotary
from bessemer.model.block import Block
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import Decoder, compute_dtype

Parts = tuple[Tensor, Tensor, Tensor, Tensor]


class CompiledBlocks:
    """Serves inputs of `rows` x `context`, computed in `dtype`, while gradients are wanted."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype, wrap: Callable[..., Any]) -> None:
        self.size, self.dtype = (rows, context), dtype
        self._enter, self._leave = wrap(_enter), wrap(_leave)
        self._inner: dict[Block, list[nn.Module]] = {}

    def serves(self, block: Block, x_BTW: Tensor) -> bool:
        """Hooks on a block's parts are only called on the plain way."""
        if x_BTW.shape[:2] != self.size or not (block.training and torch.is_grad_enabled()):
            return False
        if compute_dtype(x_BTW) != self.dtype:
            return False
        inner = self._inner.setdefault(block, [module for module in block.modules() if module is not block])
        return not any(module._forward_hooks or module._forward_pre_hooks for module in inner)

    def enter(self, block: Block, x_BTW: Tensor, rotary: Rotary | None) -> Parts:
        parts: Parts = self._enter(block, x_BTW, rotary)
        return parts

    def leave(self, block: Block, x_BTW: Tensor, h_BTW: Tensor, out_BTNE: Tensor) -> Tensor:
        out: Tensor = self._leave(block, x_BTW, h_BTW, out_BTNE)
        return out


def _enter(block: Block, x_BTW: Tensor, rotary: Rotary | None) -> Parts:
    return block.enter(x_BTW, rotary)


def _leave(block: Block, x_BTW: Tensor, h_BTW: Tensor, out_BTNE: Tensor) -> Tensor:
    return block.leave(x_BTW, h_BTW, out_BTNE)


def compilable(block: nn.Module) -> bool:
    """Attention and a dense feed-forward part: the sizes inside experts change with every step."""
    return (
        type(block) is Block and block.has_attention and not isinstance(getattr(block, "ffn", None), MixtureOfExperts)
    )


def compile_blocks(model: Decoder, rows: int, context: int, dtype: torch.dtype) -> int:
    """How many blocks will run compiled. `fullgraph`: what cannot be compiled says so instead of running slowly."""
    found = [block for block in model.blocks if compilable(block)]
    wrap = torch.compile(dynamic=False, fullgraph=True)
    served = CompiledBlocks(rows, context, dtype, wrap)
    for block in found:
        block.compiled = served  # type: ignore[assignment]
    return len(found)
