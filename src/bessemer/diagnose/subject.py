"""What is examined: a model, and the losses of its steps, one micro-batch at a time as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """One micro-batch. The parts of a step sum to its loss."""

    loss: Tensor
    share: float  # of the step's target tokens
    tokens: float


@dataclass(frozen=True)
class Subject:
    """`parts(step, precision)` makes the forward passes of a step; precision None is the run's own."""

    model: nn.Module
    parts: Callable[[int, str | None], Iterator[Part]]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]


def backward(subject: Subject, step: int, precision: str | None = None) -> Tensor:
    """Fresh gradients of a whole step; its loss, still on the device."""
    subject.model.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for part in subject.parts(step, precision):
        part.loss.backward()  # type: ignore[no-untyped-call]
        total = total.to(part.loss.device) + part.loss.detach().float()
    return total


@torch.no_grad()
def loss_of(subject: Subject, steps: list[int]) -> float:
    """Mean loss over some steps, without gradients."""
    return sum(float(part.loss) for step in steps for part in subject.parts(step, None)) / len(steps)
