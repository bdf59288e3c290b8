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

    judged_first = True  # a verdict comes before the update

    def __init__(
        self, named: Named, optimizers: Sequence[Optimizer], path: str, fallback_reason: str | None = None
    ) -> None:
        self.named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.optimizers = list(optimizers)
        self.path = path
        self.fused = path == FUSED
        self.fallback_reason = fallback_reason
        self.accumulates = False

    def grad_norm(self) -> Tensor:
        """Global norm; NaN or Inf as soon as one gradient is."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self._gradients():
            parts.setdefault(gradient.dtype, []).append(gradient)
        # The norm of a bf16 tensor would be a bf16 number, of three digits.
        wide = {dtype: torch.promote_types(dtype, torch.float32) for dtype in parts}
        norms = [torch.stack(torch._foreach_norm(part, 2, dtype=wide[dtype])) for dtype, part in parts.items()]
        return torch.linalg.vector_norm(torch.cat(norms)) if norms else torch.zeros(())

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Divide gradients by `divisor` and update, unless `reject` is 1. Gradients are spent either way.

        A group's own learning rate is `lr` times its `lr_scale`.
        """
        self.set_lr(lr)
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

    def arm(self, lr: float) -> None:
        """Before the backward passes of a step, for those that update in them."""

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]

    def accumulate(self, several: bool) -> None:
        """Before the passes of a step. Gradients of several micro-batches add up in fp32, whatever their weights are
        in."""
        if several == self.accumulates:
            return
        self.accumulates = several
        for parameter in self.parameters:
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.grad_dtype = torch.float32 if several else parameter.dtype

    def remainders(self) -> dict[nn.Parameter, Tensor]:
        """What bf16 weights lack of fp32, where it is kept beside them."""
        found = ((p, optimizer.state[p].get("remainder")) for optimizer in self.optimizers for p in self.parameters)
        return {p: rest for p, rest in found if rest is not None and rest.device == p.device}

    def discard(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and counts by parameter name, live: a load writes into them, before the first step too."""
        for optimizer in self.optimizers:
            if shuttle := getattr(optimizer, "shuttle", None):
                shuttle.settle()  # what lies on the host may still be on its way there
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
