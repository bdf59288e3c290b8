"""Short runs whose losses and norms are written by hand."""

import math

import pytest

from bessemer.diagnose.short_runs import (
    ShortRun,
    choose_warmup,
    short_run,
    spread_rates,
    transfer_report,
    warmup_report,
)


def run_of(loss: float, spike: float = 1.0, steps: int = 40) -> ShortRun:
    norms = [2.0] * steps
    norms[20] *= spike
    return ShortRun([loss] * steps, norms)


def test_the_rate_rises_to_the_peak_and_a_run_ends_at_nan() -> None:
    rates = []

    def attempt(i: int, rate: float) -> tuple[float, float]:
        rates.append(rate)
        return (math.nan if i == 6 else 3.0), 1.0

    found = short_run(attempt, 0.1, 20, 4)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1]) and math.isnan(found.loss)
    assert run_of(3.0, 6.0).largest_norm == 6.0 and math.isinf(ShortRun([1.0], [math.inf]).largest_norm)


def test_the_shortest_calm_warm_up_with_a_low_loss_is_chosen() -> None:
    runs = {1: run_of(3.0, 9.0), 10: run_of(3.4), 30: run_of(3.01), 100: run_of(3.0)}
    assert choose_warmup(runs) == 30
    assert "Suggested warm-up: 30 steps" in warmup_report(runs, 1e-3, 200).text()
    wild = {1: run_of(3.0, 9.0), 10: run_of(math.nan)}
    assert choose_warmup(wild) is None and "No warm-up" in warmup_report(wild, 1e-3, 200).text()


def test_a_best_rate_that_moves_with_the_width_is_named() -> None:
    rates = spread_rates(1e-3, 8e-3, 4)
    assert rates == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3])

    def losses(best: int) -> dict[float, ShortRun]:
        return {rate: run_of(3.0 + abs(i - best)) for i, rate in enumerate(rates)}

    moved = transfer_report({64: losses(2), 512: losses(0)}, "gpt")
    assert moved.data["best"] == {"width 64": rates[2], "width 512": rates[0]}
    assert any("moves: 2 steps" in line and "init: mup" in line for line in moved.conclusions)
    assert any("at an end of --rates" in line for line in moved.conclusions)
    kept = transfer_report({64: losses(2), 512: losses(2)}, "mup")
    assert any("With init mup the best rate stays: 0 steps" in line for line in kept.conclusions)
    gone = transfer_report({64: losses(2), 512: {rate: run_of(math.nan) for rate in rates}}, "gpt")
    assert any("A width diverged at every rate" in line for line in gone.conclusions)
