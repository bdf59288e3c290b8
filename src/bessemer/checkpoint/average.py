"""Averages of checkpoints: uniform, exponential, and the greedy soup of Wortsman et al. (2022, arXiv:2203.05482).

Sums are in fp64 on the CPU, tensor by tensor; only the result is held whole, however many checkpoints go in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bessemer.errors import UserError

Weights = Mapping[str, Tensor]


def average(sources: Sequence[Weights], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """The weighted mean of each tensor, in its own type. `weights` are relative; None counts all alike."""
    share = [1.0] * len(sources) if weights is None else list(weights)
    if not sources or len(share) != len(sources) or min(share) < 0 or sum(share) <= 0:
        raise UserError(f"{len(sources)} checkpoints and weights {share}: give one weight >= 0 for each checkpoint")
    for source in sources[1:]:
        if other := sorted(set(source) ^ set(sources[0])):
            raise UserError(f"checkpoints of different models cannot be averaged: {other[0]} is not in all of them")
    total = sum(share)
    return {name: _mean(name, sources, [weight / total for weight in share]) for name in sources[0]}


def _mean(name: str, sources: Sequence[Weights], share: list[float]) -> Tensor:
    tensor = sources[0][name]
    kind, mean = tensor.dtype, tensor.double() * share[0]
    for source, weight in zip(sources[1:], share[1:], strict=True):
        tensor = source[name]
        if tensor.shape != mean.shape:
            raise UserError(f"{name} is {tuple(mean.shape)} and {tuple(tensor.shape)}: not one model")
        mean.add_(tensor.double(), alpha=weight)
    return mean.to(kind)


def exponential_weights(count: int, decay: float) -> list[float]:
    """Shares, oldest first, as `mean = decay * mean + (1 - decay) * next` gives them, begun at the oldest."""
    if not 0 <= decay < 1:
        raise UserError(f"decay {decay}: write a number from 0 to below 1, such as 0.5")
    return [decay ** (count - 1 - i) * (1 - decay if i else 1.0) for i in range(count)]


@dataclass(frozen=True)
class Soup:
    """What the greedy soup chose, in the order it was added, and the loss of each checkpoint alone."""

    names: list[str]
    loss: float
    alone: dict[str, float]
    weights: dict[str, Tensor]


def greedy_soup(sources: Mapping[str, Weights], evaluate: Callable[[Weights], float]) -> Soup:
    """Begin with the best checkpoint; add the others, best first, each only if the average's loss goes down.

    Evaluates every checkpoint alone and every trial: 2n - 1 evaluations. A loss of NaN never improves anything.
    """
    alone = {name: evaluate(source) for name, source in sources.items()}
    order = sorted(alone, key=lambda name: (alone[name] != alone[name], alone[name]))
    chosen, loss = [order[0]], alone[order[0]]
    for name in order[1:]:
        trial = evaluate(average([sources[part] for part in [*chosen, name]]))
        if trial < loss:
            chosen, loss = [*chosen, name], trial
    return Soup(chosen, loss, alone, average([sources[name] for name in chosen]))
