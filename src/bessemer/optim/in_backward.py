"""Updates inside the backward pass: each parameter as soon as its gradient is known, which is then freed.

There is never a whole set of gradients, so there is no norm before the update: nothing can be clipped, and a verdict
comes too late. What is left is that a gradient with NaN or Inf in it does not touch its own parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.errors import UserError
from bessemer.optim.guarded import Guarded, Named
from bessemer.optim.lean import Lean


class InBackward(Guarded):
    """Updates in the one backward pass that follows `arm`; gradients that others compute (a replay, a trial) stay, and
    `step` treats them as any other optimizer does."""

    judged_first = False

    def __init__(
        self,
        named: Named,
        optimizers: Sequence[Optimizer],
        path: str,
        fallback_reason: str | None = None,
        parts: Sequence[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(named, optimizers, path, fallback_reason, parts)
        assert isinstance(self.optimizers[0], Lean)
        self.lean, self.armed = self.optimizers[0], False
        self.one = torch.ones((), device=self.lean.device)
        self.norms: dict[nn.Parameter, Tensor] = {}
        self.rates: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def arm(self, lr: float) -> None:
        """The next backward pass updates, at this learning rate."""
        self.set_lr(lr)
        self.norms, self.armed = {}, True
        numbers = [(group, self.lean.numbers(group)) for group in self.lean.param_groups]
        self.rates = {parameter: rates for group, rates in numbers for parameter in group["params"]}
        if self.lean.shuttle:
            self.lean.shuttle.begin()

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self.armed:
            return
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self.norms:
            raise UserError(
                "memory.update: in_backward cannot add up micro-batches: write budget.micro_batch as large as the batch"
            )
        grad, parameter.grad = parameter.grad, None
        norm = self.norms[parameter] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        reject = (~norm.isfinite()).float()
        self.lean.step_one(parameter, grad, reject, self.one, *self.rates[parameter])
        self.lean.state[parameter]["step"] += 1 - reject

    def grad_norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(list(self.norms.values()))) if self.armed else super().grad_norm()

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Ends an armed step, whose update is past vetoing."""
        if self.armed:
            self.armed = False
        else:
            super().step(lr, reject, divisor)

    def discard(self) -> None:
        self.armed = False
        super().discard()
