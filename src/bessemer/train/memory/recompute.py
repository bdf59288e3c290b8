"""What of a block's forward pass is kept for its backward pass, and what is computed again: `memory.activations`.

Compiled blocks leave it to torch's partitioner, whose budget is one number for all graphs: just below 1 it recomputes
all that costs no matrix product (norms, the activation and its product, casts of weights), and further down products
too, the cheapest for their room first. Blocks as they are use checkpoints. Gradients are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch._functorch.config as partitioner
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bessemer.errors import UserError
from bessemer.model.attention import Place
from bessemer.model.block import TransformerBlock
from bessemer.model.transformer import Decoder
from bessemer.train.memory.offload import Offload
from bessemer.train.memory.tiles import fits, tiled

How = str | float  # none, selective, full, or the share that is kept
FREE = 0.99  # a budget that is met without a matrix product: a third less than none for Llama's blocks
aten = torch.ops.aten
# What selective keeps of a plain block: outputs of matrix products and of attention, so that neither runs again.
# Measured on Llama's blocks, ffn = 4 x width, in fp32: none keeps 25 widths a token, this 14 for no FLOP more that
# torch counts, a checkpoint around the feed-forward part 9 for 18 % more, and full 1 for 24 %.
KEPT = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default,
    aten._scaled_mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip


def apply(model: Decoder, how: How, offload: bool = False) -> None:
    """Set how the model's blocks are trained from here on, those that are compiled and those that are not. May be
    called again with another choice, at the price of compiling anew; call it after `compile_blocks`."""
    blocks = list(model.blocks)
    if not blocks and (how != "none" or offload):
        raise UserError(
            f"memory.activations: {how} needs the model's layers, and none were found in {model.shape.wrapped[:40]}: "
            "write none"
        )
    compiled = [getattr(block, "compiled", None) is not None for block in blocks]
    budget = FREE if how == "selective" else 1.0 if isinstance(how, str) else float(how)
    if any(compiled) and partitioner.activation_memory_budget != budget:
        partitioner.activation_memory_budget = budget  # type: ignore[assignment]
        torch.compiler.reset()  # graphs that were made under the other budget
    store = Offload(model) if offload else None
    again, random = _recomputed(how, len(blocks)), _draws(model)
    for i, block in enumerate(blocks):
        plain = getattr(block.forward, "plain", block.forward)
        run = plain
        if again[i] and (how == "full" or not compiled[i]):
            more: dict[str, Any] = {"context_fn": _keep_products} if how == "selective" else {}
            # Saving the generator's state costs launches, for nothing where nothing is drawn.
            run = partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=random, **more)
            if how == "full" and compiled[i] and not random:
                run = _by_length(cast("TransformerBlock", block), run)
        block.forward = plain if run is plain and store is None else _trained(block, plain, run, store, i == 0)


def _recomputed(how: How, layers: int) -> list[bool]:
    """Which blocks are checkpointed where they are not compiled. A share is one of the layers, spread evenly."""
    if isinstance(how, str):
        return [how != "none"] * layers
    whole = round((1 - how) * layers)
    return [(i + 1) * whole // layers > i * whole // layers for i in range(layers)]


def _trained(
    block: nn.Module, plain: Callable[..., Any], run: Callable[..., Any], store: Offload | None, first: bool
) -> Callable[..., Any]:
    """`run` where gradients are wanted, `plain` in evaluation and generation."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        with store.layer(first) if store is not None else nullcontext():
            return run(*args, **kwargs)

    forward.plain = plain  # type: ignore[attr-defined]
    return forward


def _by_length(block: TransformerBlock, whole: Callable[..., Any]) -> Callable[..., Any]:
    """`whole`, or long rows in tiles."""

    def run(x_BTW: Tensor, place: Place, cache: Any = None) -> Any:
        if cache is None and fits(block, x_BTW, place):
            return tiled(block, x_BTW, place)
        return whole(x_BTW, place, cache)

    return run


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in KEPT or "varlen_attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(model: nn.Module) -> bool:
    """Whether any part has dropout: native parts name it, another library's are torch's own layers."""
    shares = (m.p if isinstance(m, nn.Dropout) else getattr(m, "dropout", 0.0) for m in model.modules())
    return any(isinstance(share, float) and share > 0 for share in shares)
