"""Best-of-N: the answer of N samples that a reward prefers, rows to train on, and what more samples would give.

The curve estimates, for each n up to N, the expected reward of the best of n samples from all N without bias (an order
statistic, as pass@k is), and of any other number of the chosen sample, such as a held-out reward. The distribution that
best-of-n samples from is at most log n - (n - 1) / n nats from the model's (Beirami et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bessemer.data.tokenizer.chat import Message
from bessemer.observe.figure import LineChart

Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class ScoredAnswer:
    """A sampled answer. `held_out` is what another reward gives it."""

    text: str
    reward: float
    std: float = 0.0
    finished: bool = True
    held_out: float | None = None


@dataclass(frozen=True)
class CurvePoint:
    """Means over prompts with their standard errors. `kl` is the bound in nats."""

    n: int
    kl: float
    reward: float
    reward_error: float
    held_out: float | None = None
    held_out_error: float | None = None


def best_of_weights(samples: int, n: int) -> list[float]:
    """The probability that each of the samples, from the worst to the best, is the best of n drawn without
    replacement."""
    return [math.comb(rank, n - 1) / math.comb(samples, n) for rank in range(samples)]


def kl_bound(n: int) -> float:
    return math.log(n) - (n - 1) / n


def best_of_curve(prompts: Sequence[Sequence[ScoredAnswer]]) -> list[CurvePoint]:
    """Points at n = 1, 2, 4, ... and the number of samples, which is the same for every prompt."""
    samples = len(prompts[0])
    ranked = [sorted(candidates, key=lambda candidate: candidate.reward) for candidates in prompts]
    judged = all(candidate.held_out is not None for candidates in ranked for candidate in candidates)
    points = []
    for n in sorted({*(2**k for k in range(samples.bit_length())), samples}):
        weights = best_of_weights(samples, n)
        reward = _mean([_weighted(weights, [c.reward for c in candidates]) for candidates in ranked])
        held_out: tuple[float, float] | tuple[None, None] = (None, None)
        if judged:
            held_out = _mean([_weighted(weights, [c.held_out or 0.0 for c in candidates]) for candidates in ranked])
        points.append(CurvePoint(n, kl_bound(n), *reward, *held_out))
    return points


def _weighted(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, which is NaN of one value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def curve_chart(curve: Sequence[CurvePoint]) -> LineChart:
    series = {"reward": [point.reward for point in curve]}
    if curve[0].held_out is not None:
        series["held-out reward"] = [point.held_out or 0.0 for point in curve]
    return LineChart("Best of n", [float(point.n) for point in curve], series, "n", log_x=True)


def curve_lines(curve: Sequence[CurvePoint]) -> list[list[str]]:
    """The rows of a table, with their head."""
    judged = curve[0].held_out is not None
    rows = [["n", "KL at most", "reward", *(["held-out reward"] if judged else [])]]
    for point in curve:
        row = [str(point.n), f"{point.kl:.3f}", f"{point.reward:.4g} ± {point.reward_error:.2g}"]
        rows.append([*row, *([f"{point.held_out:.4g} ± {point.held_out_error:.2g}"] if judged else [])])
    return rows


def curve_json(curve: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(point).items() if value is not None} for point in curve]


def best_rows(prompt: Prompt, candidates: Sequence[ScoredAnswer]) -> Iterator[dict[str, Any]]:
    """A row for `objective: sft` with the best finished answer; none without one."""
    if usable := _usable(candidates):
        best = max(usable, key=lambda candidate: candidate.reward)
        yield {"prompt": prompt, "completion": _answer(prompt, best), "reward": best.reward, "std": best.std}


def pair_rows(prompt: Prompt, candidates: Sequence[ScoredAnswer]) -> Iterator[dict[str, Any]]:
    """A row for `objective: dpo` or `reward` with the best and the worst finished answer; none if all are worth the
    same."""
    usable = sorted(_usable(candidates), key=lambda candidate: candidate.reward)
    if usable and usable[-1].reward > usable[0].reward and usable[-1].text != usable[0].text:
        worst, best = usable[0], usable[-1]
        yield {
            "prompt": prompt, "chosen": _answer(prompt, best), "rejected": _answer(prompt, worst),
            "chosen_reward": best.reward, "rejected_reward": worst.reward,
        }  # fmt: skip


def _usable(candidates: Sequence[ScoredAnswer]) -> list[ScoredAnswer]:
    """An answer without an end or a word would teach the same."""
    return [candidate for candidate in candidates if candidate.finished and candidate.text.strip()]


def _answer(prompt: Prompt, candidate: ScoredAnswer) -> str | list[Message]:
    """The answer in the form of the prompt: a text, or messages."""
    return candidate.text if isinstance(prompt, str) else [{"role": "assistant", "content": candidate.text}]
