"""What goes around any optimizer: SAM, which takes the gradient at perturbed weights, and Lookahead, which pulls the
weights back towards slow ones. Neither reads a number on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bessemer.dtensor import local

SMALLEST_NORM = 1e-12  # SAM's code
LEAST_SIZE = 0.01  # eta in ASAM's code: small weights are moved too


class SharpnessAware:
    """SAM (Foret et al. 2020): the update's gradient is that at w + rho g / |g|, the worst point nearby to first order.

    Costs a second pass and a copy of the weights. The gradient is reduced over all ranks before the weights are
    perturbed, so that the number of processes does not change the update; the weights are restored by copy, not by
    subtraction, so that a rejected step leaves every bit.

    ASAM (Kwon et al. 2021), with `adaptive_norm`, moves each weight in proportion to its size T: w + rho T^2 g / |T g|,
    where T is |w| + 0.01, and 1 for biases. `adaptive_norm` computes the norm of the gradients over all ranks.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], rho: float,
        adaptive_norm: Callable[[], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.parameters, self.rho, self.adaptive_norm = [parameter for _, parameter in named], rho, adaptive_norm
        self.scaled = {p for name, p in named if adaptive_norm and not name.endswith("bias")}

    @contextmanager
    def perturbed(self, norm: Tensor) -> Iterator[None]:
        """The weights moved along the gradients, whose global norm is given. Gradients are cleared on entry; those
        computed inside stay."""
        moved = [p for p in self.parameters if p.grad is not None]
        weights = [local(p.detach()) for p in moved]
        copies = [weight.clone() for weight in weights]
        with torch.no_grad():
            sizes = [
                copy.abs() + LEAST_SIZE if p in self.scaled else None for p, copy in zip(moved, copies, strict=True)
            ]
            if self.adaptive_norm:
                _multiply(moved, sizes)
                norm = self.adaptive_norm()
                _multiply(moved, sizes)
            share = self.rho / (norm + SMALLEST_NORM)
            for parameter, weight in zip(moved, weights, strict=True):
                assert parameter.grad is not None
                weight.add_((local(parameter.grad) * share).to(weight.dtype))
                parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, copies)


def _multiply(parameters: Sequence[nn.Parameter], factors: Sequence[Tensor | None]) -> None:
    """Multiply gradients in place, where there is a factor."""
    for parameter, factor in zip(parameters, factors, strict=True):
        if factor is not None and parameter.grad is not None:
            local(parameter.grad).mul_(factor)


class Lookahead:
    """Lookahead (Zhang et al. 2019): after every `every` accepted updates the slow weights move by `share` towards the
    fast ones, which go on from there. With `radam` it is Ranger. Costs a copy of the weights."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], every: int, share: float) -> None:
        self.names = [name for name, _ in named]
        self.fast = [local(parameter.detach()) for _, parameter in named]
        self.slow = [fast.clone() for fast in self.fast]
        self.every, self.share = every, share
        self.count = torch.zeros((), dtype=torch.int64, device=self.fast[0].device)

    @torch.no_grad()
    def before_step(self) -> None:
        """The slow weights begin as those of the first step, which may have been loaded since."""
        for slow, fast in zip(self.slow, self.fast, strict=True):
            slow.copy_(torch.where(self.count == 0, fast, slow))

    @torch.no_grad()
    def after_step(self, reject: Tensor) -> None:
        accepted = ~reject.to(self.count.device).bool()
        self.count += accepted
        due = accepted & (self.count % self.every == 0)
        for slow, fast in zip(self.slow, self.fast, strict=True):
            slow.copy_(torch.where(due, torch.lerp(slow, fast, self.share), slow))
            fast.copy_(torch.where(due, slow, fast))

    def state(self) -> dict[str, Tensor]:
        return {f"{name}.slow": slow for name, slow in zip(self.names, self.slow, strict=True)}
