"""torch.compile for training: the two parts of a block around its attention, compiled once and used by every layer.

Whole models compile for minutes and came out slower (docs/decisions.md); blocks share one graph. Chained, a graph
reaches from one attention to the next: the residual stream is written and read once, and its gradients meet inside a
kernel. Where something stands at the border of two blocks (hooks, weights that are gathered block by block,
checkpoints), the parts of a block serve instead. Only training steps of the planned size and precision are served:
evaluation, looks inside, trials and generation have other sizes, hooks or precisions, each of which would compile
again, and run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from bessemer.model.attention import Place, Rotary
from bessemer.model.block import Block, Entered
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import Decoder, compute_dtype


class CompiledBlocks:
    """Serves inputs of `rows` x `context`, computed in `dtype`, while gradients are wanted."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype, wrap: Callable[..., Any]) -> None:
        self.size, self.dtype = (rows, context), dtype
        self._enter, self._leave = wrap(_enter), wrap(_leave)
        self._between, self._finish = wrap(_between), wrap(_finish)
        self._inner: dict[Block, list[nn.Module]] = {}

    def serves(self, block: Block, x_BTW: Tensor) -> bool:
        """Hooks on a block's parts are only called on the plain way."""
        if x_BTW.shape[:2] != self.size or not (block.training and torch.is_grad_enabled()):
            return False
        if compute_dtype(x_BTW) != self.dtype:
            return False
        inner = self._inner.setdefault(block, [module for module in block.modules() if module is not block])
        return not any(module._forward_hooks or module._forward_pre_hooks for module in inner)

    def enter(self, block: Block, x_BTW: Tensor, rotary: Rotary | None) -> Entered:
        parts: Entered = self._enter(block, x_BTW, rotary)
        return parts

    def leave(self, block: Block, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
        out: Tensor = self._leave(block, x_BTW, h_BTW, out_BTNE)
        return out

    def serves_all(self, model: Decoder, x_BTW: Tensor) -> bool:
        """Nothing may stand at a block's border: neither hooks nor a forward pass of another kind (recompute.py)."""
        borders = [*model.blocks, *([] if model.shape.norm_place == "post" else [model.norm])]
        if any(module._forward_hooks or module._forward_pre_hooks for module in borders):
            return False
        return all(
            block.compiled is self and not hasattr(block.forward, "plain") and self.serves(block, x_BTW)
            for block in _blocks(model)
        )

    def through(self, model: Decoder, x_BTW: Tensor, place: Place) -> Tensor:
        block, *rest = _blocks(model)
        _, q_BTND, k_BTKD, v_BTKE = self._enter(block, x_BTW, block.attention.rotary(place))
        for following in rest:
            out_BTNE = block.attention.attend(q_BTND, k_BTKD, v_BTKE, place)
            made = self._between(block, following, x_BTW, out_BTNE, following.attention.rotary(place))
            x_BTW, q_BTND, k_BTKD, v_BTKE = made
            block = following
        out_BTNE = block.attention.attend(q_BTND, k_BTKD, v_BTKE, place)
        hidden_BTW: Tensor = self._finish(block, getattr(model, "norm", None), x_BTW, out_BTNE)
        return hidden_BTW


def _blocks(model: Decoder) -> list[Block]:
    return cast("list[Block]", list(model.blocks))


def _enter(block: Block, x_BTW: Tensor, rotary: Rotary | None) -> Entered:
    return block.enter(x_BTW, rotary)


def _leave(block: Block, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
    return block.leave(x_BTW, h_BTW, out_BTNE)


def _between(block: Block, following: Block, x_BTW: Tensor, out_BTNE: Tensor, rotary: Rotary | None) -> Any:
    """From one attention to the next: the residual stream, q, k, v."""
    x_BTW = block.leave(x_BTW, None, out_BTNE)
    _, q_BTND, k_BTKD, v_BTKE = following.enter(x_BTW, rotary)
    return x_BTW, q_BTND, k_BTKD, v_BTKE


def _finish(block: Block, norm: nn.Module | None, x_BTW: Tensor, out_BTNE: Tensor) -> Tensor:
    x_BTW = block.leave(x_BTW, None, out_BTNE)
    return x_BTW if norm is None else norm(x_BTW)


def compilable(block: nn.Module) -> bool:
    """Attention and a dense feed-forward part: the sizes inside experts change with every step."""
    return (
        type(block) is Block and block.has_attention and not isinstance(getattr(block, "ffn", None), MixtureOfExperts)
    )


def compile_blocks(model: Decoder, rows: int, context: int, dtype: torch.dtype, chained: bool = False) -> int:
    """How many blocks will run compiled. `fullgraph`: what cannot be compiled says so instead of running slowly."""
    found = [block for block in model.blocks if compilable(block)]
    wrap = torch.compile(dynamic=False, fullgraph=True)
    served = CompiledBlocks(rows, context, dtype, wrap)
    for block in found:
        block.compiled = served  # type: ignore[assignment]
    if chained and found and len(found) == len(model.blocks) and model.shape.parallel != "one_norm":
        model.chain = served
    return len(found)
