"""An optimizer whose update a verdict can reject. The verdict is a float32 tensor, exactly 0 or 1.

There are three veto paths. Fused kernels take the verdict as `found_inf` and the clip divisor as `grad_scale`, without
a host sync. Otherwise the verdict is read on the host before the step; or weights and state are copied, stepped, and
the copies selected back, without a host sync at the cost of the memory. On each path a rejected step leaves weights,
moments and counts bit-identical, even under NaN; `choose.py` tests that at startup.

An exponential moving average (EMA) of the weights in float32, for evaluation and export.

It follows accepted updates only. The verdict is used on the device, so the average costs no host sync.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.dtensor import is_dtensor, local, wrap_shard
from bessemer.errors import UserError
from bessemer.optim.clipping import GradientClipper
from bessemer.optim.groups import decay_at, factor_at, trains_at
from bessemer.optim.low_memory import LowMemoryOptimizer
from bessemer.optim.rule_optimizer import RuleOptimizer
from bessemer.optim.wrappers import Lookahead
from bessemer.spec.optimizer import OptimizerSpec


class EagerOptimizer(Optimizer):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(super().step.__func__)(self, closure)  # type: ignore[attr-defined]


def eager(kind: type[Optimizer]) -> type[Optimizer]:
    """The same optimizer, under the same name, without torch.compile wrappers: the first call of a wrapped method
    imports torch._dynamo, which takes 1.7 s on one core. The wrapped functions are unchanged."""
    return type(kind.__name__, (EagerOptimizer, kind), {})


Named = Iterable[tuple[str, nn.Parameter]]
FUSED, HOST, SELECT = "fused", "host read", "copy and select"


class GuardedOptimizer:
    """One or two torch optimizers over the trained parameters, stepped together or not at all.

    Their state must be initialised: an optimizer that creates it in its first step could not be rejected then (fused
    SGD even leaves uninitialised memory behind if its first step is rejected).
    """

    rejects_before_update = True  # the verdict comes before the update
    whole = True  # weights, gradients and moments are one tensor per parameter, not flattened parts

    def __init__(
        self, named: Named, optimizers: Sequence[Optimizer], path: str, fallback_reason: str | None = None,
        shards: Sequence[nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        """`shards` are what the optimizers update, if parameters are sharded over processes."""
        self.named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.shards = list(shards or self.parameters)
        self.optimizers = list(optimizers)
        self.path = path
        self.fused = path == FUSED
        self.fallback_reason = fallback_reason
        self.accumulates = False
        self.lookahead: Lookahead | None = None
        self.clipper: GradientClipper | None = None
        self.held: set[nn.Parameter] = set()  # what does not train at this step
        self.post_step_hooks: list[Callable[[Tensor], None]] = []  # called after each step with its verdict

    def backward(self, loss: Tensor, last: bool) -> None:
        """The backward pass of a micro-batch; `last` marks the last one of the step."""
        loss.backward()

    def square(self) -> Tensor | None:
        """This process's share of the squared gradient norm, if gradients are not stored on the parameters."""
        return None

    def grad_norm(self) -> Tensor:
        """The global norm; NaN or Inf if any gradient is."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self._gradients():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        # Without the dtype, the norm of a bf16 tensor would be a bf16 number.
        norms = [
            torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.promote_types(dtype, torch.float32)))
            for dtype, gradients in by_dtype.items()
        ]
        return torch.linalg.vector_norm(torch.cat(norms)) if norms else torch.zeros(())

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Divide gradients by `divisor` and update, unless `reject` is 1. Clears the gradients either way.

        A group's learning rate is `lr` times its `lr_scale`.
        """
        self.set_lr(lr)
        if self.lookahead:
            self.lookahead.before_step()
        self._set_shard_gradients()
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
        if self.lookahead:
            self.lookahead.after_step(reject)
        for hook in self.post_step_hooks:
            hook(reject)

    def prepare_backward(self, lr: float) -> None:
        """Called before the backward passes of a step; optimizers in backward prepare for their update."""

    def at_step(self, step: int) -> None:
        """Set what the groups have at a step: their factors, and which of them train."""
        self.held = set()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["factor"], group["weight_decay"] = factor_at(group, step), decay_at(group, step)
                if not trains_at(group, step):
                    self.held |= set(group["params"])

    def drop_held_gradients(self) -> None:
        """Forget the gradients of parameters that do not train at this step: neither norm nor update sees them."""
        if self.held:
            for parameter, shard in zip(self.parameters, self.shards, strict=True):
                if shard in self.held:
                    parameter.grad = None

    def clip(
        self, norm: Tensor, limit: float, scale: Tensor | None, reject: Tensor, step: int
    ) -> tuple[Tensor, Tensor | None]:
        """What to divide the gradients by, whose global norm is given without the loss scale, and the share of them
        that is clipped, if that is not yes or no."""
        if self.clipper is None:
            divisor = clip_divisor(norm, limit)
            return (divisor if scale is None else divisor * scale), None
        self._set_shard_gradients()
        scale = torch.ones_like(norm, dtype=torch.float32) if scale is None else scale
        return self.clipper.clip(norm, limit, scale, reject.to(norm.device), step)

    def curvature_due(self, step: int) -> bool:
        """Whether the optimizer needs gradients of sampled labels before the update of this step."""
        rules = [o for o in self.optimizers if isinstance(o, RuleOptimizer) and o.rule.curvature]
        return any(step % optimizer.defaults["interval"] == 0 for optimizer in rules)

    @contextmanager
    def other_gradients(self, copy: bool) -> Iterator[None]:
        """A block for gradients of another loss. Those before it are back afterwards; `copy` where their memory is
        used again."""
        before = [p.grad if p.grad is None or not copy else p.grad.clone() for p in self.parameters]
        self.discard()
        try:
            yield
        finally:
            self.discard()
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def follow_curvature(self, tokens: float, reject: Tensor, scale: Tensor | None = None) -> None:
        """Renew the curvature from the gradients of sampled labels, which are `scale` times too large."""
        self._set_shard_gradients()
        for optimizer in self.optimizers:
            if isinstance(optimizer, RuleOptimizer) and optimizer.rule.curvature:
                optimizer.follow_curvature(tokens, reject, scale)

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"] * group.get("factor", 1.0)

    def accumulate(self, several: bool) -> None:
        """Called before the passes of a step. Gradients of several micro-batches accumulate in fp32, whatever the
        weights' dtype."""
        if several == self.accumulates:
            return
        self.accumulates = several
        for parameter in self.parameters:
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.grad_dtype = torch.float32 if several else parameter.dtype

    def remainders(self) -> dict[nn.Parameter, Tensor]:
        """The low 16 bits of split fp32 weights, if they are stored beside bf16 weights."""
        pairs = list(zip(self.parameters, self.shards, strict=True))
        remainders = ((p, o.state[s].get("remainder")) for o in self.optimizers for p, s in pairs if s in o.state)
        return {p: rest for p, rest in remainders if rest is not None and rest.device == p.device}

    def discard(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            parameter.grad = shard.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments and counts by parameter name, live: a checkpoint load writes into them, also before the first
        step."""
        for optimizer in self.optimizers:
            if offload := getattr(optimizer, "offload", None):
                offload.synchronize()  # copies to the host may be in flight
        state = {}
        for (name, parameter), shard in zip(self.named, self.shards, strict=True):
            for key, tensor, divided in self._state_of(shard):
                if is_dtensor(parameter) and divided:
                    block = shard.numel() // tensor.numel() if tensor.numel() else 1  # weights that share a number
                    shape = None if tensor.shape == shard.shape else (parameter.numel() // block,)
                    tensor = wrap_shard(tensor, parameter, shape)
                state[f"{name}.{key}"] = tensor
        if self.clipper:
            state |= {f"clipping.{key}": tensor for key, tensor in self.clipper.state().items()}
        if self.lookahead:
            pairs = zip(self.lookahead.state().items(), self.parameters, strict=True)
            state |= {key: wrap_shard(slow, p) if is_dtensor(p) else slow for (key, slow), p in pairs}
            state["lookahead.count"] = self.lookahead.count
        return state

    def _state_of(self, shard: nn.Parameter) -> Iterator[tuple[str, Tensor, bool]]:
        """Name, tensor and whether it is divided like the weight. An average belongs to `ScheduleFreeAverage`."""
        for optimizer in self.optimizers:
            own = optimizer if isinstance(optimizer, RuleOptimizer) else None
            for key, tensor in optimizer.state[shard].items() if shard in optimizer.state else ():
                if own is None:
                    yield key, tensor, bool(tensor.ndim)
                elif key != own.rule.average:
                    yield key, tensor, own.is_sharded(shard, key)

    @torch.no_grad()
    def _set_shard_gradients(self) -> None:
        """Pass the gradients of sharded parameters to the shards that are updated."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            if shard is not parameter:
                shard.data = local(parameter)
                shard.grad = None if parameter.grad is None else local(parameter.grad)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights of a model by name, live."""
        return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}

    def targets(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors that a checkpoint load writes into: live weights and state, or buffers for `put_back`."""
        weights = {f"model.{name}": tensor for name, tensor in self.weights(model).items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.state().items()}

    def apply_loaded(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Called after a load into `targets`; does nothing if those were live."""

    @contextmanager
    def writable_weights(self, model: nn.Module) -> Iterator[None]:
        """Context for code that writes to the model's weights."""
        yield

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _update(self, divisor: Tensor) -> None:
        if gradients := [shard.grad for shard in self.shards if shard.grad is not None]:
            torch._foreach_div_(gradients, divisor)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _step_and_select(self, reject: Tensor, divisor: Tensor) -> None:
        # The copies exist only during the step, when activations are freed: the peak grows by less than their size.
        live = [shard.detach() for shard in self.shards]
        live += [t for o in self.optimizers for state in o.state.values() for t in state.values()]
        copies = [tensor.clone() for tensor in live]
        self._update(divisor)
        # Step counts that torch keeps on the CPU (Adagrad, Adafactor) still cost a sync here.
        verdict = {device: reject.to(device).bool() for device in {tensor.device for tensor in live}}
        for tensor, copy in zip(live, copies, strict=True):
            torch.where(verdict[tensor.device], copy, tensor, out=tensor)  # multiplying by 0 would let NaN through


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """The divisor that reduces a gradient norm to at most `limit`."""
    return torch.clamp(norm.float() / limit, min=1.0)


class OptimizerInBackward(GuardedOptimizer):
    """Updates each parameter in the backward pass after `arm`, as soon as its gradient is known, and frees the
    gradient. Gradients computed otherwise (a replay, a trial) are kept, and `step` handles them as usual.

    There is never a full set of gradients, hence no norm before the update: no clipping, and a verdict comes too late.
    Only a gradient with NaN or Inf does not change its own parameter.
    """

    rejects_before_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self.optimizers[0], LowMemoryOptimizer)
        self.optimizer, self.armed = self.optimizers[0], False
        self.one = torch.ones((), device=self.optimizer.device)
        self.norms: dict[nn.Parameter, Tensor] = {}
        self.rates: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._update_parameter)

    def prepare_backward(self, lr: float) -> None:
        """The next backward pass updates, at this learning rate."""
        self.set_lr(lr)
        self.norms, self.armed = {}, True
        scalars = [(group, self.optimizer.scalars(group)) for group in self.optimizer.param_groups]
        self.rates = {parameter: rates for group, rates in scalars for parameter in group["params"]}
        if self.optimizer.offload:
            self.optimizer.offload.begin()

    @torch.no_grad()
    def _update_parameter(self, parameter: Tensor) -> None:
        if not self.armed:
            return
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self.norms:
            raise UserError(
                "memory.update: in_backward cannot accumulate gradients: set budget.micro_batch to the batch size"
            )
        grad, parameter.grad = parameter.grad, None
        norm = self.norms[parameter] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        reject = (~norm.isfinite()).float()
        self.optimizer.step_parameter(parameter, grad, reject, self.one, *self.rates[parameter])
        self.optimizer.state[parameter]["step"] += 1 - reject

    def grad_norm(self) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(list(self.norms.values()))) if self.armed else super().grad_norm()

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Ends an armed step, whose update can no longer be rejected."""
        if self.armed:
            self.armed = False
        else:
            super().step(lr, reject, divisor)

    def discard(self) -> None:
        self.armed = False
        super().discard()


class Ema:
    """`average += (1 - d) * (weight - average)` with d = min(decay, (1 + n) / (10 + n)) after n accepted updates.

    The rising d lets the average forget the random initial weights. Costs four bytes per parameter.
    """

    def __init__(self, named: Named, decay: float) -> None:
        pairs = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.names = [name for name, _ in pairs]
        self.parameters = [parameter for _, parameter in pairs]
        self.decay = decay
        self.averages = [weight.float().clone() for weight in self.weights]
        self.updates = torch.zeros((), dtype=torch.int64, device=self.weights[0].device)

    @property
    def weights(self) -> list[Tensor]:
        """Local shards of sharded parameters, which are averaged like any others."""
        return [local(parameter.detach()) for parameter in self.parameters]

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights, after loading a checkpoint without an average."""
        torch._foreach_copy_(self.averages, self.weights)
        self.updates.zero_()

    @torch.no_grad()
    def update(self, reject: Tensor) -> None:
        """Follow the weights after a step; a rejected one (`reject` is 1) leaves the average bit-identical."""
        rejected = reject.to(self.updates.device).bool()
        # 1 - d without cancellation; Apple's backend has no float64.
        share = (9.0 / (10 + self.updates)).clamp(min=1 - self.decay)
        changes = torch._foreach_sub([weight.float() for weight in self.weights], self.averages)
        torch._foreach_mul_(changes, share)
        for change in changes:  # masked, not multiplied by 0: NaN weights must not get in
            change.masked_fill_(rejected, 0.0)
        torch._foreach_add_(self.averages, changes)
        self.updates += ~rejected

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name and the update count, live: a checkpoint load writes into them."""
        pairs = zip(self.averages, self.parameters, strict=True)
        averages = [wrap_shard(average, p) if is_dtensor(p) else average for average, p in pairs]
        return {**dict(zip(self.names, averages, strict=True)), "updates": self.updates}

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Swaps the averaged weights into the model for a block and restores the originals bit for bit. Do not save
        inside."""
        originals = [weight.clone() for weight in self.weights]
        try:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.averages)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, originals)


class ScheduleFreeAverage(Ema):
    """The average that Schedule-Free keeps in its own state, for evaluation and export."""

    def __init__(self, named: Named, optimizer: GuardedOptimizer) -> None:
        super().__init__(named, 0.0)
        states = [state for inner in optimizer.optimizers for state in map(inner.state.get, optimizer.shards) if state]
        self.averages = [state["x"] for state in states]
        self.moving = [state["z"] for state in states]

    @torch.no_grad()
    def restart(self) -> None:
        super().restart()
        torch._foreach_copy_(self.moving, self.weights)

    def update(self, reject: Tensor) -> None:
        """The optimizer's step has updated it."""


def weight_average(named: Named, spec: OptimizerSpec, optimizer: GuardedOptimizer) -> Ema | None:
    """The average of the weights that the spec asks for."""
    if spec.name == "schedule_free":
        return ScheduleFreeAverage(named, optimizer)
    return Ema(named, spec.ema) if spec.ema else None
