"""Statistics of scores against scipy and published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bessemer.evaluate.statistics import (
    PairedTest,
    calibration_error,
    choice_confidence,
    clustered_bootstrap,
    detectable_difference,
    holm,
    questions_needed,
    score_interval,
    standard_error,
)
from bessemer.statistics import wilson_interval

DRAW = np.random.default_rng(7)


def test_errors_are_those_of_scipy_and_of_the_clustered_formula() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = DRAW.normal(size=50)
    assert standard_error(values.tolist()) == pytest.approx(stats.sem(values))
    clusters = [number // 5 for number in range(50)]
    residuals = values - values.mean()
    by_hand = math.sqrt(sum(residuals[5 * c : 5 * c + 5].sum() ** 2 for c in range(10))) / 50
    assert standard_error(values.tolist(), clusters) == pytest.approx(by_hand)
    # Repeated questions carry no information: the clustered error is that of the different ones, up to n / (n - 1).
    repeated = np.repeat(values, 4).tolist()
    clustered = standard_error(repeated, [number // 4 for number in range(200)])
    assert clustered == pytest.approx(stats.sem(values) * math.sqrt(49 / 50))
    assert standard_error(repeated) < 0.6 * clustered


def test_the_clustered_bootstrap_agrees_with_the_clustered_error() -> None:
    means = np.repeat(DRAW.normal(size=80), 5)
    values = (means + DRAW.normal(size=400)).tolist()
    clusters = [number // 5 for number in range(400)]
    low, high = clustered_bootstrap(values, clusters)
    assert (high - low) / 2 == pytest.approx(1.96 * standard_error(values, clusters), rel=0.1)
    assert score_interval(values, clusters) == ((low, high), "bootstrap over clusters")


def test_intervals_are_chosen_by_the_values() -> None:
    assert score_interval([1.0, 0.0, 1.0, 1.0])[1] == "Wilson"
    assert score_interval([0.5, 0.25, 1.0])[1] == "bootstrap"
    # Ten texts with four equal answers each are ten questions; of all-equal answers too.
    for rate in (0.5, 0.0):
        answers = [float(number // 4 < 10 * rate) for number in range(40)]
        (_, high), method = score_interval(answers, [number // 4 for number in range(40)])
        assert method.startswith("Wilson, ") and high == pytest.approx(wilson_interval(10 * rate, 10)[1], abs=0.01)
    assert score_interval([])[1] == "none"


def test_paired_tests_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = (DRAW.random(1000) < 0.6).astype(float), (DRAW.random(1000) < 0.63).astype(float)
    found = PairedTest.of(a.tolist(), b.tolist())
    wins, losses = int((b > a).sum()), int((b < a).sum())
    assert found.p == pytest.approx(stats.binomtest(min(wins, losses), wins + losses).pvalue, rel=1e-9)
    assert (found.error, found.test) == (pytest.approx(stats.sem(b - a)), "McNemar exact")
    reference = stats.bootstrap((b - a,), np.mean, method="percentile", n_resamples=4000, rng=2).confidence_interval
    assert found.interval == pytest.approx((reference.low, reference.high), abs=0.004)
    smooth_a, smooth_b = DRAW.random(500), DRAW.random(500) + 0.03
    smooth = PairedTest.of(smooth_a.tolist(), smooth_b.tolist())
    assert smooth.p == pytest.approx(stats.ttest_rel(smooth_b, smooth_a).pvalue, rel=0.02, abs=1e-3)
    assert PairedTest.of([0.5, 0.5], [0.5, 0.5]).p == 1.0


def test_holm_is_the_published_procedure() -> None:
    # Holm's step-down on four p-values, by hand: 4 * 0.005, 3 * 0.01, 2 * 0.03, 1 * 0.04 with the running maximum.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_power_is_that_of_miller() -> None:
    assert questions_needed(0.03) == 969  # (1.96 + 0.84)^2 / 9 / 0.03^2
    assert detectable_difference(969) == pytest.approx(0.03, abs=1e-4)
    assert detectable_difference(200) == pytest.approx(0.066, abs=5e-4)


def test_power_holds_in_simulation() -> None:
    n, difference = 400, detectable_difference(400, variance=0.2)
    up, down = (0.2 + difference**2 + difference) / 2, (0.2 + difference**2 - difference) / 2
    seen = 0
    for _ in range(400):
        draws = DRAW.random(n)
        change = np.where(draws < up, 1.0, np.where(draws < up + down, -1.0, 0.0))
        seen += abs(change.mean()) > 1.96 * standard_error(change.tolist())
    assert 0.72 < seen / 400 < 0.88


def test_calibration_error_by_hand_and_of_a_calibrated_model() -> None:
    confidences, right = [0.6, 0.9, 0.7, 0.8], [1.0, 1.0, 0.0, 0.0]
    # Two bins: 0.6 and 0.7 with accuracy 0.5, 0.8 and 0.9 with accuracy 0.5.
    assert calibration_error(confidences, right, bins=2) == pytest.approx((0.15 + 0.35) / 2)
    sure = DRAW.random(30_000)
    assert calibration_error(sure.tolist(), (DRAW.random(30_000) < sure).astype(float).tolist()) < 0.015
    assert calibration_error(sure.tolist(), np.zeros(30_000).tolist()) == pytest.approx(0.5, abs=0.01)
    assert choice_confidence([math.log(0.1), math.log(0.3)]) == pytest.approx(0.75)
