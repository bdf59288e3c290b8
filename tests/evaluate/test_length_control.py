"""The length-controlled win rate against a fit in scipy, and where the truth is known."""

import numpy as np
import pytest

from bessemer.evaluate.length_control import RIDGE, length_controlled, spearman

optimize = pytest.importorskip("scipy.optimize")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def planted(theta: float, phi: float, count: int = 4000, gamma: float = 0.0) -> tuple[np.ndarray, ...]:
    """Wins drawn from the model, with A's answers longer by half a standard deviation."""
    draw = np.random.default_rng(0)
    lengths, difficulty = draw.normal(200, 400, count), draw.normal(0, 1, count)
    p = sigmoid(theta + phi * np.tanh(lengths / lengths.std()) + gamma * difficulty)
    wins = (draw.random(count) < p).astype(float)
    wins[draw.random(count) < 0.1] = 0.5  # ties of judges that contradict themselves
    return wins, lengths, difficulty


@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_the_fit_is_that_of_scipy(gamma: float) -> None:
    wins, lengths, difficulty = planted(0.3, 1.2, 500, gamma)
    columns = [np.ones(500), np.tanh(lengths / lengths.std()), *([difficulty] if gamma else [])]
    x, ridge = np.stack(columns, 1), RIDGE * np.array([0.01, 1.0, 1.0])[: len(columns)]

    def negative(w: np.ndarray) -> float:
        z = x @ w
        return float((np.logaddexp(0, z) - wins * z).sum() + 0.5 * (ridge * w * w).sum())

    theirs = optimize.minimize(negative, np.zeros(len(columns)), method="BFGS", options={"gtol": 1e-9}).x
    ours = length_controlled(wins, lengths, difficulty if gamma else None)
    assert (ours.theta, ours.phi) == pytest.approx(tuple(theirs[:2]), abs=1e-5)
    without = theirs[0] + (theirs[2] * difficulty if gamma else np.zeros(500))
    assert ours.rate == pytest.approx(float(sigmoid(without).mean()), abs=1e-6)


def test_a_bias_for_length_is_taken_out() -> None:
    """Equal models, one of which writes more, before a judge that likes length."""
    wins, lengths, _ = planted(0.0, 2.0)
    assert wins.mean() > 0.6
    controlled = length_controlled(wins, lengths)
    assert controlled.rate == pytest.approx(0.5, abs=0.03) and controlled.phi > 1.5
    wins, lengths, _ = planted(0.8, 0.0)
    assert length_controlled(wins, lengths).rate == pytest.approx(wins.mean(), abs=0.01)


def test_one_side_that_always_wins_and_equal_lengths() -> None:
    assert length_controlled([1.0] * 20, list(range(20))).rate > 0.99
    assert length_controlled([0.0, 1.0, 1.0, 1.0], [0.0] * 4).rate == pytest.approx(0.75, abs=1e-3)
    separated = length_controlled([0.0, 0.0, 1.0, 1.0], [-3.0, -1.0, 1.0, 3.0])
    assert separated.rate == pytest.approx(0.5, abs=1e-6) and np.isfinite(separated.phi)


def test_rank_correlation_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(1)
    a, b = draw.integers(1, 10, 50), draw.integers(1, 10, 50)
    assert spearman(a, a + b) == pytest.approx(stats.spearmanr(a, a + b).statistic)
    assert spearman([1, 1], [1, 2]) is None and spearman([1], [2]) is None
