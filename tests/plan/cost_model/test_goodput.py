"""Failures and restarts against the clusters that published theirs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.cost_model.goodput import Reliability, effective_share, goodput

LLAMA_3 = 419 / (16_384 / 8 * 54)  # failures of a node in a day: 419 unexpected interruptions in 54 days
RSC_1 = 6.50e-3  # Kokolis et al. 2025


def first_order(nodes: int, failures_per_node_day: float, restart_s: float, save_s: float, every_s: float) -> float:
    """E[ETTR] of Kokolis et al. 2025."""
    lost = nodes * failures_per_node_day / 86_400 * (restart_s + every_s / 2)
    return max(0.0, (1 - lost) / (1 + save_s / every_s))


def test_llama_3_405b() -> None:
    """419 unexpected interruptions in 54 days of 16,384 GPUs, over 90 % of the time effective."""
    assert pytest.approx(3.79, abs=0.01) == LLAMA_3 * 1000
    assert goodput(2048, Reliability(LLAMA_3)).mtti_s / 3600 == pytest.approx(3.09, abs=0.01)
    run = goodput(2048, Reliability(LLAMA_3, restart_s=300, save_stall_s=10))
    assert 0.9 < run.share < 0.95
    assert run.interruptions(54 * 86_400 * run.share) == pytest.approx(419)


def test_the_research_clusters_of_meta() -> None:
    """RSC-1: projected 1.8 h at 16,384 GPUs and 0.23 h at 131,072; the same model gives 28.8 h at 1,024."""
    assert goodput(16_384 // 8, Reliability(RSC_1)).mtti_s / 3600 == pytest.approx(1.8, abs=0.01)
    assert goodput(131_072 // 8, Reliability(RSC_1)).mtti_s / 3600 == pytest.approx(0.23, abs=0.005)
    assert goodput(1024 // 8, Reliability(RSC_1)).mtti_s / 3600 == pytest.approx(28.8, abs=0.05)


def test_ninety_eight_thousand_gpus_train_half_of_the_time() -> None:
    """FT-HSDP 2026 starts from 44 % at 98K GPUs, with synchronous restarts of all."""
    found = goodput(98_304 // 8, Reliability(RSC_1, restart_s=600, save_stall_s=10))
    assert 0.4 < found.share < 0.6


def test_seventy_billion_on_32_nodes_saves_every_two_hours() -> None:
    found = goodput(32, Reliability(RSC_1, save_stall_s=60))
    assert found.save_every_s / 3600 == pytest.approx(2, abs=0.2)


@given(st.integers(1, 20_000), st.floats(1e-4, 2e-2), st.floats(0, 7200), st.floats(0.1, 600))
def test_shares_add_up_and_agree_with_the_paper_where_little_is_lost(
    nodes: int, rate: float, restart: float, save: float
) -> None:
    found = goodput(nodes, Reliability(rate, restart, save))
    assert found.share + found.saves + found.redone + found.restarts == pytest.approx(1)
    assert all(0 <= part <= 1 for part in (found.share, found.saves, found.redone, found.restarts))
    if found.share > 0.97:
        assert found.share == pytest.approx(first_order(nodes, rate, restart, save, found.save_every_s), abs=2e-3)


@given(st.integers(1, 5000), st.floats(30, 20_000))
def test_the_chosen_interval_is_near_the_best(nodes: int, other: float) -> None:
    best = goodput(nodes, Reliability())
    assert best.share >= goodput(nodes, Reliability(), save_every_s=other).share - 1e-3


def test_more_failures_never_help() -> None:
    shares = [goodput(nodes).share for nodes in (1, 10, 100, 1000, 10_000)]
    assert shares == sorted(shares, reverse=True)
    assert goodput(100, Reliability(failures_per_node_day=0)).mtti_s == math.inf
    assert effective_share(1.0, 600, 10, 10_000)[0] == 0.0


def test_nonsense_is_one_line() -> None:
    with pytest.raises(UserError, match="nodes"):
        goodput(0)
