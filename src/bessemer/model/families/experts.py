"""Experts: one by one in their files, stacked here; what Mixtral, Qwen3-MoE and DeepSeek share.

A piece is one matrix of all experts of a layer, so memory holds one such stack and its parts besides the model: twice
7.5 GB for the 256 experts of DeepSeek-V3 in bf16, and not a whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from bessemer.model.families.family import Piece, same
from bessemer.model.families.llama import ends, feed_forward
from bessemer.spec.shape import ModelShape, Moe

Layer = Callable[[ModelShape, str, str], Iterator[Piece]]  # of a shape, the prefix of their names, and of ours


def stacked(theirs: tuple[str, ...], ours: str) -> Piece:
    """Ours has theirs along a first dimension."""

    def stack(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.stack(tensors)]

    def unstack(tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind(0))

    return Piece(theirs, (ours,), stack, unstack)


def experts(
    shape: ModelShape, theirs: str, ours: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Piece]:
    """The router and its experts; `names` are their gate, up and down."""
    yield same(f"{theirs}.gate.weight", f"{ours}.router.weight")
    for name, our in zip(names, ("gate", "up", "down"), strict=True):
        each = tuple(f"{theirs}.experts.{e}.{name}.weight" for e in range(mixture(shape).experts))
        yield stacked(each, f"{ours}.{our}")


def decoder(shape: ModelShape, attention: Layer, experts: Layer, place: str = "mlp") -> Iterator[Piece]:
    """A Llama's layers, some or all with experts; `place` is the name of what holds them."""
    yield from ends(shape)
    for i in range(shape.layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        yield same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        yield from attention(shape, f"{theirs}.self_attn", f"{ours}.attention")
        yield same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
        if shape.has_experts(i):
            yield from experts(shape, f"{theirs}.{place}", f"{ours}.ffn")
        else:
            yield from feed_forward(shape, f"{theirs}.mlp", f"{ours}.ffn")


def mixture(shape: ModelShape) -> Moe:
    assert shape.moe is not None, "no experts"
    return shape.moe


def coefficient(moe: Moe) -> float:
    """transformers' weight of the balance loss: theirs grows with K where ours does not (see model/router.py).

    Without what division adds in the last digits, so that times K it is ours again.
    """
    return float(f"{moe.balance / moe.top_k:.12g}")
