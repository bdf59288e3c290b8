"""Length-controlled win rates (Dubois et al. 2024): what the win rate would be if both answers were equally long.

    logit P(win of i) = theta + phi * tanh(d_i / sd(d)) + gamma * difficulty_i

d is the answer's length minus the other's. The rate is the mean of the probabilities with the length term left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RIDGE = 1e-3  # keeps the fit finite where length alone decides, or one side wins always
STEPS = 100


@dataclass(frozen=True)
class LengthControl:
    """`rate` is the length-controlled win rate; `theta`, `phi` and `gamma` are the coefficients of the fit."""

    rate: float
    theta: float
    phi: float
    gamma: float = 0.0


def length_controlled(
    wins: Sequence[float], length_differences: Sequence[float], difficulty: Sequence[float] | None = None
) -> LengthControl:
    """`wins` are 1, 0.5 or 0. Maximum likelihood with a small ridge on all coefficients but theta, by Newton's method.
    `difficulty` is a number per question, such as its mean win rate over other models."""
    won = np.asarray(wins, np.float64)
    length = np.asarray(length_differences, np.float64)
    spread = length.std()
    columns = [np.ones_like(won), np.tanh(length / spread) if spread else np.zeros_like(won)]
    if difficulty is not None:
        columns.append(np.asarray(difficulty, np.float64))
    x = np.stack(columns, axis=1)
    ridge = RIDGE * np.diag([0.01, *[1.0] * (len(columns) - 1)])
    weights = np.zeros(len(columns))
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gradient = x.T @ (won - p) - ridge @ weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge
        change = np.linalg.solve(hessian, gradient)
        change *= min(1.0, 4.0 / max(float(np.abs(change).max()), 1e-30))  # no leap where the curvature is small
        weights += change
        if float(np.abs(change).max()) < 1e-10:
            break
    without = x @ weights - x[:, 1] * weights[1]
    rate = float(np.mean(1 / (1 + np.exp(-np.clip(without, -30, 30)))))
    return LengthControl(
        rate, float(weights[0]), float(weights[1]), float(weights[2]) if difficulty is not None else 0.0
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, with mean ranks for ties; None where one side is constant."""
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (a, b)]
    if len(a) < 2 or min(rank.std() for rank in ranks) == 0:
        return None
    value = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    return None if math.isnan(value) else value


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[group]
