"""The parts of layouts, each against the same computed whole, in double precision and with gradients."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bessemer.model.attention import attend
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.moe import MixtureOfExperts
from bessemer.parallel.context import UlyssesAttention
from bessemer.parallel.shard import ExpertExchange
from bessemer.session.build import cut_layers
from bessemer.spec.shape import Moe
from bessemer.train.loss import LossOptions, VocabShard, linear_cross_entropy

Ranks = Callable[..., list[Any]]


def on(ranks: Ranks, size: int, work: Callable[[], tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """What each process found; tensors do not outlive theirs."""
    return [[torch.from_numpy(array) for array in one] for one in ranks(size, lambda: [t.numpy() for t in work()])]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layers_are_cut_as_well_as_can_be(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0.1, 9.0), min_size=2, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    before, behind = data.draw(st.floats(0, 9)), data.draw(st.floats(0, 9))

    def dearest(cuts: list[range]) -> float:
        prices = [sum(costs[i] for i in cut) for cut in cuts]
        prices[0] += before
        prices[-1] += behind
        return max(prices)

    found = cut_layers(costs, stages, before, behind)
    assert [i for cut in found for i in cut] == list(range(len(costs))) and all(len(cut) for cut in found)
    ends = (list(chosen) for chosen in combinations(range(1, len(costs)), stages - 1))
    every = [[range(a, b) for a, b in zip([0, *inner], [*inner, len(costs)], strict=True)] for inner in ends]
    assert dearest(found) == pytest.approx(min(map(dearest, every)))


def _loss(options: LossOptions, rank: int, size: int, bias: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(24, 16, dtype=torch.float64)
    shift = torch.randn(24, dtype=torch.float64) if bias else None
    share = len(whole) // size
    part = slice(rank * share, (rank + 1) * share)
    head, own = (
        whole[part].clone().requires_grad_(),
        shift[part].clone().requires_grad_() if shift is not None else None,
    )
    targets, weights = torch.randint(0, 24, (37,)), torch.rand(37, dtype=torch.float64)
    words = VocabShard(None, part.start, 24) if size > 1 else None
    loss, nll, correct = linear_cross_entropy(hidden, head, targets, weights, 0.3, options, own, words)
    loss.backward()
    grad = hidden.grad
    assert grad is not None and head.grad is not None
    if size > 1:
        dist.all_reduce(grad)
    parts = (head.grad, *((own.grad,) if own is not None and own.grad is not None else ()))
    return loss.detach(), nll, correct, grad, *parts


@pytest.mark.parametrize(
    "options", [LossOptions(), LossOptions(0.5, 3.0), LossOptions(smoothing=0.1, focal=1.5, z=1e-2)], ids=str
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_of_divided_words_is_that_of_all(ranks: Ranks, options: LossOptions, bias: bool) -> None:
    wanted = _loss(options, 0, 1, bias)
    found = on(ranks, 3, lambda: _loss(options, dist.get_rank(), 3, bias))
    for one in found:
        for got, want in zip(one[:4], wanted[:4], strict=True):
            torch.testing.assert_close(got, want)
    for i in range(4, len(wanted)):
        torch.testing.assert_close(torch.cat([one[i] for one in found]), wanted[i])


def _attention(columns: UlyssesAttention | None, kv: int) -> tuple[Tensor, ...]:
    """Rows of packed documents under a window."""
    torch.manual_seed(0)
    B, T, N, D = 2, 16, 8, 4
    sizes = ((N, D), (kv, D), (kv, D))
    part = columns.part(T) if columns else slice(None)
    q, k, v = (torch.randn(B, T, *size, dtype=torch.float64)[:, part].clone().requires_grad_() for size in sizes)
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    inputs = columns.heads(q, k, v) if columns else (q, k, v)
    out = attend(*inputs, AttentionMask(documents), 6, D**-0.5)
    out = columns.columns(out) if columns else out
    (out * torch.arange(T, dtype=torch.float64)[part, None, None]).sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("kv", [8, 2, 1])
def test_attention_over_shared_columns_is_that_of_whole_rows(ranks: Ranks, kv: int) -> None:
    wanted = _attention(None, kv)
    found = on(ranks, 4, lambda: _attention(UlyssesAttention(None, dist.get_rank(), 4), kv))
    for i, want in enumerate(wanted):
        torch.testing.assert_close(torch.cat([one[i] for one in found], dim=1), want)


def _experts(rank: int, size: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    layer = MixtureOfExperts(8, Moe(experts=6, top_k=2, ffn=4), "silu", gated=True).double()
    x = torch.randn(4, 9, 8, dtype=torch.float64)
    share = len(x) // size
    x = x[rank * share : (rank + 1) * share].clone().requires_grad_()
    names = ("gate", "up", "down")
    if size > 1:
        layer.dispatch = ExpertExchange(None, size)
        for name in names:
            own = getattr(layer, name).detach().chunk(size)[rank].clone()
            setattr(layer, name, torch.nn.Parameter(own))
    y = layer(x)
    (y.square() * torch.arange(8)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, *(getattr(layer, name).grad for name in names)


def test_divided_experts_do_what_experts_together_do(ranks: Ranks) -> None:
    wanted = _experts(0, 1)
    found = on(ranks, 2, lambda: _experts(dist.get_rank(), 2))
    for i, want in enumerate(wanted):
        torch.testing.assert_close(torch.cat([one[i] for one in found]), want)
