"""Rotation by position: the formula, its gradient, the table behind it, and every scaling against transformers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.layers import RotaryTable, attention_factor, frequencies, rotate, yarn_mscale
from bessemer.spec.shape import Rope

CPU = torch.device("cpu")


def random(*size, seed=0):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(x_BTND, theta, size, interleaved):
    """Pairs as complex numbers, multiplied by e^(i t theta^(-2j/D)); what is beyond `size` stays."""
    T, half = x_BTND.shape[1], size // 2
    rate = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / size)
    turn = torch.exp(1j * torch.outer(torch.arange(T, dtype=torch.float64), rate))[:, None]
    part = x_BTND[..., :size]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    turned = torch.complex(first, second) * turn
    if interleaved:
        out = torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)
    else:
        out = torch.cat((turned.real, turned.imag), dim=-1)
    return torch.cat((out, x_BTND[..., size:]), dim=-1)


@given(
    length=st.integers(1, 20),
    half=st.integers(1, 6),
    rest=st.sampled_from([0, 0, 2, 6]),
    theta=st.sampled_from([10.0, 1e4, 5e5]),
    interleaved=st.booleans(),
)
def test_equals_complex_multiplication_and_its_gradient(length, half, rest, theta, interleaved):
    head = 2 * half + rest
    x, pull = random(2, length, 3, head).requires_grad_(), random(2, length, 3, head, seed=1)
    share = (2 * half + 0.5) / head if rest else 1.0  # rounded down
    table = RotaryTable(head, Rope(theta=theta, share=share))
    ours = rotate(x, *table.get(length, CPU, torch.float64), interleaved)
    theirs = plain(x, theta, 2 * half, interleaved)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (a,) = torch.autograd.grad((ours * pull).sum(), x)
    (b,) = torch.autograd.grad((theirs * pull).sum(), x)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_with_an_attention_factor_and_a_part_of_the_head(interleaved):
    rope = Rope(theta=100.0, share=0.75, scaling="yarn", factor=4.0, original=16)
    cos, sin = RotaryTable(8, rope).get(5, CPU, torch.float64)
    assert cos.shape == (5, 6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, interleaved), random(2, 5, 3, 8).requires_grad_())


def test_neighbours_give_the_scores_of_transformers_deepseek():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    cos, sin = RotaryTable(8, Rope(theta=100.0)).get(7, CPU, torch.float64)
    q, k = random(2, 7, 3, 8), random(2, 7, 3, 8, seed=1)
    theirs = apply_rotary_pos_emb_interleave(q, k, cos[None], sin[None], unsqueeze_dim=2)
    ours = rotate(q, cos, sin, interleaved=True), rotate(k, cos, sin, interleaved=True)
    scores = [torch.einsum("btnd,bsnd->bnts", *pair) for pair in (ours, theirs)]
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)


def test_the_input_is_left_alone():
    x = random(1, 4, 2, 8)
    before = x.clone()
    for share in (1.0, 0.5):
        rotate(x, *RotaryTable(8, Rope(theta=100.0, share=share)).get(4, CPU, torch.float64))
    assert torch.equal(x, before)


@given(
    shift=st.integers(0, 50), seed=st.integers(0, 100), interleaved=st.booleans(), share=st.sampled_from([0.25, 0.5, 1])
)
def test_products_of_queries_and_keys_depend_on_the_distance_alone(shift, seed, interleaved, share):
    cos, sin = RotaryTable(8, Rope(theta=100.0, share=share)).get(64, CPU, torch.float64)
    query, key = random(1, 1, 1, 8, seed=seed), random(1, 1, 1, 8, seed=seed + 1)

    def product(t, s):
        a = rotate(query, cos[t : t + 1], sin[t : t + 1], interleaved)
        return float((a * rotate(key, cos[s : s + 1], sin[s : s + 1], interleaved)).sum())

    assert product(shift + 10, shift + 3) == pytest.approx(product(10, 3), abs=1e-10)


# --- scaling, against transformers


def by_transformers(kind, head, rope, length):
    """Frequencies and attention factor by transformers' own function."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_type": kind, "rope_theta": rope.theta, "partial_rotary_factor": rope.share, "factor": rope.factor}
    if kind != "linear":
        given["original_max_position_embeddings"] = rope.original
    if kind == "yarn":
        given |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        given |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if kind in ("yarn", "longrope"):
        given["attention_factor"] = rope.attention_factor
    if kind == "longrope":
        given |= {"short_factor": list(rope.short), "long_factor": list(rope.long)}
    if kind == "llama3":
        given |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    config = LlamaConfig(
        hidden_size=2 * head, num_attention_heads=2, head_dim=head, max_position_embeddings=rope.original
    )
    config.rope_parameters = given
    return ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)


