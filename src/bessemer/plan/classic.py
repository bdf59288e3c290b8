"""The published formulas for a GPT in 16 bits, as their papers have them: what our own estimates are checked against,
and what a reader knows. Bytes; GB and GiB are left to the caller.

h width, L layers, a heads, s tokens of a row, b rows of a micro-batch, t tensor parallel, p stages, v vocabulary.
"""

from __future__ import annotations

from typing import Literal

MIXED_ADAM = 12  # bytes of a parameter beside 16-bit weights and gradients: fp32 weights and two moments
Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]


def zero_states(parameters: float, stage: Zero, devices: int, others: int = MIXED_ADAM) -> float:
    """Weights, gradients and optimizer states on a device (Rajbhandari et al. 2020, table 1)."""
    weights = 2 * parameters / (devices if stage >= 3 else 1)
    gradients = 2 * parameters / (devices if stage >= 2 else 1)
    return weights + gradients + others * parameters / (devices if stage >= 1 else 1)


def zero_traffic(parameters: float, stage: Zero) -> float:
    """Numbers that a device sends in a step, in parameters."""
    return (3 if stage == 3 else 2) * parameters


def gpt_parameters(h: int, L: int, s: int, v: int) -> float:
    """Narayanan et al. 2021, equation 2: biases and norms with it."""
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * L * h))


def layer_activations(
    h: int, a: int, s: int, b: int, t: int = 1, sequence: bool = False, how: Recompute = "none"
) -> float:
    """Of one layer, dropout masks with it (Korthikanti et al. 2022, table 2)."""
    if how == "full":
        return 2 * s * b * h
    scores = 0.0 if how == "selective" else 5 * a * s / h
    return s * b * h * ((34 + scores) / t if sequence else 10 + 24 / t + scores / t)


def stage_activations(
    h: int, L: int, a: int, s: int, b: int, t: int, p: int, m: int = 1, sequence: bool = False, how: Recompute = "none"
) -> float:
    """Of the first stage, which keeps those of p micro-batches: as much as all layers of one; more with m interleaved
    stages in each process."""
    more = 1 + (p - 1) / (p * m) if m > 1 else 1.0
    return L * more * layer_activations(h, a, s, b, t, sequence, how)


def model_flops(h: int, L: int, s: int, v: int, rows: int) -> float:
    """Of a step over so many rows, forward and back, nothing computed twice (Narayanan et al. 2021, equation 3)."""
    return 72 * rows * s * L * h**2 * (1 + s / (6 * h) + v / (12 * L * h))


def hardware_flops(h: int, L: int, s: int, v: int, rows: int, how: Recompute) -> float:
    """With what is computed twice."""
    if how == "full":
        return 96 * rows * s * L * h**2 * (1 + s / (6 * h) + v / (16 * L * h))
    return 72 * rows * s * L * h**2 * (1 + (s / (3 * h) if how == "selective" else s / (6 * h)) + v / (12 * L * h))
