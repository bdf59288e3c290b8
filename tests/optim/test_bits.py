"""Few bits: roundings that are right on average, halves that lose nothing, blocks of 8 bits against the peers' maps."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bessemer.optim.low_memory import dequantize, join_weights, quantize, random_bits, split_weights, stochastic_round

N = 1 << 16


def key(number):
    return torch.tensor(number, dtype=torch.int32)


def filled(value):
    return torch.full((N,), value, dtype=torch.float32)


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-20, 6.5e4, 1 + 2**-8 + 2**-15, -7e-42])
@pytest.mark.parametrize("seed", [0, 12345, -(2**31)])
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(value, seed):
    x = filled(value)
    result = stochastic_round(x, key(seed))
    assert torch.equal(result, result.bfloat16().float()), "these are bf16 numbers"
    low = (x.view(torch.int32) & -0x10000).view(torch.float32)[0].double()  # towards zero
    high = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)[0].double()
    assert set(result.double().tolist()) == {low.item(), high.item()}
    share = (x[0].double() - low) / (high - low)
    sigma = (high - low).abs() * math.sqrt(share * (1 - share) / N)
    assert (result.double().mean() - x[0].double()).abs() < 4 * sigma


def test_what_is_bf16_already_or_no_number_stays():
    odd = [0.0, -0.0, 1.5, -2.25, math.inf, -math.inf, math.nan]
    result = stochastic_round(torch.tensor(odd * 50), key(1)).view(50, -1)
    assert all(str(float(value)) == str(wanted) for row in result for value, wanted in zip(row, odd, strict=True))


def test_noise_is_even_independent_of_the_key_and_the_same_again():
    a, b = random_bits(filled(0), key(1)).double(), random_bits(filled(0), key(2)).double()
    assert torch.equal(a, random_bits(filled(0), key(1)).double())
    for bits in (a, b):
        assert bits.min() >= 0 and bits.max() < 2**16
        counts = torch.histc(bits, 64, 0, 2**16)
        chi2 = ((counts - N / 64) ** 2 / (N / 64)).sum()
        assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    for x, y in ((a, b), (a[1:], a[:-1]), (a[256:], a[:-256])):
        assert abs(torch.corrcoef(torch.stack((x, y)))[0, 1]) < 5 / math.sqrt(N)


@given(st.integers(0, 2**32 - 1))
def test_halves_lose_nothing(bits):
    x = torch.tensor(struct.unpack("<f", struct.pack("<I", bits)))
    high, low = split_weights(x)
    weight = high.bfloat16()
    if x.isnan():
        assert weight.isnan() and join_weights(weight, low).isnan()
        return
    assert struct.pack("<f", join_weights(weight, low).item()) == struct.pack("<I", bits)
    nearest = x.bfloat16()
    assert weight == nearest or (low == -0x8000 and weight.abs() > nearest.abs())  # a tie goes up


def test_blocks_of_8_bits_keep_zero_the_largest_and_the_sign():
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 10, 40)[:, None]
    x[7] = 0.0
    codes, scale = quantize(x, True, key(1))
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scale.shape == (40, 1)
    back = dequantize(codes, scale, signed=True)
    assert torch.equal(back[7], torch.zeros(256))
    assert torch.equal(back.abs().amax(1), x.abs().amax(1)), "the largest of a block is exact"
    assert ((back == 0) | (back.sign() == x.sign())).all()
    root = (x / scale.clamp(min=1e-30)).abs() ** (1 / 3)
    assert ((back - x).abs() <= scale * ((root + 1 / 127) ** 3 - root**3) * 1.001).all(), "a step of the root"


def test_a_second_moment_above_zero_is_never_zero():
    x = torch.logspace(0, -30, 256)[None]
    codes, scale = quantize(x, False, key(1))
    back = dequantize(codes, scale, signed=False)
    assert (back > 0).all()
    assert torch.equal(dequantize(*quantize(torch.zeros(1, 256), False, key(1)), signed=False), torch.zeros(1, 256))
    seen = x > 1e-6
    assert ((back - x).abs() / x)[seen].max() < 0.26


def moments():
    """Of weights whose gradients have sizes that differ by row and column, as in a real matrix."""
    generator = torch.Generator().manual_seed(0)
    size = (torch.randn(512, 1, generator=generator) + torch.randn(1, 256, generator=generator)).exp() * 1e-4
    m, v = torch.zeros(512, 256), torch.zeros(512, 256)
    for _ in range(60):
        gradient = size * torch.randn(512, 256, generator=generator)
        m, v = m.lerp(gradient, 0.1), v.lerp(gradient**2, 0.05)
    return m, v


@pytest.mark.slow
def test_the_update_is_nearer_than_torchao_s_and_right_on_average():
    peer = pytest.importorskip("torchao.optim.quant_utils")
    m, v = moments()
    exact = m / (v.sqrt() + 1e-8)

    def ours(x, signed, seed):
        return dequantize(*quantize(x, signed, key(seed)), signed)

    def theirs(x, signed):
        table = torch.tensor(peer.create_dynamic_map(signed))
        unit, scale = peer.scale_tensor(x, 256)
        return peer.dequant_with_qmap(peer.quantize_8bit_with_qmap(unit, table), table, scale)

    def error(m, v):
        return ((m / (v.sqrt() + 1e-8) - exact).norm() / exact.norm()).item()

    drawn = [error(ours(m, True, seed), ours(v, False, -seed)) for seed in range(1, 33)]
    peers = error(theirs(m, True), theirs(v, False))
    together = sum(ours(m, True, seed) / 32 for seed in range(1, 33))
    assert max(drawn) < 0.04 and max(drawn) < peers, peers
    assert (together - m).norm() < 0.25 * (theirs(m, True) - m).norm(), "right on average"
