"""The loss scale of fp16, whose smallest number is 6e-8: gradients are computed of the loss times a factor as large as
they can bear, and divided by it in the optimizer's own pass. All on the device, without a host sync.

The rules are those of torch.amp.GradScaler: an overflow withholds the step and halves the scale, 2,000 good steps in a
row double it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bessemer.errors import UserError

START, GROWTH, BACKOFF, GOOD_STEPS = 65536.0, 2.0, 0.5, 2000
OVERFLOW = "fp16 overflow"  # why a step was withheld, in its record


class LossScale:
    """The present scale. A fixed one never changes, and is the spec's: a checkpoint does not keep it."""

    def __init__(self, asked: str | float, device: torch.device) -> None:
        """`asked` is "dynamic" or a number."""
        self.dynamic = asked == "dynamic"
        start = START if self.dynamic else float(asked)
        if not 0 < start < float("inf"):
            raise UserError(f"loss_scale: {start:g} does not scale: write dynamic, or a number such as 1024")
        self.scale = torch.full((), start, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)  # steps in a row without an overflow

    @torch.no_grad()
    def update(self, norm: Tensor) -> Tensor:
        """After a step, from the norm of its gradients: 1 if they overflowed, else 0. Every rank has the same norm, so
        all of them go on with the same scale."""
        overflow = (~torch.isfinite(norm)).float()
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self.good, overflow, GROWTH, BACKOFF, GOOD_STEPS)
        return overflow

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, live: a load writes into it."""
        return {"scale": self.scale, "good": self.good} if self.dynamic else {}


@contextmanager
def scaled(scaling: LossScale | None, parameters: Iterable[torch.nn.Parameter]) -> Iterator[Tensor | float]:
    """The factor for losses whose backward pass runs inside; gradients are afterwards as without it, and so are those
    that were there before. Costs two passes over them, so the loop divides in the optimizer instead."""
    if scaling is None:
        yield 1.0
        return
    parameters = list(parameters)
    _multiply(parameters, scaling.scale)
    yield scaling.scale
    _multiply(parameters, 1.0 / scaling.scale)


def _multiply(parameters: Iterable[torch.nn.Parameter], factor: Tensor) -> None:
    if gradients := [p.grad for p in parameters if p.grad is not None]:
        torch._foreach_mul_(gradients, factor)
