"""Settings of published runs by model size, for lints and recipes.

GPT-3: Brown et al. 2020, table 2.1. TinyLlama: Zhang et al. 2024. Llama 2: Touvron et al. 2023. Llama 3: Grattafiori et
al. 2024, table 3. Values between two sizes are interpolated on a logarithmic scale; beyond the ends they are constant.
"""

from __future__ import annotations

import math
from itertools import pairwise

SOURCE = "GPT-3 2020, TinyLlama 2024, Llama 2 2023, Llama 3 2024: settings of published runs"
# (parameters, peak learning rate of AdamW)
RATES = (
    (125e6, 6e-4),  # GPT-3 Small
    (1.1e9, 4e-4),  # TinyLlama
    (6.7e9, 3e-4),  # Llama 2 7B, Llama 3 8B
    (13e9, 3e-4),  # Llama 2 13B
    (34e9, 1.5e-4),  # Llama 2 34B
    (70e9, 1.5e-4),  # Llama 2 and 3 70B
    (405e9, 8e-5),  # Llama 3 405B
)
# (parameters, tokens in a batch)
BATCHES = (
    (125e6, 0.5e6),  # GPT-3 Small, Medium and Large
    (1.3e9, 1e6),  # GPT-3 XL
    (6.7e9, 2e6),  # GPT-3 6.7B
    (13e9, 2e6),  # GPT-3 13B
    (70e9, 4e6),  # Llama 2 70B
    (405e9, 16e6),  # Llama 3 405B, most of its training
)
REPEAT_DECAY = 15.39  # Muennighoff et al. 2023: the value of repeated epochs decays with this constant
SMALLEST, LARGEST = RATES[0][0], RATES[-1][0]


def published_rate(parameters: float) -> float:
    """Peak learning rate of published runs of this size."""
    return _interpolate(RATES, parameters)


def published_batch(parameters: float) -> float:
    """Tokens per batch of published runs of this size."""
    return _interpolate(BATCHES, parameters)


def rope_base_needed(context: int) -> float:
    """Smallest rotary base that distinguishes positions over `context` tokens: the fit of Xu et al. 2024 (Base of RoPE
    bounds context length, figure 1)."""
    return 0.0424 * float(context) ** 1.628


def rope_reach(base: float) -> int:
    """Context that a rotary base supports: the inverse of `rope_base_needed`."""
    return int((base / 0.0424) ** (1 / 1.628))


def best_vocabulary_parameters(parameters: float) -> float:
    """Best number of embedding parameters for a model size, growing with its power of 0.83 (Tao et al. 2024, scaling
    laws with vocabulary). Anchored at their 216,000 tokens of width 8192 for 70B; gives 42,000 at 2.87B, where they
    measured that 43,000 is better than 32,000."""
    return 216_000 * 8192 * (parameters / 70e9) ** 0.83


def worth_of_epochs(epochs: float) -> float:
    """Epochs of new text that this many epochs of repeated text are worth (Muennighoff et al. 2023, equation 5)."""
    repeats = max(0.0, epochs - 1)
    return min(epochs, 1.0) + REPEAT_DECAY * (1 - math.exp(-repeats / REPEAT_DECAY))


def _interpolate(points: tuple[tuple[float, float], ...], at: float) -> float:
    if at <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            share = math.log(at / left) / math.log(right / left)
            return low * (high / low) ** share
    return points[-1][1]
