"""Calibration: the error against bins counted by hand, the temperature of known data, sums that add over batches."""

import math

import numpy as np
import pytest
import torch

from bessemer.align.calibration import calibration_table, summarise_calibration


def test_the_error_and_the_table_are_those_counted_by_hand() -> None:
    differences = torch.tensor([math.log(0.57 / 0.43)] * 3 + [-math.log(0.57 / 0.43)] + [math.log(0.93 / 0.07)] * 2)
    summary = summarise_calibration(calibration_table(differences))
    assert summary["reliability"] == [[0.57, 0.75, 4], [0.93, 1.0, 2]]
    assert summary["ece"] == pytest.approx((4 * 0.18 + 2 * 0.07) / 6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_of_overconfident_rewards_is_recovered(temperature: float) -> None:
    draw = np.random.default_rng(0)
    true = draw.normal(scale=2.0, size=40_000)
    prefers = draw.random(true.size) < 1 / (1 + np.exp(-true))
    differences = torch.from_numpy(np.where(prefers, true, -true) * temperature)
    summary = summarise_calibration(sum(map(calibration_table, differences.split(7_000))))
    assert summary["temperature"] == pytest.approx(temperature, rel=0.05)
    assert summary["ece_scaled"] < 0.01
    assert summary["ece"] == pytest.approx(summary["ece_scaled"]) if temperature == 1 else summary["ece"] > 0.05


def test_pairs_that_are_all_right_have_no_temperature() -> None:
    assert "temperature" not in summarise_calibration(calibration_table(torch.tensor([1.0, 2.0])))
