"""Tiled computation of a fully recomputed layer for long rows: everything after attention runs tile by tile.

After attention every position is independent, and there a layer needs the most memory. In tiles of some thousand
positions that memory does not grow with the row: by estimate the last layer's backward pass of an 8B model needs 25 GiB
instead of 42 for 262,144 tokens. Nothing is computed more often than with a checkpoint around the layer. Weight
gradients are summed over tiles in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bessemer.model.attention import AttentionInputs
from bessemer.model.transformer import TransformerBlock

MOST = 16_384  # tokens of a tile: matmuls are as fast as with more
LONG = 32_768  # tokens of a micro-batch up to which a layer is not tiled


def tile_for(tokens: int) -> int | None:
    """The size of equal tiles, which share one compiled graph; None for short or indivisible sizes."""
    fewest = -(-tokens // MOST)
    sizes = (tokens // parts for parts in range(fewest, 4 * fewest) if tokens % parts == 0)
    return next(sizes, None) if tokens > LONG else None


def fits(block: TransformerBlock, x_BTW: Tensor, place: AttentionInputs) -> bool:
    """Whether a block can be tiled: compiled for this input, without parallel attention and feed-forward from one norm,
    and without an attention bias, which may be learned outside of the block."""
    if block.compiled is None or block.shape.parallel == "one_norm" or place.bias_1NTS is not None:
        return False
    return tile_for(x_BTW.shape[:2].numel()) is not None and block.compiled.serves(block, x_BTW)


def tiled(block: TransformerBlock, x_BTW: Tensor, place: AttentionInputs) -> Tensor:
    """The block's output; the backward pass recomputes it."""
    out: Tensor = _Tiled.apply(block, place, x_BTW, *block.parameters())  # type: ignore[no-untyped-call]
    return out


class _Tiled(torch.autograd.Function):
    """Both passes run the graphs compiled for training. What they save in the forward pass is dropped at once and
    hidden from hooks around the block: offloading would copy all of it to the host."""

    @staticmethod
    def forward(
        ctx: Any, block: TransformerBlock, place: AttentionInputs, x_BTW: Tensor, *parameters: Tensor
    ) -> Tensor:  # type: ignore[override]
        kind = x_BTW.device.type
        ctx.block, ctx.place, ctx.parameters = block, place, parameters
        ctx.cast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(x_BTW)
        made_BTW = torch.empty_like(x_BTW)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _gone):
            attended_BTNE = _attended(block, place, x_BTW.detach().requires_grad_()).detach()
            for x_1PW, out_1PNE, made_1PW in _tiles(x_BTW, attended_BTNE, made_BTW):
                left_1PW = _left(block, x_1PW.requires_grad_(), out_1PNE.requires_grad_())
                assert left_1PW.dtype == made_1PW.dtype, "a residual stream has one type"
                made_1PW.copy_(left_1PW.detach())
        return made_BTW

    @staticmethod
    def backward(ctx: Any, grad_BTW: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x_BTW,) = ctx.saved_tensors
        block, learned = ctx.block, [parameter for parameter in ctx.parameters if parameter.requires_grad]
        sums: dict[Tensor, Tensor] = {}

        def back(made: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor]:
            """Gradients of the leaves; those of weights are added to the sums."""
            gradients = torch.autograd.grad(made, [*leaves, *learned], grad, allow_unused=True)
            for parameter, gradient in zip(learned, gradients[len(leaves) :], strict=True):
                if gradient is not None and parameter in sums:
                    sums[parameter].add_(gradient)
                elif gradient is not None:
                    sums[parameter] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            return [gradient for gradient in gradients[: len(leaves)] if gradient is not None]

        def tile(x_1PW: Tensor, out_1PNE: Tensor, grad_1PW: Tensor, grad_x_1PW: Tensor, grad_out_1PNE: Tensor) -> None:
            """A function, so that nothing of the last tile is alive in attention's backward pass."""
            leaves = [x_1PW.requires_grad_(), out_1PNE.requires_grad_()]
            of_x_1PW, of_out_1PNE = back(_left(block, *leaves), grad_1PW, leaves)
            grad_x_1PW.copy_(of_x_1PW)
            grad_out_1PNE.copy_(of_out_1PNE)

        with torch.enable_grad(), torch.autocast(*ctx.cast):
            start_BTW = x_BTW.detach().requires_grad_()
            attended_BTNE = _attended(block, ctx.place, start_BTW)
            grad_x_BTW, grad_out_BTNE = torch.empty_like(x_BTW), torch.empty_like(attended_BTNE)
            for part in _tiles(x_BTW, attended_BTNE.detach(), grad_BTW.contiguous(), grad_x_BTW, grad_out_BTNE):
                tile(*part)
            (grad_start_BTW,) = back(attended_BTNE, grad_out_BTNE, [start_BTW])
        gradients = (sums[p].to(p.dtype) if p in sums else None for p in ctx.parameters)
        return None, None, grad_x_BTW.add_(grad_start_BTW), *gradients


def _drop(_: Tensor) -> None:
    return None


def _gone(_: None) -> Tensor:
    raise AssertionError("a forward pass in tiles is not gone back through")


def _attended(block: TransformerBlock, place: AttentionInputs, x_BTW: Tensor) -> Tensor:
    assert block.compiled is not None
    _, q_BTND, k_BTKD, v_BTKE = block.compiled.enter(block, x_BTW, block.attention.rotary(place))
    return block.attention.attend(q_BTND, k_BTKD, v_BTKE, place).contiguous()


def _left(block: TransformerBlock, x_1PW: Tensor, out_1PNE: Tensor) -> Tensor:
    assert block.compiled is not None
    return block.compiled.leave(block, x_1PW, None, out_1PNE)


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same positions of each tensor, with all rows flattened."""
    tokens = tensors[0].shape[:2].numel()
    size = tile_for(tokens)
    assert size is not None
    flat = [tensor.detach().view(1, tokens, *tensor.shape[2:]) for tensor in tensors]
    for start in range(0, tokens, size):
        yield tuple(tensor[:, start : start + size] for tensor in flat)