ROPES = st.builds(
    Rope,
    theta=st.floats(10.0, 1e7),
    share=st.sampled_from([1.0, 0.5, 0.75]),
    factor=st.floats(1.0, 64.0),
    original=st.integers(2, 9000),
    low_freq=st.floats(0.5, 2.0),
    high_freq=st.floats(2.5, 8.0),
    beta_fast=st.floats(8.0, 64.0),
    beta_slow=st.floats(0.25, 4.0),
    truncate=st.booleans(),
    attention_factor=st.none() | st.floats(0.5, 2.0),
    mscale=st.sampled_from([0.0, 0.707, 1.0]),
    mscale_all_dim=st.sampled_from([0.0, 0.5, 1.0]),
)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3"])
@given(rope=ROPES, head=st.sampled_from([8, 16, 64, 128]), length=st.integers(1, 40_000), data=st.data())
def test_scaled_frequencies_and_factors_are_those_of_transformers(kind, rope, head, length, data):
    size = int(head * rope.share)
    divisors = st.lists(st.floats(1.0, 60.0), min_size=size // 2, max_size=size // 2).map(tuple)
    rope = replace(rope, scaling=kind)
    if kind == "longrope":
        rope = replace(rope, short=data.draw(divisors), long=data.draw(divisors))
    expected, factor = by_transformers(kind, head, rope, length)
    assert torch.equal(frequencies(size, rope, length), expected), "bit for bit, in float32"
    assert attention_factor(rope) == factor
    in_double = frequencies(size, rope, length, torch.float64)
    # llama3 and yarn subtract nearly equal numbers, so a last bit counts for a little more there
    torch.testing.assert_close(in_double.float(), expected, rtol=2e-4 if kind in ("llama3", "yarn") else 2e-6, atol=0)


def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest_by_the_factor():
    plain_H = frequencies(64, Rope(), 1, torch.float64)
    ntk_H = frequencies(64, Rope(scaling="ntk", factor=8.0), 1, torch.float64)
    assert float(plain_H[0] / ntk_H[0]) == 1.0
    assert float(plain_H[-1] / ntk_H[-1]) == pytest.approx(8.0, rel=1e-12)


@pytest.mark.parametrize("rope", [Rope(factor=4.0), Rope(scaling="linear"), Rope(scaling="ntk")])
def test_nothing_changes_without_a_scaling_or_with_factor_one(rope):
    assert torch.equal(frequencies(16, rope, 10), frequencies(16, Rope(), 10))


def test_the_table_of_a_real_llama_3_and_its_lengths():
    """Llama 3.1's settings through transformers' module, angles and all."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = Rope(theta=500_000.0, scaling="llama3", factor=8.0, original=8192)
    given = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    given |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=given, max_position_embeddings=131072)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(20_000)[None])
    ours = RotaryTable(128, rope).get(20_000, CPU, torch.float32)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b[0])


def test_cos_and_sin_carry_the_attention_factor():
    rope = Rope(scaling="yarn", factor=16.0, original=64)
    cos, sin = RotaryTable(16, rope).get(100, CPU, torch.float64)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, yarn_mscale(16.0) ** 2), rtol=1e-12, atol=0)


def test_yarn_mscale_is_one_for_no_stretch():
    assert yarn_mscale(1.0) == yarn_mscale(0.5, 3.0) == 1.0
    assert yarn_mscale(40.0, 1.0) == pytest.approx(0.1 * math.log(40) + 1)


# --- the table


def test_longrope_changes_its_table_at_the_original_length_and_back():
    rope = Rope(scaling="longrope", factor=4.0, original=12, short=(1.0, 1.5), long=(2.0, 8.0))
    table = RotaryTable(4, rope)
    short = table.get(12, CPU, torch.float64)[0].clone()  # the table behind it has 16 rows
    long = table.get(13, CPU, torch.float64)[0]
    factor = math.sqrt(1 + math.log(4) / math.log(12))
    t = torch.arange(12, dtype=torch.float64)
    torch.testing.assert_close(short[:, 1], factor * (t / (1.5 * 100)).cos(), rtol=1e-12, atol=0)
    torch.testing.assert_close(long[:12, 1], factor * (t / (8.0 * 100)).cos(), rtol=1e-12, atol=0)
    assert torch.equal(table.get(12, CPU, torch.float64)[0], short)
    assert table.get(16, CPU, torch.float64)[0].data_ptr() == long.data_ptr(), "computed twice"


def test_dynamic_scaling_gives_each_length_its_own_angles_and_keeps_one_of_them():
    rope = Rope(scaling="dynamic", factor=2.0, original=16)
    table = RotaryTable(8, rope)
    for length in (8, 16, 17, 40, 20, 16):
        cos = table.get(length, CPU, torch.float64)[0]
        rate = frequencies(8, rope, length, torch.float64)
        torch.testing.assert_close(
            cos[:, :4], torch.outer(torch.arange(length).double(), rate).cos(), rtol=0, atol=1e-12
        )
    assert torch.equal(frequencies(8, rope, 16), frequencies(8, Rope(), 16))
    assert not torch.equal(frequencies(8, rope, 17), frequencies(8, rope, 18))
    assert len(table._tables) == 2, "one within the original context, one beyond"


def test_the_table_grows_and_keeps_what_it_had():
    table = RotaryTable(8, Rope(theta=100.0))
    short = [part.clone() for part in table.get(3, CPU, torch.float32)]
    long = table.get(500, CPU, torch.float32)
    assert all(part.shape == (500, 8) for part in long)
    assert all(torch.equal(a, b[:3]) for a, b in zip(short, long, strict=True))
    again = table.get(500, CPU, torch.float32)
    assert again[0].data_ptr() == long[0].data_ptr(), "computed twice"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_table_is_computed_exactly_and_rounded_once(dtype):
    cos, sin = RotaryTable(16, Rope()).get(300, CPU, dtype)
    exact = RotaryTable(16, Rope()).get(300, CPU, torch.float64)
    step = torch.finfo(dtype).eps
    assert cos.dtype == sin.dtype == dtype
    # float32 angles of up to 300 radians are themselves off by 300 x 6e-8.
    slack = 0 if dtype == torch.float64 else 2e-5
    for ours, theirs in zip((cos, sin), exact, strict=True):
        assert float((ours.double() - theirs).abs().max()) <= step + slack


def test_a_model_that_has_generated_can_still_be_trained():
    """The table made under inference_mode must not be kept as an inference tensor: backward refuses those."""
    table = RotaryTable(8, Rope(theta=100.0))
    with torch.inference_mode():
        table.get(16, CPU, torch.float64)
    x = random(1, 16, 2, 8).requires_grad_()
    rotate(x, *table.get(16, CPU, torch.float64)).sum().backward()
    assert x.grad is not None


def test_a_table_built_while_models_are_made_on_meta_is_real():
    with torch.device("meta"):
        table = RotaryTable(8, Rope(scaling="longrope", original=16, short=(1.0,) * 4, long=(2.0,) * 4))
        cos, _ = table.get(4, CPU, torch.float32)
    assert float(cos[0, 0]) == 1.0


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        (Rope(share=0.4), "rope.share 0.4 of head_dim 8 is 3"),
        (Rope(share=0.1), "rope.share 0.1 of head_dim 8 is 0"),
        (Rope(scaling="yarn", factor=4.0), "rope.original is 0"),
        (Rope(scaling="linear", factor=0.0), "rope.factor is 0.0"),
        (Rope(scaling="ntk", factor=2.0, share=0.25), "at least two pairs"),
        (Rope(scaling="longrope", original=8, short=(1.0,) * 4, long=(1.0,) * 3), "rope.long has 3 numbers; write 4"),
    ],
)
def test_a_rope_that_cannot_be_is_refused(rope, says):
    with pytest.raises(UserError, match=says):
        RotaryTable(8, rope)
