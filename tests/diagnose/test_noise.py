"""The noise scale against a problem where |G|^2 and tr(Sigma) are known."""

import math
import random
from collections.abc import Iterator
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn

from bessemer.diagnose.gradients import (
    estimate_noise,
    fieller_interval,
    measure_noise_scale,
    noise_report,
    student_quantile,
)
from bessemer.diagnose.report import InspectedModel, MicroBatchTerms

SIZE = 50


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIZE))


def linear(gradient: float, sigma: float, sizes: list[int], seed: int) -> InspectedModel:
    """Loss x . (G + noise) over tokens: each token's gradient is G + N(0, sigma^2), so S = SIZE sigma^2."""
    model, generator = Point(), torch.Generator().manual_seed(seed)
    true = torch.full((SIZE,), gradient / math.sqrt(SIZE))

    def parts(step: int, precision: str | None) -> Iterator[MicroBatchTerms]:
        for tokens in sizes:
            noise = torch.randn(SIZE, generator=generator) * sigma / math.sqrt(max(1, tokens))
            share = tokens / sum(sizes)
            loss: Tensor = (model.x @ (true + noise)) * share
            yield MicroBatchTerms(loss, share, float(tokens))

    return InspectedModel(model, parts)


@pytest.mark.parametrize("sizes", [pytest.param([16] * 8, marks=pytest.mark.slow), [4, 8, 16, 64, 0]])
def test_it_finds_the_known_noise_scale(sizes: list[int]) -> None:
    """S / |G|^2 = 50 * 4^2 / 2^2 = 200 tokens, also from batches of unequal size and a row of padding."""
    found = measure_noise_scale(linear(2.0, 4.0, sizes, seed=1), list(range(400)))
    assert found.noise_trace == pytest.approx(SIZE * 16, rel=0.1)
    assert found.gradient_square == pytest.approx(4.0, rel=0.2)
    assert found.tokens == pytest.approx(200, rel=0.2)
    assert found.low < 200 < found.high and found.high / found.low < 2


def test_the_estimates_are_unbiased_by_construction() -> None:
    """Without randomness: |g_b|^2 = |G|^2 + S / b exactly gives them back."""
    small = [(b, 3.0 + 10.0 / b) for b in (2.0, 4.0, 8.0)]
    assert estimate_noise(small, (14.0, 3.0 + 10.0 / 14.0)) == pytest.approx((3.0, 10.0))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(0)
    covered = 0
    for _ in range(1000):
        samples = [(draw.gauss(2.0, 1.0), draw.gauss(10.0, 3.0)) for _ in range(12)]
        low, high = fieller_interval(samples)
        covered += low <= 5.0 <= high
    assert 0.93 <= covered / 1000 <= 0.97


def test_a_gradient_lost_in_noise_has_no_upper_bound() -> None:
    found = measure_noise_scale(linear(0.0, 4.0, [4] * 4, seed=2), list(range(8)))
    assert found.high == math.inf and found.low > 0
    assert "unbounded" in noise_report(found, 16.0, "here").text()
    assert fieller_interval([(1.0, 1.0)]) == (0.0, math.inf)


def test_the_advice_follows_the_batch() -> None:
    found = measure_noise_scale(linear(2.0, 4.0, [16] * 8, seed=1), list(range(200)))
    assert "below the interval" in noise_report(found, 10.0, "x").text()
    assert "above the interval" in noise_report(found, 10_000.0, "x").text()
    assert "within the interval" in noise_report(found, 200.0, "x").text()


def test_steps_of_one_row_are_joined_and_too_few_are_refused() -> None:
    found = measure_noise_scale(linear(2.0, 4.0, [32], seed=3), list(range(800)), fewest=4)
    assert len(found.samples) == 200 and found.large == 128
    assert found.tokens == pytest.approx(200, rel=0.3)
    with pytest.raises(ValueError, match="examine more"):
        measure_noise_scale(linear(2.0, 4.0, [32], seed=3), [0, 1])


def test_students_quantiles() -> None:
    """Against the printed tables."""
    for freedom, value in ((4, 2.776), (7, 2.365), (15, 2.131), (100, 1.984)):
        assert student_quantile(0.95, freedom) == pytest.approx(value, rel=0.01)


def test_no_gradients_stay_behind() -> None:
    subject = linear(1.0, 1.0, [4] * 4, seed=0)
    assert fmean([measure_noise_scale(subject, [0, 1]).small]) == 4
    assert all(p.grad is None for p in subject.model.parameters())
