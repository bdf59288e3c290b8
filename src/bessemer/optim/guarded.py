"""An optimizer whose update a verdict can withhold. The verdict is a float32 tensor, exactly 0 or 1.

Three paths lead there. Fused kernels take the verdict as `found_inf` and the clip divisor as `grad_scale`: no host
sync. For the rest the verdict is read once on the host before the step; or weights and state are copied, the step is
taken, and the copies are chosen back: no host sync, at the price of the memory. On each a rejected step leaves weights,
moments and counts bit-untouched even under NaN; `choose.py` proves that on one parameter at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Named = Iterable[tuple[str, nn.Parameter]]
FUSED, HOST, SELECT = "fused", "host read", "copy and select"


class Guarded:
    """One or two torch optimizers over the trained parameters, stepped together or not at all.

    Their state has to be there already: an optimizer that makes it in its first step would have nothing to withhold
    (fused SGD even leaves uninitialised memory behind when its first step is rejected).
    """

    def __init__(
        self, named: Named, optimizers: Sequence[Optimizer], path: str, fallback_reason: str | None = None
    ) -> None:
        self.named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.optimizers = list(optimizers)
        self.path = path
        self.fused = path == FUSED
        self.fallback_reason = fallback_reason

    def grad_norm(self) -> Tensor:
        """Global norm; NaN or Inf as soon as one gradient is."""
        return torch.nn.utils.get_total_norm(self._gradients())

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Divide gradients by `divisor` and update, unless `reject` is 1. Gradients are spent either way.

        A group's own learning rate is `lr` times its `lr_scale`.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
        if self.path == FUSED:
            for optimizer in self.optimizers:
                optimizer.found_inf = reject  # type: ignore[attr-defined]
                optimizer.grad_scale = divisor  # type: ignore[attr-defined]
                optimizer.step()
        elif self.path == SELECT:
            self._step_and_select(reject, divisor)
        elif not bool(reject):
            self._update(divisor)
        self.discard()

    def discard(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and counts by parameter name, live: a load writes into them, before the first step too."""
        return {
            f"{name}.{key}": tensor
            for name, parameter in self.named
            for optimizer in self.optimizers
            if parameter in optimizer.state
            for key, tensor in optimizer.state[parameter].items()
        }

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _update(self, divisor: Tensor) -> None:
        if gradients := self._gradients():
            torch._foreach_div_(gradients, divisor)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _step_and_select(self, reject: Tensor, divisor: Tensor) -> None:
        # The copies live only during the step, when the activations are gone: the peak grows by less than their size.
        live = [*(p.detach() for p in self.parameters), *self.state().values()]
        kept = [tensor.clone() for tensor in live]
        self._update(divisor)
        # A count that torch keeps on the CPU beside weights on a GPU (Adagrad, Adafactor) costs a sync here after all.
        verdict = {device: reject.to(device).bool() for device in {tensor.device for tensor in live}}
        for now, before in zip(live, kept, strict=True):
            torch.where(verdict[now.device], before, now, out=now)  # a product with 0 would let NaN through


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are divided by so that their norm is at most `limit`."""
    return torch.clamp(norm.float() / limit, min=1.0)


@torch.no_grad()
def weights_and_moments_finite(optimizer: Guarded) -> Tensor:
    """One bool on the device of the weights: whether all of them and of their moments are finite.

    It reads every byte once (the largest magnitude of each tensor, which NaN and Inf survive) and does not wait.
    """
    device = optimizer.parameters[0].device
    # Counts that torch keeps on the CPU cannot become infinite.
    live = [*(p.detach() for p in optimizer.parameters), *optimizer.state().values()]
    largest = torch._foreach_norm([t for t in live if t.device == device and t.numel()], float("inf"))
    return torch.stack(largest).isfinite().all()
