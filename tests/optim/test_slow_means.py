"""AdEMAMix, MARS and ASAM against their papers and pytorch-optimizer for 100 steps in float64."""

import math

import pytest
import torch
from torch import nn

from bessemer.optim.choose import make_optimizer
from bessemer.optim.wrappers import SharpnessAware
from bessemer.spec.optimizer import OptimizerSpec

SHAPES = {"wide.weight": (5, 7), "tall.weight": (8, 3), "norm.bias": (6,)}
STEPS = 100


def weights():
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradient(step, name):
    draw = torch.Generator().manual_seed(1000 * step + len(name))
    # Some are so small that MARS does not clip them.
    return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64) * (0.05 if step % 4 == 0 else 1.0)


def rate(step):
    return 0.02 * (1 + math.cos(step / 40))


def ours(**spec):
    named = {name: nn.Parameter(tensor) for name, tensor in weights().items()}
    optimizer = make_optimizer(named.items(), OptimizerSpec(**spec))
    assert optimizer.fallback_reason is None
    for step in range(STEPS):
        for name, parameter in named.items():
            parameter.grad = gradient(step, name) * 2
        optimizer.step(rate(step), torch.zeros(()), torch.tensor(2.0))
        yield {name: parameter.detach().clone() for name, parameter in named.items()}


def by_hand(update):
    w, state = weights(), {name: {} for name in SHAPES}
    for step in range(STEPS):
        w = {name: update(w[name], gradient(step, name), state[name], step + 1, rate(step)) for name in SHAPES}
        yield w


def of_the_package(name, decay, **settings):
    package = pytest.importorskip("pytorch_optimizer")
    named = {name: nn.Parameter(tensor) for name, tensor in weights().items()}
    groups = [{"params": [p], "weight_decay": decay if p.ndim > 1 else 0.0} for p in named.values()]
    optimizer = getattr(package, name)(groups, lr=1.0, **settings)
    for step in range(STEPS):
        for (key, parameter), group in zip(named.items(), optimizer.param_groups, strict=True):
            parameter.grad, group["lr"] = gradient(step, key), rate(step)
        optimizer.step()
        yield {key: parameter.detach().clone() for key, parameter in named.items()}


def same(theirs, within=1e-10, **spec):
    for found, wanted in zip(ours(**spec), theirs, strict=True):
        for name in SHAPES:
            torch.testing.assert_close(found[name], wanted[name], rtol=within, atol=within)


@pytest.mark.parametrize("warmup", [1, 40, 10_000])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ademamix_equals_the_paper(warmup, decay):
    def update(w, g, state, t, lr):
        share = min(t * 5.0 / warmup, 5.0)
        b1, b3 = math.log(0.9), math.log(0.9999)
        beta3 = min(math.exp(b1 * b3 / ((1 - t / warmup) * b3 + t / warmup * b1)), 0.9999) if t < warmup else 0.9999
        state["m1"] = 0.9 * state.get("m1", 0) + 0.1 * g
        state["m2"] = beta3 * state.get("m2", 0) + (1 - beta3) * g
        state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
        top = state["m1"] / (1 - 0.9**t) + share * state["m2"]
        down = (state["v"] / (1 - 0.999**t)) ** 0.5 + 1e-8
        return w - lr * (top / down + (decay if w.ndim > 1 else 0) * w)

    same(by_hand(update), name="ademamix", slow_warmup=warmup, weight_decay=decay)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_mars_equals_its_authors_code(decay):
    """github.com/AGI-Arena/MARS with optimize_1d, approximate gradients."""
    clipped = []

    def update(w, g, state, t, lr):
        c = g + 0.025 * (0.95 / 0.05) * (g - state.get("last", 0))
        clipped.append(bool(c.norm() > 1))
        c = c / c.norm() if c.norm() > 1 else c
        state["last"] = g
        state["m"] = 0.95 * state.get("m", 0) + 0.05 * c
        state["v"] = 0.99 * state.get("v", 0) + 0.01 * c * c
        down = (state["v"] ** 0.5 / (1 - 0.99**t) ** 0.5 + 1e-8) * (1 - 0.95**t)
        return w - lr * ((decay if w.ndim > 1 else 0) * w + state["m"] / down)

    same(by_hand(update), name="mars", weight_decay=decay)
    assert 0 < sum(clipped) < len(clipped)


def test_mars_equals_pytorch_optimizer_s():
    """Which adds epsilon before the bias correction, here too small to be seen, and 1e-15 to the squares."""
    theirs = of_the_package("MARS", 0.1, betas=(0.95, 0.99), optimize_1d=True, weight_decouple=True, eps=1e-30)
    same(theirs, 1e-8, name="mars", weight_decay=0.1, eps=1e-30)


def test_ademamix_equals_pytorch_optimizer_s():
    theirs = of_the_package(
        "AdEMAMix", 0.1, betas=(0.9, 0.999, 0.9999), weight_decouple=True, eps=1e-30, alpha=5.0, t_alpha_beta3=40
    )
    same(theirs, 1e-8, name="ademamix", slow_warmup=40, eps=1e-30)


def asam_s_code(named, rho, gradient_at):
    """github.com/SamsungLabs/ASAM: the second gradients."""
    scales = {n: p.detach().abs() + 0.01 if "weight" in n else torch.ones_like(p) for n, p in named.items()}
    first = {n: gradient_at(n, p.detach()) for n, p in named.items()}
    norm = torch.stack([(scales[n] * g).norm() for n, g in first.items()]).norm() + 1e-16
    return {n: gradient_at(n, p.detach() + scales[n] ** 2 * first[n] * rho / norm) for n, p in named.items()}


def test_asam_equals_its_authors_code_for_100_steps():
    def gradient_at(name, w):
        return torch.tanh(w) * (1 + torch.arange(w.numel(), dtype=w.dtype).view_as(w) / 7) + 0.1

    mine = {name: nn.Parameter(tensor) for name, tensor in weights().items()}
    theirs = {name: nn.Parameter(tensor) for name, tensor in weights().items()}

    def norm():
        return torch.cat([p.grad.flatten() for p in mine.values()]).norm()

    sam = SharpnessAware(list(mine.items()), 0.5, norm)
    optimizers = [torch.optim.SGD(named.values(), lr=0.05, momentum=0.9) for named in (mine, theirs)]
    for _ in range(STEPS):
        before = {name: p.detach().clone() for name, p in mine.items()}
        for name, p in mine.items():
            p.grad = gradient_at(name, p.detach())
        with sam.perturbed(norm()):
            second = {name: gradient_at(name, p.detach()) for name, p in mine.items()}
        assert all(torch.equal(before[name], p) for name, p in mine.items())
        for name, g in asam_s_code(theirs, 0.5, gradient_at).items():
            theirs[name].grad, mine[name].grad = g, second[name]
        for optimizer in optimizers:
            optimizer.step()
        for name in SHAPES:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-10)
