"""Optimizers of pytorch-optimizer: accepted with exact vetoes and resumes, or refused by name."""

import pytest
import torch
from torch import nn

from bessemer.errors import UserError
from bessemer.optim.choose import make_optimizer
from bessemer.spec.optimizer import OptimizerSpec

package = pytest.importorskip("pytorch_optimizer")
ONE = torch.ones(())


def made(name, seed=0, **arguments):
    draw = torch.Generator().manual_seed(seed)
    named = [(n, nn.Parameter(torch.randn(s, generator=draw))) for n, s in {"a": (6, 4), "b": (5,)}.items()]
    spec = OptimizerSpec(name=f"pytorch_optimizer.{name}", weight_decay=0.1, arguments=arguments)
    return [p for _, p in named], make_optimizer(named, spec)


def give(parameters, step, bad=False):
    draw = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw) * (float("nan") if bad else 1.0)


@pytest.mark.parametrize("name", ["Prodigy", "AdEMAMix"])
def test_steps_vetoes_and_a_resume_are_exact(name):
    """Against the class on its own; steps 2 and 5 are rejected; another one continues from the state at step 4."""
    parameters, optimizer = made(name)
    weights = [nn.Parameter(p.detach().clone()) for p in parameters]
    groups = [{"params": [w], "weight_decay": 0.1 if w.ndim > 1 else 0.0} for w in weights]
    bare = getattr(package, name)(groups, lr=0.1)
    resumed_parameters, resumed = made(name, seed=1)
    for step in range(9):
        bad = step in (2, 5)
        if step == 4:
            for ours, saved in zip(resumed_parameters, parameters, strict=True):
                ours.data.copy_(saved)
            state = resumed.state()
            for key, tensor in optimizer.state().items():
                state[key].copy_(tensor)
        for one, chosen in ((optimizer, parameters), (resumed, resumed_parameters)):
            if one is optimizer or step >= 4:
                before = [t.clone() for t in (*chosen, *one.state().values())]
                give(chosen, step, bad)
                one.step(0.1, torch.tensor(float(bad)), ONE)
                same = [torch.equal(a, b) for a, b in zip(before, (*chosen, *one.state().values()), strict=True)]
                assert all(same) == bad
        if not bad:
            give(weights, step)
            bare.step()
    for ours, again, theirs in zip(parameters, resumed_parameters, weights, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(again, ours)


@pytest.mark.parametrize(
    ("name", "words"), [("Prodigee", "is no optimizer of pytorch-optimizer"), ("SAM", "pytorch_optimizer.SAM")]
)
def test_what_cannot_be_used_is_refused_by_name(name, words):
    with pytest.raises(UserError, match=words):
        made(name)
