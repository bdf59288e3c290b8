"""How often the guard vetoes a healthy step: 20,000 of them in five families, with fixed seeds."""

import numpy as np
import pytest
import torch

from bessemer.guard.judge import ACCEPT, Judge
from bessemer.spec.guard import GuardSpec

STEPS = 4000
T = np.arange(STEPS)


def falling():
    """A training curve: an exponential fall from 9.5 to 2.5 and a slow tail."""
    return 2.5 + 5.5 * np.exp(-T / 400) + 1.5 * (1 + T / 50) ** -0.5


def small_batch(rng):
    """Noise of 8 % in the loss and of a third in the gradient norm, as batches of a few sequences have."""
    return falling() * (1 + 0.08 * rng.standard_normal(STEPS)), 0.8 * np.exp(0.35 * rng.standard_normal(STEPS))


def heavy_tails(rng):
    """Student's t with 4 degrees of freedom, twice the scale's floor: a median alone would be exceeded by chance."""
    return falling() + 0.15 * rng.standard_t(4, STEPS), 0.8 * np.exp(0.25 * rng.standard_t(4, STEPS))


def learning_rate_steps(rng):
    """The learning rate is cut, raised and cut: the loss moves by a few tenths, the gradient norm by up to four."""
    level = np.select([T < 1000, T < 2000, T < 3000], [0.0, -0.25, -0.1], -0.4)
    norm = np.select([T < 1000, T < 2000, T < 3000], [1.0, 0.5, 1.5], 0.4)
    return falling() + level + 0.03 * rng.standard_normal(STEPS), 0.6 * norm * np.exp(0.2 * rng.standard_normal(STEPS))


def warm_up(rng):
    """From a fresh model: 10.8 falls by six within a few hundred steps while the gradient norm shrinks tenfold."""
    fall = 6.5 * (1 - np.exp(-T * np.minimum(1, T / 300) / 150)) + 0.3 * np.log1p(T / 500)
    norm = (0.5 + 6 * np.exp(-T / 40)) * np.exp(0.25 * rng.standard_normal(STEPS))
    return 10.8 - fall + 0.05 * rng.standard_normal(STEPS), norm


def plateau(rng):
    """Nothing for 1,500 steps, then a sudden fall with gradients four times as large for a while."""
    loss = np.where(T < 1500, 7.2, 7.2 - 3.5 * (1 - np.exp(-(T - 1500) / 60)))
    norm = 0.4 * (1 + 3 * np.exp(-(((T - 1540) / 40) ** 2))) * np.exp(0.15 * rng.standard_normal(STEPS))
    return loss + 0.02 * rng.standard_normal(STEPS), norm


FAMILIES = [small_batch, heavy_tails, learning_rate_steps, warm_up, plateau]


FAST = (heavy_tails, warm_up)  # of their first 1,000 steps


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        *(pytest.param(family, 1000, id=f"{family.__name__}-1000") for family in FAST),
        *(pytest.param(family, STEPS, marks=pytest.mark.slow, id=family.__name__) for family in FAMILIES),
    ],
)
def test_healthy_steps_are_not_vetoed(family, steps):
    loss, norm = family(np.random.default_rng(0))
    judge = Judge(GuardSpec(), torch.device("cpu"))
    values = torch.tensor(np.stack((loss, norm), axis=1)[:steps], dtype=torch.float32)
    verdicts = [judge.judge(*pair).scalars for pair in values.unbind()]
    assert [i for i, verdict in enumerate(verdicts) if verdict["code"] != ACCEPT] == []
    assert not any(v["reopened"] for v in verdicts), (
        "the window was reopened: a healthy stretch was taken for a lasting change"
    )
    assert not any(v["gave_way"] for v in verdicts), "the guard gave way: healthy steps were taken for bad data"
