"""ALiBi, sinusoidal and T5's relative positions, against transformers' own functions."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.layers import RelativeBias, alibi_bias, alibi_rounded, alibi_slopes, relative_bucket, sinusoidal

CPU = torch.device("cpu")


@given(heads=st.integers(1, 130), length=st.integers(1, 40))
def test_alibi_is_bloom_s_up_to_a_constant_per_query(heads, length):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs_N1S = build_alibi_tensor(torch.ones(1, length), heads, torch.float32)
    slopes = alibi_slopes(heads)
    if length > 1:
        assert torch.equal(slopes, theirs_N1S[:, 0, 1])
    ours = alibi_bias(slopes.double(), length, length)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    softmax = [
        b.masked_fill(~seen, -math.inf).softmax(-1) for b in (ours[0], theirs_N1S.double().expand(-1, length, -1))
    ]
    torch.testing.assert_close(*softmax, rtol=1e-5, atol=1e-6)  # theirs rounds slope * position to float32


def test_alibi_falls_with_the_distance_on_both_sides_and_fits_a_cache():
    full = alibi_bias(alibi_slopes(4), 6, 6)
    assert full.shape == (1, 4, 6, 6)
    assert full[0, 0, 5].tolist() == [-0.25 * d for d in (5, 4, 3, 2, 1, 0)]
    assert torch.equal(full, full.transpose(2, 3))
    assert torch.equal(alibi_bias(alibi_slopes(4), 2, 6), full[:, :, 4:])


def test_rounded_alibi_is_falcon_s_bit_for_bit():
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    theirs_N1S = build_alibi_tensor(torch.ones(1, 600, dtype=torch.int64), 12, torch.float32)
    assert torch.equal(alibi_rounded(alibi_slopes(12), torch.arange(600)[None])[0].float(), theirs_N1S)


@given(length=st.integers(1, 50), width=st.integers(1, 20))
def test_sinusoidal_is_the_paper_s_formula(length, width):
    table = sinusoidal(length, width)
    assert table.shape == (length, width)
    for t in range(0, length, 7):
        for j in range(width):
            angle = t / 10_000 ** (2 * (j // 2) / width)
            assert float(table[t, j]) == pytest.approx(math.cos(angle) if j % 2 else math.sin(angle), abs=1e-12)


@example(bidirectional=False, buckets=20, more=310)  # distance 20 falls into another bucket in float64
@given(bidirectional=st.booleans(), buckets=st.integers(4, 64), more=st.integers(1, 300))
def test_buckets_are_t5_s(bidirectional, buckets, more):
    from transformers.models.t5.modeling_t5 import T5Attention

    near = buckets // 4 if bidirectional else buckets // 2
    distances = torch.arange(-800, 801)
    ours = relative_bucket(distances, bidirectional, buckets, near + more)
    assert torch.equal(ours, T5Attention._relative_position_bucket(distances, bidirectional, buckets, near + more))


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (9, 9), (300, 300), (1, 200), (3, 150)])
def test_the_relative_bias_and_its_gradient_are_t5_s(decoder, T, S):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=8, num_heads=3, d_kv=4, is_decoder=decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    ours = RelativeBias(32, 128, heads=3, bidirectional=not decoder).double()
    weight = torch.randn(32, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours.weight.data.copy_(weight)
    theirs.relative_attention_bias.weight.data.copy_(weight)
    a, b = ours(T, S, CPU), theirs.compute_bias(T, S, device=CPU, past_seen_tokens=S - T)
    assert a.shape == (1, 3, T, S)
    assert torch.equal(a, b)
    pull = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (a * pull).sum().backward()
    (b * pull).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.relative_attention_bias.weight.grad, rtol=1e-10, atol=1e-10)


def test_a_bias_built_on_meta_and_first_used_by_generation_trains():
    with torch.device("meta"):
        bias = RelativeBias(8, 20, heads=2, bidirectional=True)
    bias.to_empty(device="cpu")
    bias.weight.data.fill_(1.0)
    with torch.inference_mode():
        bias(1, 5, CPU)
    bias(5, 5, CPU).sum().backward()
    assert float(bias.weight.grad.sum()) == 2 * 25


@pytest.mark.parametrize(
    ("buckets", "distance", "says"), [(2, 128, "at least 4"), (64, 16, "relative_distance above 16")]
)
def test_buckets_that_cannot_be_are_refused(buckets, distance, says):
    with pytest.raises(UserError, match=says):
        RelativeBias(buckets, distance, heads=2, bidirectional=True)
