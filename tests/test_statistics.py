import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.statistics import PairedChange, Rate, bootstrap_interval, sign_test, wilson_interval

CASES = [(0, 10), (1, 7), (5, 10), (49, 50), (50, 50), (733, 2000)]


@pytest.mark.parametrize(("hits", "total"), CASES)
def test_wilson_and_the_sign_test_are_those_of_scipy(hits: int, total: int) -> None:
    binomtest = pytest.importorskip("scipy.stats").binomtest
    reference = binomtest(hits, total).proportion_ci(0.95, "wilson")
    assert wilson_interval(hits, total) == pytest.approx((reference.low, reference.high), abs=1e-12)
    assert sign_test(hits, total - hits) == pytest.approx(binomtest(hits, total).pvalue, rel=1e-9)


def test_the_bootstrap_is_that_of_scipy() -> None:
    scipy = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).normal(size=200) ** 2
    reference = scipy.bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=1).confidence_interval
    assert bootstrap_interval(list(values), draws=4000) == pytest.approx((reference.low, reference.high), abs=0.02)
    assert bootstrap_interval(list(values)) == bootstrap_interval(list(values))


def test_a_paired_change_is_mcnemars_test() -> None:
    before = [True] * 3 + [False] * 12 + [True] * 5
    after = [False] * 3 + [True] * 12 + [True] * 5
    change = PairedChange.of(before, after)
    assert (change.rises, change.falls, change.difference) == (12, 3, pytest.approx(9 / 20))
    assert change.p == pytest.approx(2 * sum(math.comb(15, k) for k in range(4)) / 2**15)
    assert change.interval[0] < 9 / 20 < change.interval[1]
    assert PairedChange.of([1.0, 1.0], [1.0, 1.0]).p == 1.0


@given(st.integers(0, 300), st.integers(0, 300))
def test_intervals_hold_their_rate(hits: int, misses: int) -> None:
    rate = Rate(hits, hits + misses)
    low, high = rate.interval
    assert 0 <= low <= high <= 1
    assert not rate.total or low <= rate.share <= high


def test_rates_are_printed() -> None:
    assert str(Rate.of([True, False, False, False])) == "25.0% (4.6% to 69.9%), 1 of 4"
    assert str(Rate(0, 0)) == "no cases"
    assert Rate(0, 0).to_json()["rate"] is None
