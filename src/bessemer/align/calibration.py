"""Calibration of a reward model: is the chosen answer the better one as often as sigma(r_chosen - r_rejected) says?

All sums add over batches and ranks. A temperature T is fitted by the likelihood of sigma(difference / T) on a grid (Guo
et al. 2017): above 1 the rewards are overconfident, below 1 underconfident.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 10  # of confidence, from 0.5 to 1
TEMPERATURES = np.geomspace(0.1, 10.0, 61)  # 8 % apart; the middle one is 1
_PLAIN = len(TEMPERATURES) // 2


def calibration_table(differences_N: Tensor) -> Tensor:
    """(temperatures, 1 + 3 bins) sums: the negative log-likelihood, and by confidence the pairs, their confidence and
    how many are right."""
    differences_N = differences_N.double().cpu()
    scaled_GN = differences_N / torch.from_numpy(TEMPERATURES)[:, None]
    confidence_GN = torch.sigmoid(scaled_GN.abs())
    bin_GN = ((confidence_GN - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    right_GN = (differences_N > 0).double().expand_as(scaled_GN)
    sums = [torch.zeros(len(TEMPERATURES), BINS, dtype=torch.float64) for _ in range(3)]
    for total, value_GN in zip(sums, (torch.ones_like(scaled_GN), confidence_GN, right_GN), strict=True):
        total.scatter_add_(1, bin_GN, value_GN)
    return torch.cat((F.softplus(-scaled_GN).sum(1, keepdim=True), *sums), 1)


def summarise_calibration(table: Tensor) -> dict[str, Any]:
    """`ece`, the expected calibration error; `temperature` and `ece_scaled` with it, unless all pairs are right or all
    wrong, which no temperature fits; and the `reliability` table, a row [confidence, accuracy, pairs] for each bin with
    pairs."""
    rows = table.double().numpy()
    best = int(np.argmin(rows[:, 0]))
    summary: dict[str, Any] = {"ece": expected_error(rows[_PLAIN]), "reliability": reliability(rows[_PLAIN])}
    if 0 < best < len(TEMPERATURES) - 1:
        summary |= {"temperature": round(float(TEMPERATURES[best]), 3), "ece_scaled": expected_error(rows[best])}
    return summary


def expected_error(sums: np.ndarray) -> float:
    """The mean distance of confidence and accuracy over the bins, weighted by their pairs."""
    count, confidence, right = sums[1:].reshape(3, BINS)
    return float(np.abs(confidence - right).sum() / max(1.0, count.sum()))


def reliability(sums: np.ndarray) -> list[list[float]]:
    count, confidence, right = sums[1:].reshape(3, BINS)
    return [
        [round(float(confidence[i] / count[i]), 4), round(float(right[i] / count[i]), 4), int(count[i])]
        for i in np.flatnonzero(count)
    ]
