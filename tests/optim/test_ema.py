"""The average of the weights against a loop in float64; vetoes and NaN; swapping in and out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bessemer.optim.guarded import Ema

ACCEPT, REJECT = torch.tensor(0.0), torch.tensor(1.0)
SHAPES = {"a.weight": (5, 3), "b.weight": (7,), "c.scale": ()}
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
)


def parameters(seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return {k: nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for k, s in SHAPES.items()}


def move(named, step):
    generator = torch.Generator().manual_seed(100 + step)
    with torch.no_grad():
        for parameter in named.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)


def copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.99999])
@given(verdicts=st.lists(st.booleans(), max_size=40))
def test_equals_a_loop_in_float64_over_the_accepted_steps(decay, dtype, verdicts):
    named = parameters(dtype=dtype)
    ema = Ema(named.items(), decay)
    expected = {name: p.detach().double() for name, p in named.items()}
    accepted = 0
    for step, accept in enumerate(verdicts):
        if accept:
            move(named, step)
            d = min(decay, (1 + accepted) / (10 + accepted))
            for name, parameter in named.items():
                expected[name] = d * expected[name] + (1 - d) * parameter.detach().double()
            accepted += 1
        before = copied(ema.state())
        ema.update(ACCEPT if accept else REJECT)
        assert accept or same(before, ema.state())
    state = ema.state()
    assert int(state["updates"]) == accepted
    for name in SHAPES:
        assert state[name].dtype == torch.float32
        torch.testing.assert_close(state[name].double(), expected[name], rtol=1e-5, atol=2e-6)


def test_the_first_updates_by_hand():
    weight = nn.Parameter(torch.tensor([0.0]))
    ema = Ema([("w", weight)], 0.15)
    weight.data.fill_(1.0)
    for expected in (0.9, 0.9 + 0.1 * 0.85, 0.985 + 0.015 * 0.85):  # d = 1/10, then 2/11 and 3/12 but at most 0.15
        ema.update(ACCEPT)
        assert float(ema.state()["w"]) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_rejected_step_keeps_broken_weights_out(bad):
    named = parameters()
    ema = Ema(named.items(), 0.9)
    move(named, 0)
    ema.update(ACCEPT)
    before = copied(ema.state())
    with torch.no_grad():
        named["a.weight"].fill_(bad)
    ema.update(REJECT)
    assert same(before, ema.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swap_shows_the_average_and_gives_the_own_bits_back(dtype):
    named = parameters(dtype=dtype)
    ema = Ema(named.items(), 0.9)
    for step in range(5):
        move(named, step)
        ema.update(ACCEPT)
    own, average = copied({k: p.detach() for k, p in named.items()}), copied(ema.state())
    with ema.swap():
        for name, parameter in named.items():
            assert torch.equal(parameter.detach(), average[name].to(dtype))
            assert parameter.requires_grad
    assert same(own, {name: p.detach() for name, p in named.items()})
    with pytest.raises(KeyboardInterrupt), ema.swap():
        raise KeyboardInterrupt
    assert same(own, {name: p.detach() for name, p in named.items()})
    assert same(average, ema.state())


def test_resumed_from_its_state_it_goes_on_with_the_same_bits():
    named, again = parameters(), parameters(seed=1)
    first, second = Ema(named.items(), 0.99), Ema(again.items(), 0.99)
    for step in range(4):
        move(named, step)
        first.update(ACCEPT)
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(named[name])
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    for step in range(4, 8):
        move(named, step)
        move(again, step)
        first.update(ACCEPT)
        second.update(ACCEPT)
    assert same(first.state(), second.state())


def test_restart_begins_from_the_weights_as_they_are():
    named = parameters()
    ema = Ema(named.items(), 0.99)
    move(named, 0)
    ema.update(ACCEPT)
    ema.restart()
    fresh = Ema(named.items(), 0.99)
    assert same(ema.state(), fresh.state())
    assert not any(tensor.requires_grad for tensor in ema.state().values())


def test_frozen_parameters_are_left_out():
    named = parameters()
    named["b.weight"].requires_grad_(False)
    assert set(Ema(named.items(), 0.9).state()) == {"a.weight", "c.scale", "updates"}


@pytest.mark.parametrize("device", [GPU])
def test_an_update_never_waits_for_the_gpu(device):
    named = parameters(device=device)
    ema = Ema(named.items(), 0.9)
    reject = ACCEPT.to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ema.update(reject)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(ema.state()["updates"]) == 1
