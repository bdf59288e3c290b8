"""An optimizer that applies the rules of `rules.py`: verdict and divisor are tensors, and sharded weights are stepped
as whole ones are.

A rule that needs whole tensors gets the gathered weight, gradient and moments of one tensor at a time, on every rank.
Moments with the weight's shape stay sharded; the others (means over rows and columns, eigenbases) are held by all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bessemer.dtensor import shard_of, wrap_shard
from bessemer.optim.rules import Rule, StepSettings, follow_curvature

Sharded = Mapping[nn.Parameter, Any]  # what an optimizer steps -> the DTensor whose shard it is


def gather(shard: Tensor, like: Any) -> Tensor:
    """The whole tensor, on every rank."""
    return wrap_shard(shard.contiguous(), like).full_tensor()


def sharded_norm(like: Any, shard: Tensor) -> Tensor:
    """The norm of the tensor of which every rank holds a shard."""
    square = shard.square().sum()
    for dimension, placement in enumerate(like.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(square, group=like.device_mesh.get_group(dimension))
    return square.sqrt()


def exact_dtype(weight: Tensor) -> Tensor:
    """At least in fp32, as are the moments of bf16 weights."""
    return weight if weight.dtype == torch.float64 else weight.float()


class RuleOptimizer(Optimizer):
    """Steps every parameter by a rule. Takes the verdict as `found_inf` and the divisor as `grad_scale`, like torch's
    fused kernels; without them it always steps."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], rule: Rule, settings: Mapping[str, Any], sharded: Sharded | None = None
    ) -> None:
        super().__init__(groups, {"lr": 0.0, **settings})
        self.rule, self.settings, self.sharded = rule, tuple(settings), dict(sharded or {})
        self.divided: dict[nn.Parameter, set[str]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._fresh_state(parameter)

    @torch.no_grad()
    def _fresh_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        like, weight = self.sharded.get(parameter), exact_dtype(parameter.detach())
        device = torch.device("cpu") if self.rule.on_host else parameter.device
        count = {"step": torch.zeros((), device=device)}
        if like is None or not self.rule.whole:
            state = self.rule.state(weight)
            self.divided[parameter] = {name for name, tensor in state.items() if tensor.ndim}
            return count | state
        state = self.rule.state(torch.zeros(like.shape, dtype=weight.dtype, device=weight.device))
        self.divided[parameter] = {name for name, tensor in state.items() if tensor.shape == like.shape}
        return count | {n: torch.zeros_like(weight) if n in self.divided[parameter] else t for n, t in state.items()}

    def is_sharded(self, parameter: nn.Parameter, name: str) -> bool:
        """Whether an entry of the state is a shard, like the weight. Its shape does not tell: a shard of one row has
        that of a mean over columns."""
        return name in self.divided[parameter]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state, like = self.state[parameter], self.sharded.get(parameter)
        old = {name: tensor for name, tensor in state.items() if name != "step"}
        weight, values = parameter.detach(), old
        norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm
        if like is not None and self.rule.whole:
            weight, grad = gather(weight, like), gather(grad.to(weight.dtype), like)
            values = {name: gather(t, like) if self.is_sharded(parameter, name) else t for name, t in old.items()}
        elif like is not None:
            norm = partial(sharded_norm, like)
        exact = exact_dtype(weight)
        grad = grad.to(exact.dtype)
        grad = grad if self.grad_scale is None else grad / self.grad_scale.to(exact.dtype)
        more = {name: group[name] for name in self.settings}
        settings = StepSettings(group["lr"], group["weight_decay"], state["step"].to(exact.dtype) + 1, more, norm)
        new, values = self.rule.update(exact, grad, values, settings)
        if like is not None and self.rule.whole:
            new = shard_of(like, new)
            values = {name: shard_of(like, t) if self.is_sharded(parameter, name) else t for name, t in values.items()}
        self._write([(parameter.detach(), new), *((old[name], value) for name, value in values.items())])
        state["step"] += 1 if self.found_inf is None else 1 - self.found_inf

    @torch.no_grad()
    def follow_curvature(self, tokens: float, reject: Tensor, scale: Tensor | None) -> None:
        """Renew the curvature from gradients of sampled labels, `scale` times too large, unless `reject` is 1."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    curvature = self.state[parameter]["curvature"]
                    grad = parameter.grad.to(curvature.dtype)
                    grad = grad if scale is None else grad / scale.to(curvature.dtype)
                    new = follow_curvature(curvature, grad, tokens, group["betas"][1])
                    curvature.copy_(torch.where(reject.to(new.device).bool(), curvature, new))

    def _write(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Write the new values, or keep the old ones: selected, not multiplied by 0, which would let NaN through."""
        for tensor, value in pairs:
            value = value.to(tensor.dtype)
            tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf.bool(), tensor, value))
