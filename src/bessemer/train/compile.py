"""torch.compile for training: the two parts of a block around its attention, compiled once and used by every layer.

Whole models compile for minutes and came out slower (docs/decisions.md); blocks share one graph. Chained, a graph
reaches from one attention to the next: the residual stream is written and read once, and its gradients meet inside a
kernel. Where something stands at the border of two blocks (hooks, weights that are gathered block by block,
checkpoints), the parts of a block serve instead. Only training steps of the planned size and precision are served:
evaluation, looks inside, trials and generation have other sizes, hooks or precisions, each of which would compile
again, and run as they are.

The precision of forward and backward passes; weights and moments stay as they are.

fp16 needs a loss scale besides (`scaling.py`), fp8 converted layers (`fp8.py`), tf32 a setting for the whole run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from bessemer.model.attention import AttentionInputs, Rotary
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import Decoder, ProjectedInputs, TransformerBlock, compute_dtype


class CompiledBlocks:
    """Serves inputs of `rows` x `context`, computed in `dtype`, while gradients are wanted."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype, wrap: Callable[..., Any]) -> None:
        self.size, self.dtype = (rows, context), dtype
        self._enter, self._leave = wrap(_enter), wrap(_leave)
        self._between, self._finish = wrap(_between), wrap(_finish)
        self._inner: dict[TransformerBlock, list[nn.Module]] = {}

    def serves(self, block: TransformerBlock, x_BTW: Tensor) -> bool:
        """Hooks on a block's parts are only called on the plain way."""
        if x_BTW.shape[:2] != self.size or not (block.training and torch.is_grad_enabled()):
            return False
        if compute_dtype(x_BTW) != self.dtype:
            return False
        inner = self._inner.setdefault(block, [module for module in block.modules() if module is not block])
        return not any(module._forward_hooks or module._forward_pre_hooks for module in inner)

    def enter(self, block: TransformerBlock, x_BTW: Tensor, rotary: Rotary | None) -> ProjectedInputs:
        parts: ProjectedInputs = self._enter(block, x_BTW, rotary)
        return parts

    def leave(self, block: TransformerBlock, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
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

    def through(self, model: Decoder, x_BTW: Tensor, place: AttentionInputs) -> Tensor:
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


def _blocks(model: Decoder) -> list[TransformerBlock]:
    return cast("list[TransformerBlock]", list(model.blocks))


def _enter(block: TransformerBlock, x_BTW: Tensor, rotary: Rotary | None) -> ProjectedInputs:
    return block.enter(x_BTW, rotary)


def _leave(block: TransformerBlock, x_BTW: Tensor, h_BTW: Tensor | None, out_BTNE: Tensor) -> Tensor:
    return block.leave(x_BTW, h_BTW, out_BTNE)


def _between(
    block: TransformerBlock, following: TransformerBlock, x_BTW: Tensor, out_BTNE: Tensor, rotary: Rotary | None
) -> Any:
    """From one attention to the next: the residual stream, q, k, v."""
    x_BTW = block.leave(x_BTW, None, out_BTNE)
    _, q_BTND, k_BTKD, v_BTKE = following.enter(x_BTW, rotary)
    return x_BTW, q_BTND, k_BTKD, v_BTKE


def _finish(block: TransformerBlock, norm: nn.Module | None, x_BTW: Tensor, out_BTNE: Tensor) -> Tensor:
    x_BTW = block.leave(x_BTW, None, out_BTNE)
    return x_BTW if norm is None else norm(x_BTW)


def compilable(block: nn.Module) -> bool:
    """Attention and a dense feed-forward part: the sizes inside experts change with every step."""
    return (
        type(block) is TransformerBlock
        and block.has_attention
        and not isinstance(getattr(block, "ffn", None), MixtureOfExperts)
    )


def compile_blocks(model: Decoder, rows: int, context: int, dtype: torch.dtype, chained: bool = False) -> int:
    """How many blocks will run compiled. `fullgraph`: what cannot be compiled says so instead of running slowly."""
    blocks = [block for block in model.blocks if compilable(block)]
    wrap = torch.compile(dynamic=False, fullgraph=True)
    served = CompiledBlocks(rows, context, dtype, wrap)
    for block in blocks:
        block.compiled = served  # type: ignore[assignment]
    if chained and blocks and len(blocks) == len(model.blocks) and model.shape.parallel != "one_norm":
        model.chain = served
    return len(blocks)


FP8 = ("fp8", "fp8_rowwise")
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(
    FP8, torch.bfloat16
)


def compute_type(precision: str) -> torch.dtype:
    """The type that layers compute and pass on in; with fp8 only their products are narrower."""
    return TYPES[precision]


def compute_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """For a forward pass; its backward pass follows. bf16 has fp32's range and needs no loss scaling, fp16 does.

    Converted fp8 layers compute in fp8 under autocast alone, so inside fp32 they are plain layers again.
    """
    dtype = compute_type(precision)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@contextmanager
def use_tf32(precision: str) -> Iterator[None]:
    """For forward and backward passes on an NVIDIA GPU: fp32 products round their factors to TF32 if `precision` is
    tf32 and never otherwise, convolutions too (torch's default there is TF32). Kernels read this when they start, so it
    has to stand around the backward pass as well.

    torch's older switches, not `fp32_precision`: torch.compile still reads the older ones, and torch refuses to answer
    once both kinds were used (2.9 to 2.13). Some versions say once that they will be deprecated.
    """
    warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    rounded = precision == "tf32"
    try:
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        torch.backends.cudnn.allow_tf32 = rounded
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
