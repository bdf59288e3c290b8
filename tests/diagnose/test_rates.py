"""The range test on problems whose best and largest learning rates are known."""

import math
from collections.abc import Callable

import pytest
import torch

from bessemer.diagnose.landscape import divergence_limit, lr_range_report, run_lr_range_test, smooth


def quadratic(top: float, seed: int = 0) -> tuple[Callable[[int, float], float], Callable[[], None]]:
    """Gradient descent on 1/2 sum(h x^2) with the largest curvature `top`: it diverges from a rate of 2 / top."""
    torch.manual_seed(seed)
    h = torch.linspace(0.2, 1.0, 20, dtype=torch.float64) * top
    x = torch.ones(20, dtype=torch.float64)

    def attempt(_: int, rate: float) -> float:
        loss = float(0.5 * (h * x * x).sum())
        x.sub_(rate * h * x)
        return loss

    return attempt, lambda: x.fill_(1.0)


@pytest.mark.parametrize("top", [0.5, 8.0, 300.0])
def test_the_suggestion_trains_a_quadratic_and_ten_times_as_much_does_not(top: float) -> None:
    attempt, again = quadratic(top)
    found = run_lr_range_test(attempt, 1e-4 / top, 1000 / top, steps=40)
    assert found.suggested is not None and found.diverged is not None
    assert 2 / top <= found.diverged <= 20 / top  # what was gained has to be lost again before it is seen
    assert 0.1 / top <= found.suggested < 2 / top
    for rate, trains in ((found.suggested, True), (10 * found.suggested, False)):
        again()
        losses = [attempt(0, rate) for _ in range(300)]
        assert (losses[-1] < 0.01 * losses[0]) is trains
        assert math.isfinite(losses[-1]) or not trains


def test_it_stops_soon_after_the_loss_rises_or_is_not_finite() -> None:
    attempt, _ = quadratic(1.0)
    assert len(run_lr_range_test(attempt, 1e-4, 1e6, steps=400).rates) < 250
    cliff = run_lr_range_test(lambda i, rate: math.nan if rate > 0.1 else 5.0 - 0.01 * i, 1e-4, 10.0, steps=100)
    assert cliff.diverged == cliff.rates[-1] == pytest.approx(0.1, rel=0.15)
    assert cliff.suggested is not None and cliff.suggested <= cliff.diverged / 10


def test_a_loss_that_never_rises_is_said_and_one_that_never_moves_gives_no_rate() -> None:
    falling = run_lr_range_test(lambda i, _: 5.0 - math.tanh((i - 60) / 10), steps=100)
    assert falling.diverged is None and falling.steepest == falling.suggested
    assert falling.steepest == pytest.approx(falling.rates[60], rel=0.5)
    assert "raise --last" in lr_range_report(falling, 0.1).text()
    flat = run_lr_range_test(lambda *_: 3.0, steps=50)
    assert flat.suggested is None and "No suggestion" in lr_range_report(flat, 0.1).text()
    assert run_lr_range_test(lambda *_: math.nan, steps=50).suggested is None


def test_smoothing_does_not_shift_the_curve() -> None:
    straight = [float(i) for i in range(30)]
    assert smooth(straight, 4) == pytest.approx(straight)
    assert smooth([0.0, 3.0, 0.0], 1) == [0.0, 1.0, 0.0]
    assert divergence_limit([10.0, 2.0]) == 4.0 and divergence_limit([2.0, 2.0]) == pytest.approx(2.2)
