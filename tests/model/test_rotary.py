"""Rotation by position: the formula, its gradient, and the table behind it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.model.rotary import RotaryTable, rotate

CPU = torch.device("cpu")


def plain(x_BTND, theta):
    """One number at a time: the pair (x_j, x_{j + D/2}) is turned by t theta^(-2j/D)."""
    T, D = x_BTND.shape[1], x_BTND.shape[3]
    positions = torch.arange(T, dtype=torch.float64)
    columns = [None] * D
    for j in range(D // 2):
        angle = (positions * theta ** (-2 * j / D))[None, :, None]
        a, b = x_BTND[..., j], x_BTND[..., j + D // 2]
        columns[j] = a * angle.cos() - b * angle.sin()
        columns[j + D // 2] = a * angle.sin() + b * angle.cos()
    return torch.stack(columns, dim=-1)


def random(*size, seed=0):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(
    length=st.integers(1, 20), half=st.integers(1, 6), heads=st.integers(1, 3), theta=st.sampled_from([10.0, 1e4, 5e5])
)
def test_equals_the_formula_and_its_gradient(length, half, heads, theta):
    x = random(2, length, heads, 2 * half).requires_grad_()
    pull = random(2, length, heads, 2 * half, seed=1)
    cos, sin = RotaryTable(2 * half, theta).get(length, CPU, torch.float64)
    ours, theirs = rotate(x, cos, sin), plain(x, theta)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (a,) = torch.autograd.grad((ours * pull).sum(), x)
    (b,) = torch.autograd.grad((theirs * pull).sum(), x)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    cos, sin = RotaryTable(6, 100.0).get(5, CPU, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), random(2, 5, 3, 6).requires_grad_())


def test_the_input_is_left_alone():
    x = random(1, 4, 2, 8)
    before = x.clone()
    cos, sin = RotaryTable(8, 100.0).get(4, CPU, torch.float64)
    rotate(x, cos, sin)
    assert torch.equal(x, before)


@given(shift=st.integers(0, 50), seed=st.integers(0, 100))
def test_products_of_queries_and_keys_depend_on_the_distance_alone(shift, seed):
    cos, sin = RotaryTable(8, 100.0).get(64, CPU, torch.float64)
    query, key = random(1, 1, 1, 8, seed=seed), random(1, 1, 1, 8, seed=seed + 1)

    def product(t, s):
        a, b = rotate(query, cos[t : t + 1], sin[t : t + 1]), rotate(key, cos[s : s + 1], sin[s : s + 1])
        return float((a * b).sum())

    assert product(shift + 10, shift + 3) == pytest.approx(product(10, 3), abs=1e-10)


def test_the_table_grows_and_keeps_what_it_had():
    table = RotaryTable(8, 100.0)
    short = [part.clone() for part in table.get(3, CPU, torch.float32)]
    long = table.get(500, CPU, torch.float32)
    assert all(part.shape == (500, 8) for part in long)
    assert all(torch.equal(a, b[:3]) for a, b in zip(short, long, strict=True))
    again = table.get(500, CPU, torch.float32)
    assert again[0].data_ptr() == long[0].data_ptr(), "computed twice"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_table_is_computed_exactly_and_rounded_once(dtype):
    cos, sin = RotaryTable(16, 10_000.0).get(300, CPU, dtype)
    exact = RotaryTable(16, 10_000.0).get(300, CPU, torch.float64)
    step = torch.finfo(dtype).eps
    assert cos.dtype == sin.dtype == dtype
    # float32 angles of up to 300 radians are themselves off by 300 x 6e-8.
    slack = 0 if dtype == torch.float64 else 2e-5
    for ours, theirs in zip((cos, sin), exact, strict=True):
        assert float((ours.double() - theirs).abs().max()) <= step + slack


def test_a_model_that_has_generated_can_still_be_trained():
    """The table made under inference_mode must not be kept as an inference tensor: backward refuses those."""
    table = RotaryTable(8, 100.0)
    with torch.inference_mode():
        table.get(16, CPU, torch.float64)
    x = random(1, 16, 2, 8).requires_grad_()
    rotate(x, *table.get(16, CPU, torch.float64)).sum().backward()
    assert x.grad is not None
