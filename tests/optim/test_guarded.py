"""The guarded step is torch's AdamW when it steps, and nothing at all when it is vetoed."""

import pytest
import torch
from torch import nn

from bessemer.optim import guarded
from bessemer.optim.guarded import GuardedAdamW, clip_divisor, fused_veto_works

BETAS, EPS, DECAY, LIMIT = (0.9, 0.95), 1e-8, 0.1, 1.0
SHAPES = {"matrix": (7, 5), "cube": (2, 3, 4), "vector": (11,), "scalar": (), "embedding": (13, 5)}
ACCEPT, REJECT = torch.tensor(0.0), torch.tensor(1.0)


@pytest.fixture(params=["fused", "host"])
def path(request, monkeypatch):
    """Both ways a verdict can reach the update."""
    if request.param == "host":
        monkeypatch.setattr(guarded, "fused_veto_works", lambda device: False)
    return request.param


def parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in SHAPES.items()
    }


def gradients(step, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: size * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


def give(named, values):
    for name, parameter in named.items():
        parameter.grad = values[name].clone()


def make(named):
    return GuardedAdamW(named.items(), BETAS, EPS, DECAY)


def advance(optimizer, named, step, lr=1e-2, reject=ACCEPT):
    give(named, gradients(step, next(iter(named.values())).dtype, size=0.02 if step % 3 == 0 else 3.0))
    optimizer.step(lr, reject, clip_divisor(optimizer.grad_norm(), LIMIT))


def bits(named, optimizer):
    state = {**{f"w.{k}": p.detach() for k, p in named.items()}, **optimizer.state()}
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def reference(named):
    """Plain AdamW, neither fused nor foreach."""
    decayed = [p for p in named.values() if p.ndim >= 2]
    others = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, foreach=False, fused=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-6)])
def test_equals_plain_adamw_with_clipping_over_20_steps(path, dtype, tolerance):
    """fp32: rounding of 20 steps. fp64: torch clips by norm + 1e-6, we by the norm; nothing else may differ."""
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, plain = make(ours), reference(theirs)
    assert optimizer.fused == (path == "fused")
    for step in range(20):
        lr = 1e-2 * (step + 1) / 20
        advance(optimizer, ours, step, lr)
        give(theirs, gradients(step, dtype, size=0.02 if step % 3 == 0 else 3.0))
        torch.nn.utils.clip_grad_norm_(theirs.values(), LIMIT)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance)
    state = optimizer.state()
    for name, parameter in theirs.items():
        assert state[f"{name}.step"] == plain.state[parameter]["step"] == 20
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                state[f"{name}.{key}"], plain.state[parameter][key], rtol=1e-5, atol=1e-7
            )


def test_equals_the_formula_in_float64_without_clipping(path):
    """The paper's formula, written out."""
    named = parameters(dtype=torch.float64)
    weights = {name: p.detach().clone() for name, p in named.items()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    optimizer = make(named)
    for step in range(1, 11):
        grads = gradients(step, torch.float64)
        give(named, grads)
        optimizer.step(1e-2, ACCEPT, torch.ones(()))
        for name, g in grads.items():
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
            mean, square = first[name] / (1 - BETAS[0] ** step), second[name] / (1 - BETAS[1] ** step)
            decay = DECAY if weights[name].ndim >= 2 else 0.0
            weights[name] = weights[name] * (1 - 1e-2 * decay) - 1e-2 * mean / (square.sqrt() + EPS)
            torch.testing.assert_close(named[name].detach(), weights[name], rtol=1e-10, atol=1e-12)


BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "huge": 3e38, "ordinary": 1.0}


@pytest.mark.parametrize("where", ["matrix", "scalar", "all"])
@pytest.mark.parametrize("bad", list(BAD))
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_veto_leaves_every_bit_untouched(path, bad, where, steps_before):
    named = parameters()
    optimizer = make(named)
    for step in range(steps_before):
        advance(optimizer, named, step)
    before = bits(named, optimizer)
    values = gradients(99)
    for name in values:
        if where in (name, "all"):
            values[name].view(-1)[-1] = BAD[bad]
    give(named, values)
    optimizer.step(1e-2, REJECT, clip_divisor(optimizer.grad_norm(), LIMIT))
    assert same(bits(named, optimizer), before)
    assert all(p.grad is None for p in named.values())


def test_a_vetoed_step_never_happened(path):
    """Going on after a veto gives the very bits of a run that did not have the step."""
    ours, theirs = parameters(), parameters()
    optimizer, unbroken = make(ours), make(theirs)
    for step in range(8):
        if step in (0, 5):
            give(ours, {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()})
            optimizer.step(1.0, REJECT, clip_divisor(optimizer.grad_norm(), LIMIT))
        advance(optimizer, ours, step)
        advance(unbroken, theirs, step)
    assert same(bits(ours, optimizer), bits(theirs, unbroken))


