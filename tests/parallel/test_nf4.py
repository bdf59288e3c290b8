"""Weights in NF4 that are divided over ranks: products, gradients and dense values are those of the undivided ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bessemer.model.quantized import NF4Tensor, same_codes
from bessemer.parallel.nf4 import divide_in_nf4

Ranks = Callable[..., list[Any]]


def compare() -> list[float]:
    """Odd sizes: blocks of 64 numbers that do not divide evenly, and a last one that is not full."""
    torch.manual_seed(0)
    sizes = {"blocks.0.a": (33, 70), "blocks.0.b": (5, 9), "blocks.1.a": (96, 300)}
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(2))
    for name, (outputs, inputs) in sizes.items():
        parent, _, last = name.rpartition(".")
        with torch.device("meta"):
            setattr(model.get_submodule(parent), last, nn.Linear(inputs, outputs, bias=False))
    divide_in_nf4(model, list(sizes), dist.group.WORLD, torch.device("cpu"))
    gaps = []
    for name, weight in weights.items():
        model.get_submodule(name).weight.data.copy_(weight)
    for name, weight in weights.items():
        held, expected = model.get_submodule(name).weight, NF4Tensor.of(weight)
        assert same_codes(held, weight)
        assert name == "blocks.0.b" or not same_codes(held, -weight)  # whose single block one rank holds
        xs = [torch.randn(4, weight.shape[1], requires_grad=True) for _ in range(2)]
        xs[1].data.copy_(xs[0].data)
        ys = [model.get_submodule(name)(xs[0]), expected.product(xs[1])]
        for y in ys:
            y.square().sum().backward()
        gaps += [float((ys[0] - ys[1]).abs().max()), float((xs[0].grad - xs[1].grad).abs().max())]
        gaps += [float((held.dense() - expected.dense()).abs().max())]
        assert held.codes.numel() * held.ranks < expected.codes.numel() + 64 * held.ranks
    return gaps


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_divided_products_are_those_of_the_matrix(ranks: Ranks, size: int) -> None:
    for gaps in ranks(size, compare):
        assert max(gaps) == 0.0
