"""torch.compile for training, and the precision of forward and backward passes.

The two parts of a block around its attention are compiled once and used by every layer; compiling full models took
minutes and was slower (docs/decisions.md). Chained, a graph reaches from one attention to the next: the residual stream
is written and read once, and its gradients are added inside a kernel. Where something sits between two blocks (hooks,
weights gathered block by block, checkpoints), the parts of a block are used instead. Only training steps of the planned
size and precision run compiled: evaluation, layer samples, trials and generation have other sizes, hooks or precisions,
would each compile again, and run uncompiled.

Precision only concerns passes; weights and moments stay as they are. fp16 also needs a loss scale and fp8 converted
layers (`lowp.py`), tf32 a setting for the whole run.
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
    """The compiled parts of blocks, for training inputs of `rows` x `context` computed in `dtype`."""

    def __init__(self, rows: int, context: int, dtype: torch.dtype, wrap: Callable[..., Any]) -> None:
        self.size, self.dtype = (rows, context), dtype
        self._enter, self._leave = wrap(_enter), wrap(_leave)
        self._between, self._finish = wrap(_between), wrap(_finish)
        self._inner: dict[TransformerBlock, list[nn.Module]] = {}

    def serves(self, block: TransformerBlock, x_BTW: Tensor) -> bool:
        """Whether a block can run compiled. Hooks on its parts are only called uncompiled."""
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
        """Nothing may sit between blocks: neither hooks nor a replaced forward (recompute.py)."""
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
    """From one attention to the next: residual stream, q, k, v."""
    x_BTW = block.leave(x_BTW, None, out_BTNE)
    _, q_BTND, k_BTKD, v_BTKE = following.enter(x_BTW, rotary)
    return x_BTW, q_BTND, k_BTKD, v_BTKE


def _finish(block: TransformerBlock, norm: nn.Module | None, x_BTW: Tensor, out_BTNE: Tensor) -> Tensor:
    x_BTW = block.leave(x_BTW, None, out_BTNE)
    return x_BTW if norm is None else norm(x_BTW)


def compilable(block: nn.Module) -> bool:
    """Whether a block has attention and a dense feed-forward part: sizes inside experts change with every step."""
    return (
        type(block) is TransformerBlock
        and block.has_attention
        and not isinstance(getattr(block, "ffn", None), MixtureOfExperts)
    )


def compile_blocks(model: Decoder, rows: int, context: int, dtype: torch.dtype, chained: bool = False) -> int:
    """Compile the model's blocks; returns how many. `fullgraph`: what cannot be compiled raises, not runs slowly."""
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
    """The dtype of activations; with fp8 only the matmuls are narrower."""
    return TYPES[precision]


def compute_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The autocast context of a forward pass; its backward pass follows. bf16 has fp32's range and needs no loss
    scaling, fp16 does. Converted fp8 layers use fp8 only under autocast; in fp32 they are plain layers."""
    dtype = compute_type(precision)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@contextmanager
def use_tf32(precision: str) -> Iterator[None]:
    """Around forward and backward passes on an NVIDIA GPU: fp32 matmuls and convolutions use TF32 if and only if
    `precision` is tf32 (torch's default for convolutions is TF32). Kernels read the setting when they launch, so it
    must cover the backward pass too.

    Uses torch's older switches, not `fp32_precision`: torch.compile still reads the older ones, and torch raises once
    both kinds were used (2.9 to 2.13). Some versions warn that they will be deprecated.
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
