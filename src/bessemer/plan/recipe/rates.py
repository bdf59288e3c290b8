"""Learning rate, batch and warm-up: several published laws side by side, or the measured noise of the gradients.

Three sources answer for every size: the compute law of DeepSeek, the Step Law in parameters and tokens, and what
published runs of this size had. The middle one is taken; where they agree within a factor of two, that is established.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.errors import UserError
from bessemer.plan.recipe.fine_tuning import Basis, RecipeAnswer
from bessemer.spec.published import LARGEST, SMALLEST, SOURCE, published_batch, published_rate
from bessemer.spec.quantity import human_count

DEEPSEEK = "DeepSeek LLM 2024"
STEP_LAW = "Li et al. 2025, Step Law"
PUBLISHED = "published runs"
LAWS = f"{DEEPSEEK}; {STEP_LAW}; {SOURCE}"
LIMITS_LR = 1e-6, 3e-3  # at 0.9M parameters 3e-3 reached a loss of 2.58, 6e-3 2.67, 1e-2 with twice the batch 3.65
NOISE = "McCandlish et al. 2018, gradient noise scale"
WARMUP_STEPS, WARMUP_SHARE = 2000, 0.02


@dataclass(frozen=True)
class Law:
    """What one source says."""

    name: str
    value: float


def rate_laws(parameters: float, tokens: float) -> tuple[Law, ...]:
    compute = 6 * parameters * tokens
    return (
        Law(DEEPSEEK, 0.3118 * compute**-0.125),
        Law(STEP_LAW, 1.79 * parameters**-0.713 * tokens**0.307),
        Law(PUBLISHED, published_rate(parameters)),
    )


def batch_laws(parameters: float, tokens: float) -> tuple[Law, ...]:
    """Tokens in a batch."""
    compute = 6 * parameters * tokens
    return (
        Law(DEEPSEEK, 0.2920 * compute**0.3271),
        Law(STEP_LAW, 0.58 * tokens**0.571),
        Law(PUBLISHED, published_batch(parameters)),
    )


def learning_rate(parameters: float, tokens: float) -> RecipeAnswer[float]:
    """Peak learning rate of AdamW for a model from random weights."""
    _check(parameters, tokens)
    laws = rate_laws(parameters, tokens)
    middle = _middle(laws)
    lowest, highest = LIMITS_LR
    value = min(highest, max(lowest, middle.value))
    limited = "" if value == middle.value else f", kept between {lowest:g} and {highest:g}"
    reason = f"the middle of {_listed(laws)}{limited}"
    return RecipeAnswer(float(f"{value:.2g}"), reason, LAWS, _basis(laws, parameters))


def batch_tokens(parameters: float, tokens: float) -> RecipeAnswer[int]:
    """Tokens in a batch, never more than a hundredth of the run: fewer than 100 steps teach little."""
    _check(parameters, tokens)
    laws = batch_laws(parameters, tokens)
    middle = _middle(laws)
    value = min(middle.value, tokens / 100)
    limited = ", at most a hundredth of the run" if value < middle.value else ""
    reason = f"the middle of {_listed(laws)}{limited}"
    return RecipeAnswer(max(1, round(value)), reason, LAWS, _basis(laws, parameters))


def batch_from_noise(noise_tokens: float, waste: float = 0.5) -> RecipeAnswer[int]:
    """Tokens in a batch from the measured noise scale. A batch of B reads 1 + B / noise times the fewest tokens and
    takes 1 + noise / B times the fewest steps: `waste` is how much more text than the fewest may be read."""
    if not (noise_tokens > 0 and math.isfinite(noise_tokens)):
        raise UserError(f"noise scale: {noise_tokens:g} is no number of tokens: measure it, then write it")
    if not waste > 0:
        raise UserError(f"waste: {waste:g} must lie above 0; 0.5 reads half as much text again as the fewest")
    batch = waste * noise_tokens
    reason = (
        f"a noise scale of {human_count(noise_tokens)} tokens: {waste:.0%} more text than the fewest, "
        f"{1 + 1 / waste:.2g} times the fewest steps"
    )
    return RecipeAnswer(max(1, round(batch)), reason, NOISE, "empirical at this scale")


def rate_for_batch(rate: float, batch: float, other: float) -> RecipeAnswer[float]:
    """The learning rate of an adaptive optimizer when the batch changes: it follows the square root."""
    value = rate * math.sqrt(other / batch)
    reason = f"{rate:g} at {human_count(batch)} tokens, times the root of {other / batch:.3g}"
    basis: Basis = "established" if 1 / 8 <= other / batch <= 8 else "open question"
    return RecipeAnswer(
        value, reason, "Malladi et al. 2022, square-root scaling of Adam; holds below the noise scale", basis
    )


def warmup_steps(steps: int, beta2: float = 0.95) -> RecipeAnswer[int]:
    """2 % of the run, at most 2,000 steps, and not fewer than the second moment needs to settle."""
    if steps < 1:
        raise UserError(f"steps: {steps} is no run: write at least 1")
    least = math.ceil(2 / (1 - beta2))
    wanted = min(WARMUP_STEPS, max(least, round(WARMUP_SHARE * steps)))
    value = max(1, min(wanted, steps // 10))  # a short run has better things to do
    reason = f"2 % of {steps:,} steps, at most {WARMUP_STEPS:,}, at least 2 / (1 - beta2) = {least}"
    if value < wanted:
        reason += f", here held to a tenth of the run instead of {wanted}"
    source = "Ma and Yarats 2021, untuned warm-up; Llama 2 2023: 2,000 steps"
    return RecipeAnswer(value, reason, source, "established")


def _middle(laws: tuple[Law, ...]) -> Law:
    return sorted(laws, key=lambda law: law.value)[len(laws) // 2]


def _listed(laws: tuple[Law, ...]) -> str:
    def shown(value: float) -> str:
        return human_count(value) if value >= 1 else f"{value:.1e}"

    return ", ".join(f"{law.name} {shown(law.value)}" for law in laws)


def _basis(laws: tuple[Law, ...], parameters: float) -> Basis:
    if not SMALLEST / 10 <= parameters <= LARGEST * 10:
        return "open question"
    values = [law.value for law in laws]
    return "established" if max(values) <= 2 * min(values) else "empirical at this scale"


def _check(parameters: float, tokens: float) -> None:
    for name, value in (("parameters", parameters), ("tokens", tokens)):
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name}: {value:g} is no amount: write a number above 0")
