"""Advantages against loops in float64, hand-worked examples and TRL 1.13's trainers."""

import math

import pytest
import torch

from bessemer.align.advantages import (
    equal_groups,
    gae,
    group_advantages,
    overlong_penalty,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
    whiten,
)  # fmt: skip


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_the_formula(scale: str) -> None:
    rewards = draw(5, 8)
    everything = rewards.flatten().tolist()
    for row, group in zip(group_advantages(rewards, scale).tolist(), rewards.tolist(), strict=True):  # type: ignore[arg-type]
        mean = sum(group) / 8
        divisor = {"group": deviation(group) + 1e-4, "batch": deviation(everything) + 1e-4, "none": 1.0}[scale]
        assert row == pytest.approx([(reward - mean) / divisor for reward in group], abs=1e-12)


def test_rloo_compares_with_the_other_answers() -> None:
    torch.testing.assert_close(
        rloo_advantages(torch.tensor([[1.0, 0.0, 0.0, 3.0]])), torch.tensor([[0.0, -4 / 3, -4 / 3, 8 / 3]])
    )
    rewards = draw(6, 4)
    for row, group in zip(rloo_advantages(rewards).tolist(), rewards.tolist(), strict=True):
        assert row == pytest.approx([group[i] - (sum(group) - group[i]) / 3 for i in range(4)], abs=1e-12)
    torch.testing.assert_close(rloo_advantages(rewards), group_advantages(rewards, "none") * 4 / 3)
    normal = rloo_advantages(rewards, normalise=True)
    assert normal.mean().abs() < 1e-12 and normal.std() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
def test_answers_without_a_reward_change_no_other(function) -> None:  # type: ignore[no-untyped-def]
    rewards = draw(3, 4)
    widened = torch.full((3, 6), torch.nan, dtype=torch.float64)
    widened[:, [0, 2, 3, 5]] = rewards
    advantages = function(widened)
    torch.testing.assert_close(advantages[:, [0, 2, 3, 5]], function(rewards))
    assert (advantages[:, [1, 4]] == 0).all()
    lonely = torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan], [2.0, 4.0]])
    assert (function(lonely)[:2] == 0).all() and (function(lonely)[2] != 0).all()


def test_gae_by_hand() -> None:
    """Three tokens, reward 1 at the end, gamma 0.9, lambda 0.5.

    errors: 0.9*0.4-0.5 = -0.14, 0.9*0.6-0.4 = 0.14, 1-0.6 = 0.4;
    advantages: 0.4; 0.14+0.45*0.4 = 0.32; -0.14+0.45*0.32 = 0.004. A tool's token in between changes nothing."""
    values, rewards = torch.tensor([[0.5, 0.4, 0.6]]), torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.004, 0.32, 0.4]]))
    torch.testing.assert_close(returns, torch.tensor([[0.504, 0.72, 1.0]]))
    values, rewards = torch.tensor([[9.0, 0.5, 7.0, 0.4, 0.6, 8.0]]), torch.tensor([[0.0, 0.0, 5.0, 0.0, 1.0, 0.0]])
    mask = torch.tensor([[0, 1, 0, 1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.004, 0.0, 0.32, 0.4, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.504, 0.0, 0.72, 1.0, 0.0]]))


def test_gae_is_the_sum_of_discounted_errors() -> None:
    rewards, values, mask = draw(4, 9), draw(4, 9, seed=1), torch.ones(4, 9)
    advantages, _ = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    for row in range(4):
        after = [*values[row].tolist()[1:], 0.0]
        errors = [float(rewards[row, t]) + 0.97 * after[t] - float(values[row, t]) for t in range(9)]
        expected = [sum((0.97 * 0.9) ** (k - t) * errors[k] for k in range(t, 9)) for t in range(9)]
        assert advantages[row].tolist() == pytest.approx(expected, abs=1e-12)
    monte_carlo, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))
    torch.testing.assert_close(monte_carlo, returns - values)


def test_the_reward_is_at_the_last_token() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    penalty = torch.full((3, 4), 0.25)
    expected = [[-0.25, -0.25, 1.75, 0.0], [0.0, 2.75, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask, penalty).tolist() == expected


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_whitens_returns_over_all_tokens(baseline: bool) -> None:
    rewards, penalty = draw(2, 3), draw(6, 5, seed=1) * 0.1
    mask = (torch.arange(5) < torch.tensor([5, 2, 4, 1, 3, 5])[:, None]).double()
    flat: list[tuple[int, int, float]] = []
    for row in range(6):
        length = int(mask[row].sum())
        group = rewards[row // 3]
        reward = float(group[row % 3] - (group.mean() if baseline else 0.0))
        for t in range(length):
            flat.append((row, t, reward - float(penalty[row, t:length].sum())))
    values = [value for _, _, value in flat]
    mean, scale = sum(values) / len(values), deviation(values)
    advantages = reinforce_pp_advantages(rewards, mask, penalty, baseline=baseline)
    for row, t, value in flat:
        assert float(advantages[row, t]) == pytest.approx((value - mean) / scale, abs=1e-6)
    assert (advantages[mask == 0] == 0).all()


def test_whiten_ignores_padding() -> None:
    values, mask = draw(3, 7), (torch.arange(7) < torch.tensor([7, 3, 5])[:, None])
    inside = values[mask]
    torch.testing.assert_close(whiten(values, mask)[mask], (inside - inside.mean()) / inside.std(), rtol=1e-6, atol=0)
    noisy = values.masked_fill(~mask, 1e3)
    torch.testing.assert_close(whiten(noisy, mask), whiten(values, mask))


def test_equal_groups() -> None:
    nan = torch.nan
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [nan, nan, nan], [nan, 2.0, nan], [nan, 2.0, 3.0]])
    assert equal_groups(rewards).tolist() == [True, False, True, True, False]


def test_overlong_penalty() -> None:
    lengths = [1, 80, 85, 90, 100, 101, 500]
    ours = overlong_penalty(torch.tensor(lengths), 100, 20).tolist()
    assert ours == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]


@pytest.mark.slow
def test_overlong_penalty_is_that_of_trl() -> None:
    trl = pytest.importorskip("trl.rewards", reason="TRL 1.13 is not installed")
    lengths = range(1, 130)
    theirs = trl.get_soft_overlong_punishment(100, 20)([[0] * length for length in lengths])
    assert overlong_penalty(torch.tensor(lengths), 100, 20).tolist() == pytest.approx(theirs)
