"""torch's optimizers without their torch.compile wrappers. The first call of a wrapped method imports torch._dynamo,
which takes 1.7 s on one core; no optimizer is compiled here. The wrapped functions run as they are: no number changes.

An optimizer whose update a verdict can withhold. The verdict is a float32 tensor, exactly 0 or 1.

Three paths lead there. Fused kernels take the verdict as `found_inf` and the clip divisor as `grad_scale`: no host
sync. For the rest the verdict is read once on the host before the step; or weights and state are copied, the step is
taken, and the copies are chosen back: no host sync, at the price of the memory. On each a rejected step leaves weights,
moments and counts bit-untouched even under NaN; `choose.py` proves that on one parameter at start.

Updates inside the backward pass: each parameter as soon as its gradient is known, which is then freed.

There is never a whole set of gradients, so there is no norm before the update: nothing can be clipped, and a verdict
comes too late. What is left is that a gradient with NaN or Inf in it does not touch its own parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.errors import UserError
from bessemer.optim.low_memory import LowMemoryOptimizer, held, of_whole


class Eager(Optimizer):
    """Comes before an optimizer in a class's bases."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]


def eager(kind: type[Optimizer]) -> type[Optimizer]:
    """The same optimizer, under the same name."""
    return type(kind.__name__, (Eager, kind), {})


Named = Iterable[tuple[str, nn.Parameter]]
FUSED, HOST, SELECT = "fused", "host read", "copy and select"


class GuardedOptimizer:
    """One or two torch optimizers over the trained parameters, stepped together or not at all.

    Their state has to be there already: an optimizer that makes it in its first step would have nothing to withhold
    (fused SGD even leaves uninitialised memory behind when its first step is rejected).
    """

    judged_first = True  # a verdict comes before the update
    whole = True  # weights, gradients and moments are the parameters' own, each tensor by itself

    def __init__(
        self,
        named: Named,
        optimizers: Sequence[Optimizer],
        path: str,
        fallback_reason: str | None = None,
        parts: Sequence[nn.Parameter] | None = None,
    ) -> None:
        """`parts` are what the optimizers were made over, where parameters are divided among processes."""
        self.named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.parts = list(parts or self.parameters)
        self.optimizers = list(optimizers)
        self.path = path
        self.fused = path == FUSED
        self.fallback_reason = fallback_reason
        self.accumulates = False
        self.afterwards: list[Callable[[Tensor], None]] = []  # what follows each step, given its verdict

    def backward(self, loss: Tensor, last: bool) -> None:
        """A micro-batch's backward pass; `last` is that of the step's last."""
        loss.backward()

    def square(self) -> Tensor | None:
        """This process's part of the square of the gradients' norm, where they do not lie at the parameters."""
        return None

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
        self._hand_over()
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
        for follow in self.afterwards:
            follow(reject)

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
        pairs = list(zip(self.parameters, self.parts, strict=True))
        found = ((p, o.state[part].get("remainder")) for o in self.optimizers for p, part in pairs if part in o.state)
        return {p: rest for p, rest in found if rest is not None and rest.device == p.device}

    def discard(self) -> None:
        """Drop the gradients."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            parameter.grad = part.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and counts by parameter name, live: a load writes into them, before the first step too."""
        for optimizer in self.optimizers:
            if shuttle := getattr(optimizer, "shuttle", None):
                shuttle.settle()  # what lies on the host may still be on its way there
        found = {}
        for (name, parameter), part in zip(self.named, self.parts, strict=True):
            for key, tensor in self._state_of(part):
                if part is not parameter and tensor.ndim:
                    blocks = part.numel() // tensor.numel() if tensor.numel() else 1  # that share a number
                    shape = None if tensor.shape == part.shape else (parameter.numel() // blocks,)
                    tensor = of_whole(tensor, parameter, shape)
                found[f"{name}.{key}"] = tensor
        return found

    def _state_of(self, part: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self.optimizers:
            if part in optimizer.state:
                yield from optimizer.state[part].items()

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Gradients of divided parameters to the parts that are stepped."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            if part is not parameter:
                part.data = held(parameter)
                part.grad = None if parameter.grad is None else held(parameter.grad)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All of a model's, by name, live."""
        return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}

    def targets(self, model: nn.Module) -> dict[str, Tensor]:
        """What a load writes into: weights and state as they live, or others that `put_back` is then given."""
        weights = {f"model.{name}": tensor for name, tensor in self.weights(model).items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.state().items()}

    def put_back(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """After a load into `targets`. Nothing, where those were live."""

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[None]:
        """For a block that writes to the model's weights."""
        yield

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _update(self, divisor: Tensor) -> None:
        if gradients := [part.grad for part in self.parts if part.grad is not None]:
            torch._foreach_div_(gradients, divisor)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _step_and_select(self, reject: Tensor, divisor: Tensor) -> None:
        # The copies live only during the step, when the activations are gone: the peak grows by less than their size.
        live = [part.detach() for part in self.parts]
        live += [tensor for part in self.parts for _, tensor in self._state_of(part)]
        kept = [tensor.clone() for tensor in live]
        self._update(divisor)
        # A count that torch keeps on the CPU beside weights on a GPU (Adagrad, Adafactor) costs a sync here after all.
        verdict = {device: reject.to(device).bool() for device in {tensor.device for tensor in live}}
        for now, before in zip(live, kept, strict=True):
            torch.where(verdict[now.device], before, now, out=now)  # a product with 0 would let NaN through


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are divided by so that their norm is at most `limit`."""
    return torch.clamp(norm.float() / limit, min=1.0)


class InBackward(GuardedOptimizer):
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
        assert isinstance(self.optimizers[0], LowMemoryOptimizer)
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
