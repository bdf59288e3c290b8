"""Lookahead around an optimizer, written out; rejected steps and a resume."""

import pytest
import torch
from torch import nn

from bessemer.optim.choose import make_optimizer
from bessemer.optim.wrappers import Lookahead, SharpnessAware
from bessemer.spec.optimizer import OptimizerSpec

ONE = torch.ones(())


def made(name="radam", seed=0, every=3):
    draw = torch.Generator().manual_seed(seed)
    named = [
        (n, nn.Parameter(torch.randn(s, generator=draw, dtype=torch.float64))) for n, s in (("a", (3, 4)), ("b", (5,)))
    ]
    optimizer = make_optimizer(named, OptimizerSpec(name=name))
    optimizer.lookahead = Lookahead(optimizer.named, every, 0.5)
    return [p for _, p in named], optimizer


def give(parameters, step, bad=False):
    draw = torch.Generator().manual_seed(50 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        if bad:
            parameter.grad.view(-1)[0] = float("nan")


def test_ranger_is_radam_whose_weights_go_half_way_back_every_third_accepted_step():
    """Steps 4 and 5 are rejected."""
    parameters, optimizer = made()
    weights = [nn.Parameter(p.detach().clone()) for p in parameters]
    groups = [{"params": [w], "weight_decay": 0.1 if w.ndim > 1 else 0.0} for w in weights]
    theirs = torch.optim.RAdam(groups, lr=0.1, betas=(0.9, 0.95), decoupled_weight_decay=True)
    slow, accepted = [w.detach().clone() for w in weights], 0
    for step in range(12):
        bad = step in (4, 5)
        give(parameters, step, bad)
        optimizer.step(0.1, torch.tensor(float(bad)), ONE)
        if not bad:
            give(weights, step)
            theirs.step()
            accepted += 1
            if accepted % 3 == 0:
                slow = [s + 0.5 * (w.detach() - s) for s, w in zip(slow, weights, strict=True)]
                for w, s in zip(weights, slow, strict=True):
                    w.data.copy_(s)
        for ours, w in zip(parameters, weights, strict=True):
            torch.testing.assert_close(ours.detach(), w.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("saved_at", [0, 4])
def test_a_resumed_lookahead_goes_on_bit_for_bit(saved_at):
    parameters, optimizer = made()
    other, resumed = made(seed=1)
    for step in range(10):
        if step == saved_at:
            for a, b in zip(other, parameters, strict=True):
                a.data.copy_(b.data)
            state = resumed.state()
            for name, tensor in optimizer.state().items():
                state[name].copy_(tensor)
        give(parameters, step)
        optimizer.step(0.1, torch.zeros(()), ONE)
        if step >= saved_at:
            give(other, step)
            resumed.step(0.1, torch.zeros(()), ONE)
    assert all(torch.equal(a, b) for a, b in zip(other, parameters, strict=True))


def test_perturbed_weights_are_restored_bit_for_bit_also_after_nan():
    parameters, _ = made()
    before = [p.detach().clone() for p in parameters]
    sam = SharpnessAware(list(zip("ab", parameters, strict=True)), 0.3)
    for bad in (False, True):
        give(parameters, 0, bad)
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
        with sam.perturbed(norm):
            moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(parameters, before, strict=True)]).norm()
            assert torch.isnan(moved) if bad else float(moved) == pytest.approx(0.3)
            assert all(p.grad is None for p in parameters)
        assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