def test_an_accepted_step_changes_weights_moments_and_counts(path):
    named = parameters()
    optimizer = make(named)
    before = bits(named, optimizer)
    advance(optimizer, named, 1)
    after = bits(named, optimizer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_state_round_trip_goes_on_with_the_same_bits(path):
    named = parameters()
    optimizer = make(named)
    for step in range(6):
        advance(optimizer, named, step)
    saved = bits(named, optimizer)
    again = parameters(seed=9)
    resumed = make(again)
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(saved[f"w.{name}"])
    for name, tensor in resumed.state().items():
        tensor.copy_(saved[name])
    for step in range(6, 12):
        advance(optimizer, named, step)
        advance(resumed, again, step)
    assert same(bits(named, optimizer), bits(again, resumed))


def test_state_before_the_first_step_is_zero_and_changes_nothing(path):
    asked, untouched = parameters(), parameters()
    optimizer, other = make(asked), make(untouched)
    state = optimizer.state()
    assert set(state) == {f"{name}.{key}" for name in SHAPES for key in ("exp_avg", "exp_avg_sq", "step")}
    assert all(not tensor.any() and not tensor.requires_grad for tensor in state.values())
    for step in range(3):
        advance(optimizer, asked, step)
        advance(other, untouched, step)
    assert same(bits(asked, optimizer), bits(untouched, other))
    assert all(a is b for a, b in zip(state.values(), optimizer.state().values(), strict=True)), (
        "state() is live"
    )
    layout = {name: (tensor.dtype, tensor.device, tensor.shape) for name, tensor in other.state().items()}
    assert {name: (t.dtype, t.device, t.shape) for name, t in state.items()} == layout


def test_matrices_are_decayed_and_vectors_are_not(path):
    named = parameters()
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = make(named)
    give(named, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    optimizer.step(0.5, ACCEPT, torch.ones(()))
    for name, parameter in named.items():
        expected = before[name] * (1 - 0.5 * DECAY) if parameter.ndim >= 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_only_matrices_or_only_vectors(path):
    for names in (["matrix"], ["vector", "scalar"]):
        named = {name: parameter for name, parameter in parameters().items() if name in names}
        optimizer = make(named)
        give(named, gradients(0))
        optimizer.step(0.1, ACCEPT, torch.ones(()))
        assert set(optimizer.state()) == {f"{name}.{key}" for name in names for key in guarded.MOMENTS}


def test_frozen_parameters_and_parameters_without_a_gradient_are_left_alone(path):
    named = parameters()
    named["cube"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = make(named)
    values = gradients(0)
    for name in ("matrix", "vector"):
        named[name].grad = values[name].clone()
    assert float(optimizer.grad_norm()) == pytest.approx(
        float(torch.cat([values["matrix"].flatten(), values["vector"]]).norm()), rel=1e-6
    )
    optimizer.step(0.1, ACCEPT, torch.tensor(2.0))
    moved = {name for name, p in named.items() if not torch.equal(p.detach(), before[name])}
    assert moved == {"matrix", "vector"}


@pytest.mark.parametrize("size", [0.001, 0.2, 50.0])
def test_clipping_equals_torch(size):
    """Up to torch's 1e-6 beside the norm."""
    named, values = parameters(dtype=torch.float64), gradients(1, torch.float64, size)
    optimizer = make(named)
    give(named, values)
    divisor = clip_divisor(optimizer.grad_norm(), 0.7)
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.7)
    assert float(norm) == pytest.approx(
        sum(float(v.square().sum()) for v in values.values()) ** 0.5, rel=1e-12
    )
    for name, parameter in named.items():
        torch.testing.assert_close(values[name] / divisor, parameter.grad, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_the_norm_is_not_finite_as_soon_as_one_gradient_is(bad):
    named = parameters()
    optimizer = make(named)
    values = gradients(0)
    values["vector"][3] = bad
    values["matrix"][0, 0] = min(bad, 3e38)
    give(named, values)
    assert not torch.isfinite(optimizer.grad_norm())


def test_the_probe_trusts_the_fused_kernel_here():
    assert fused_veto_works(torch.device("cpu"))


def test_the_probe_finds_a_kernel_that_ignores_the_verdict(monkeypatch):
    class Ignores(torch.optim.AdamW):
        def step(self, *arguments):
            del self.found_inf
            self.grad_scale = None
            return super().step(*arguments)

    monkeypatch.setattr(torch.optim, "AdamW", Ignores)
    assert not fused_veto_works(torch.device("cpu"))


def test_the_probe_finds_a_kernel_that_counts_a_vetoed_step(monkeypatch):
    class Counts(torch.optim.AdamW):
        def step(self, *arguments):
            super().step(*arguments)
            for state in self.state.values():
                state["step"] += self.found_inf

    monkeypatch.setattr(torch.optim, "AdamW", Counts)
    assert not fused_veto_works(torch.device("cpu"))


def test_the_probe_finds_a_kernel_that_never_moves_and_one_that_is_missing(monkeypatch):
    class Idle(torch.optim.AdamW):
        def step(self, *_):
            return None

    class Missing(torch.optim.AdamW):
        def __init__(self, *_, **__):
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of supported devices"
            )

    for kind in (Idle, Missing):
        monkeypatch.setattr(torch.optim, "AdamW", kind)
        assert not fused_veto_works(torch.device("cpu"))
