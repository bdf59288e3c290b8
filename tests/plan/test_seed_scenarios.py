"""Scenarios that are often answered wrongly, with the right arithmetic."""

import pytest

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import CHECKPOINT_BYTES, impossible, work_seconds
from bessemer.plan.hardware import find_gpu
from bessemer.plan.recipe.tokens import optimal_tokens
from bessemer.plan.search.budget import speed_up
from bessemer.plan.search.proposal import propose
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec, optimizer_bytes

A100 = find_gpu("A100-80GB")
DAY = 86_400


def test_7b_on_100b_tokens_with_8_a100() -> None:
    """About 43 days at 45 %, not 7; 39 to 49 between 50 and 40 %."""
    days = [work_seconds(6 * 7e9 * 1e11, 8, A100.peak("bf16"), mfu) / DAY for mfu in (0.50, 0.45, 0.40)]
    assert days == pytest.approx([38.95, 43.28, 48.69], abs=0.01)
    assert [1e11 / (day * DAY) for day in days] == pytest.approx([29_714, 26_743, 23_771], abs=1)  # tokens a second


def test_70b_on_1t_tokens_with_256_a100() -> None:
    """160 days and 984,000 GPU-hours at 38 %, not 15 hours."""
    seconds = work_seconds(6 * 70e9 * 1e12, 256, A100.peak("bf16"), 0.38)
    assert seconds / DAY == pytest.approx(160, abs=0.5)
    assert 256 * seconds / 3600 == pytest.approx(984_000, rel=1e-3)


def test_7b_on_1t_tokens_costs() -> None:
    """4.2e22 FLOPs, 93,500 A100-hours at 40 %, $187,000 at two dollars; the 15 days are those of 256 GPUs."""
    hours = work_seconds(6 * 7e9 * 1e12, 1, A100.peak("bf16"), 0.40) / 3600
    assert hours == pytest.approx(93_500, rel=1e-3)
    assert 2 * hours == pytest.approx(187_000, rel=1e-3) and hours / 256 / 24 == pytest.approx(15.2, abs=0.1)


def test_70b_memory() -> None:
    """AdamW in mixed precision holds 16 to 18 bytes a parameter: 1,120 to 1,260 GB, not 700."""
    fp32 = optimizer_bytes(OptimizerSpec(), MemorySpec(weights="fp32"))
    kahan = optimizer_bytes(OptimizerSpec(), MemorySpec(weights="kahan"))
    assert fp32.device * 70 == pytest.approx(1260)  # with fp32 gradients and a bf16 copy
    assert kahan.device * 70 == pytest.approx(980)  # bf16 and what it lacks: as exact, for less
    assert CHECKPOINT_BYTES * 70 == 840  # GB of a full checkpoint; 280 is fp32 weights alone
    assert 7 * fp32.device > 80 and 3.5 * fp32.device < 80  # plain DDP on 80 GB ends near 4B


def test_a_million_tokens_a_second_is_impossible() -> None:
    said = impossible(7e9, 1.2e6, 8, A100)
    assert said is not None
    assert "6.3 PFLOP/s each" in said and "20 times" in said and "59.4K tokens/s" in said and "26.7K" in said
    assert impossible(7e9, 30_000, 8, A100) is None
    at_150k = impossible(7e9, 150_000, 8, A100)
    assert at_150k is not None and "8 x A100-80GB" in at_150k
    assert 6 * 7e9 * 50_000 / (8 * A100.peak("bf16")) == pytest.approx(0.84, abs=0.01)  # 50K is already 84 % MFU


def test_llama_3_8b_is_far_past_chinchilla() -> None:
    assert pytest.approx(94, abs=1) == 15e12 / (20 * 8e9)
    assert 15e12 / optimal_tokens(8e9) > 80


def test_accumulation_of_4m_tokens() -> None:
    """4M tokens over 8 data-parallel ranks of 8,192 tokens are 61 micro-batches, not 2."""
    assert pytest.approx(61, abs=0.1) == 4_000_000 / (8 * 8192)
    stages, micro_batches = 4, 2
    assert (stages - 1) / (micro_batches + stages - 1) == pytest.approx(0.6)  # and 2 would leave a 60 % bubble


def test_the_planner_says_weeks_and_not_days() -> None:
    """The same runs as the planner sees them: its days are its own tokens, FLOPs, peak and utilisation."""
    for model, gpus, tokens, least, most in (
        ("7b", "8xA100-80GB", 10**11, 25, 50),
        ("70b", "256xA100-80GB", 10**12, 80, 180),
    ):
        found = propose(model, gpus, tokens)
        flops = tokens * found.shape.flops_per_token(found.wish.context)
        seconds = work_seconds(flops, found.wish.cluster.count, A100.peak("bf16"), found.best.mfu)
        assert seconds == pytest.approx(found.seconds) and least < found.wall_s / DAY < most


def test_7b_on_1t_tokens_has_its_price() -> None:
    found = propose("7b", "256xA100-80GB", 10**12)
    hours = found.seconds / 3600 * 256
    assert 55_000 < hours < 110_000  # 93,500 at 40 %
    firm = next(cost for cost in found.costs if cost.price.term == "on_demand")
    assert firm.parts["gpus"] == pytest.approx(256 * firm.wall_s / 3600 * firm.price.usd_hour)


def test_70b_wants_more_than_a_node() -> None:
    """1.27 TB of weights, gradients and moments against 640 GB; 32 GPUs hold them, 16 only with something given up."""
    with pytest.raises(UserError, match=r"nothing fits.*1\.27 TB: about \d+ GPUs"):
        propose("70b", "8xA100-80GB", 10**12)
    found = propose("70b", "64xA100-80GB", 10**12)
    assert 18 * found.shape.parameters / 1e12 == pytest.approx(1.27, abs=0.01)
    held = found.best.needs.weights + found.best.needs.gradients + found.best.needs.moments
    assert held * 64 == pytest.approx(16 * found.shape.parameters, rel=0.05)  # the bf16 copy is made layer by layer


def test_8_a100_only_3_times_faster_than_one() -> None:
    """Inside one node eight are nearly eight times one. Three times is what eight machines with 10 Gb/s between them
    reach, and the time goes to gradients and activations on their way; 100 Gb/s brings most of it back."""
    node = propose("350m", "8xA100-80GB", 10**10)
    slow = propose("350m", "8 nodes of 1 A100-80GB", 10**10, network="10 Gb/s")
    fast = propose("350m", "8 nodes of 1 A100-80GB", 10**10, network="100 Gb/s")
    times = [speed_up(one) for one in (node, slow, fast)]
    assert times == [pytest.approx(7.9, abs=0.2), pytest.approx(3.0, abs=0.5), pytest.approx(7.0, abs=0.7)]
    parts = slow.best.time.parts
    assert parts["dp"] + parts["pp"] > parts["compute"] and node.best.time.parts["dp"] < 0.05 * node.best.time.total_s
