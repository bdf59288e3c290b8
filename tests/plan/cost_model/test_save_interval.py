"""The interval between saves, against the model that it is the optimum of."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.plan.cost_model.goodput import (
    FIRST_S,
    LONGEST_S,
    SHORTEST_S,
    count_interruptions,
    mean_time_to_interruption,
    save_interval,
    young_daly,
)

stalls = st.floats(0.01, 300)
times = st.floats(2000, 1e8)


def expected_share_lost(interval_s: float, stall_s: float, mtti_s: float) -> float:
    """Wall-clock per second of work, less one, for exponential failures and no restart time: Daly 2006, eq. 13."""
    return mtti_s * math.expm1((interval_s + stall_s) / mtti_s) / interval_s - 1


def best_interval(stall_s: float, mtti_s: float) -> float:
    low, high = stall_s / 100, 20 * mtti_s
    for _ in range(300):  # golden section on a function with one minimum, in logarithms
        a, b = low * (high / low) ** 0.382, low * (high / low) ** 0.618
        if expected_share_lost(a, stall_s, mtti_s) < expected_share_lost(b, stall_s, mtti_s):
            high = b
        else:
            low = a
    return math.sqrt(low * high)


@given(stall_s=stalls, mtti_s=times)
def test_it_loses_no_more_than_the_numerical_optimum(stall_s, mtti_s):
    ours = expected_share_lost(young_daly(stall_s, mtti_s), stall_s, mtti_s)
    best = expected_share_lost(best_interval(stall_s, mtti_s), stall_s, mtti_s)
    assert ours <= best * 1.001 + 1e-12


def test_it_is_closer_to_the_optimum_than_youngs_square_root():
    for stall_s, mtti_s in ((60, 3600), (300, 7200), (10, 600)):
        best = best_interval(stall_s, mtti_s)
        young = math.sqrt(2 * stall_s * mtti_s)
        assert abs(young_daly(stall_s, mtti_s) - best) < abs(young - best) / 3


def test_a_save_that_takes_longer_than_the_machine_lives():
    assert young_daly(500, 200) == 200


def test_the_rate_starts_at_the_published_one_and_moves_to_the_observed():
    node_days = mean_time_to_interruption(1, 0, 0) / 86_400
    assert 1000 / 6.5 < node_days < 1000 / 4
    # 2,000 nodes of 8 GPUs: a failure in two to three hours.
    assert 2 < mean_time_to_interruption(2000, 0, 0) / 3600 < 3
    # A long run that meets one failure a day on one node.
    assert mean_time_to_interruption(1, 10_000, 10_000 * 86_400.0) == pytest.approx(86_400, rel=0.05)
    assert mean_time_to_interruption(1, 0, 1e9) > mean_time_to_interruption(1, 0, 0), "calm lengthens it"


def test_interruptions_are_starts_without_a_last_word_and_faults():
    def count(*kinds):
        return count_interruptions({"kind": kind} for kind in kinds)

    assert count() == count("started") == count("started", "saved", "finished") == 0
    assert count("started", "saved", "started", "interrupted", "started") == 1, "killed once"
    assert count("started", "failed", "started", "failed") == 2
    assert count("started", "started", "started") == 2


@given(stall_s=stalls, save_s=st.floats(0, 5000), mtti_s=times)
def test_the_interval_has_room_for_the_save_and_saves_cost_little(stall_s, save_s, mtti_s):
    interval_s = save_interval(stall_s, save_s, mtti_s)
    assert interval_s >= max(SHORTEST_S, 2 * save_s)
    assert interval_s <= max(LONGEST_S, 200 * stall_s, 2 * save_s)
    if max(SHORTEST_S, 2 * save_s) < young_daly(stall_s, mtti_s) < LONGEST_S:
        assert interval_s == young_daly(stall_s, mtti_s)


def test_before_the_first_save():
    assert save_interval(None, 0.0, 1e7) == FIRST_S
