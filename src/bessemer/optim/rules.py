"""Update rules as pure functions: (weight, gradient, state, settings) -> (new weight, new state). Nothing is changed in
place, so that `rule_optimizer.py` can reject a step by selecting the old values.

A rule that is `whole` needs the whole tensor; the others also work on a shard, where `norm` adds up all shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bessemer.spec.optimizer import SOAP_LARGEST

State = dict[str, Tensor]
Result = tuple[Tensor, State]


@dataclass(frozen=True)
class StepSettings:
    """The numbers of one step of one tensor."""

    lr: float
    weight_decay: float
    step: Tensor  # 1 in the first accepted step
    more: Mapping[str, Any] = field(default_factory=dict)  # betas, eps, momentum, ...
    norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm  # of the whole tensor


def debias(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step without cancellation."""
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """above / below, and 1 where either is 0."""
    return torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))


def adafactor(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """Adafactor (Shazeer and Stern 2018) with the relative step of torch: of a matrix only means over rows and columns
    of the squared gradient are kept."""
    eps = torch.finfo(weight.dtype).eps
    share = settings.step**-0.8  # 1 - beta2
    scale = weight.square().mean().sqrt().clamp(min=1e-3) * torch.clamp(settings.step**-0.5, max=settings.lr)
    if weight.ndim >= 2:
        row = torch.lerp(state["row_var"], grad.square().mean(-1, keepdim=True), share)
        column = torch.lerp(state["col_var"], grad.square().mean(-2, keepdim=True), share)
        square = row @ column / row.mean(-2, keepdim=True).clamp(min=eps)
        new = {"row_var": row, "col_var": column}
    else:
        square = torch.lerp(state["variance"], grad.square(), share)
        new = {"variance": square}
    update = grad * square.clamp(min=eps * eps).rsqrt()
    update = update / update.square().mean().sqrt().clamp(min=1.0)
    return weight * (1 - settings.lr * settings.weight_decay) - scale * update, new


def lamb(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """LAMB (You et al. 2019): AdamW whose step of each tensor has the length lr times the tensor's norm."""
    beta1, beta2 = settings.more["betas"]
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    square = torch.lerp(state["exp_avg_sq"], grad.square(), 1 - beta2)
    root = (square / debias(beta2, settings.step)).sqrt() + settings.more["eps"]
    update = mean / debias(beta1, settings.step) / root + settings.weight_decay * weight
    ratio = _ratio(settings.norm(weight), settings.norm(update))
    return weight - settings.lr * ratio * update, {"exp_avg": mean, "exp_avg_sq": square}


def lars(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """LARS (You et al. 2017): momentum of gradients that are scaled to a share of the weight's norm."""
    decay, scaled = settings.weight_decay, grad + settings.weight_decay * weight
    if weight.ndim >= 2:
        length, slope = settings.norm(weight), settings.norm(grad)
        trust = settings.more["trust"] * length / (slope + decay * length)
        scaled = scaled * torch.where((length > 0) & (slope + decay * length > 0), trust, torch.ones_like(trust))
    momentum = settings.more["momentum"] * state["momentum_buffer"] + scaled
    return weight - settings.lr * momentum, {"momentum_buffer": momentum}


def sm3(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """SM3-II (Anil et al. 2019): Adagrad whose sums are kept for each row and column only; the smallest of an element's
    sums counts."""
    names = [f"sum_{axis}" for axis in range(max(1, weight.ndim))]
    least = state[names[0]]
    for name in names[1:]:
        least = torch.minimum(least, state[name])
    square = least + grad.square()
    new = {}
    for axis, name in enumerate(names):
        others = [i for i in range(weight.ndim) if i != axis]
        new[name] = torch.maximum(state[name], square.amax(others, keepdim=True) if others else square)
    update = grad * (square + settings.more["eps"]).rsqrt()
    momentum = settings.more["momentum"]
    new["momentum_buffer"] = torch.lerp(state["momentum_buffer"], update, 1 - momentum)
    weight = weight * (1 - settings.lr * settings.weight_decay)
    return weight - settings.lr * new["momentum_buffer"], new


def schedule_free(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """Schedule-Free AdamW (Defazio et al. 2024). Gradients are taken at y, the model's weights in training; `x` is the
    average that is evaluated and exported, `z` the point that moves."""
    beta1, beta2 = settings.more["betas"]
    lr, x, z = settings.lr, state["x"], state["z"]
    square = torch.lerp(state["exp_avg_sq"], grad.square(), 1 - beta2)
    root = (square / debias(beta2, settings.step)).sqrt() + settings.more["eps"]
    highest = torch.clamp(state["lr_max"], min=lr)
    total = state["weight_sum"] + highest.square()
    share = torch.where(total > 0, highest.square() / total, total)
    z = z - lr * (grad / root + settings.weight_decay * weight)
    x = torch.lerp(x, z, share)
    new = {"x": x, "z": z, "exp_avg_sq": square, "lr_max": highest, "weight_sum": total}
    return torch.lerp(z, x, beta1), new


def ademamix(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """AdEMAMix (Pagliardini et al. 2024): AdamW with a second, slow mean of the gradients, which has no bias
    correction. Its weight rises linearly over the warm-up, and its half-life from that of the fast mean."""
    (beta1, beta2), more = settings.more["betas"], settings.more
    progress = torch.clamp(settings.step / more["slow_warmup"], max=1.0)
    # 1 / ln(beta), which the half-life is proportional to, is interpolated.
    inverse = (1 - progress) / (math.log(beta1) if beta1 else -math.inf) + progress / math.log(more["beta3"])
    mean = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    slow = torch.lerp(state["exp_avg_slow"], grad, -torch.expm1(1 / inverse))
    square = torch.lerp(state["exp_avg_sq"], grad.square(), 1 - beta2)
    root = (square / debias(beta2, settings.step)).sqrt() + more["eps"]
    update = (mean / debias(beta1, settings.step) + progress * more["slow_share"] * slow) / root
    weight = weight - settings.lr * (update + settings.weight_decay * weight)
    return weight, {"exp_avg": mean, "exp_avg_slow": slow, "exp_avg_sq": square}


def mars(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """MARS-AdamW (Yuan et al. 2024): AdamW of gradients that are corrected by their change since the last step, each
    tensor's clipped to norm 1. The last gradient is that of its own batch, as in its authors' experiments."""
    beta1, beta2 = settings.more["betas"]
    correction = settings.more["gamma"] * beta1 / (1 - beta1) * (grad - state["last_grad"])
    corrected = grad + correction
    corrected = corrected / settings.norm(corrected).clamp(min=1.0)
    mean = torch.lerp(state["exp_avg"], corrected, 1 - beta1)
    square = torch.lerp(state["exp_avg_sq"], corrected.square(), 1 - beta2)
    root = (square / debias(beta2, settings.step)).sqrt() + settings.more["eps"]
    update = mean / debias(beta1, settings.step) / root
    weight = weight - settings.lr * (update + settings.weight_decay * weight)
    return weight, {"exp_avg": mean, "exp_avg_sq": square, "last_grad": grad}


def sophia(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """Sophia-G (Liu et al. 2023): the mean gradient over the loss's curvature, each element at most 1. The curvature is
    renewed by `follow_curvature`; where it is 0, an update is the sign of the mean."""
    mean = torch.lerp(state["exp_avg"], grad, 1 - settings.more["betas"][0])
    size = torch.clamp(settings.more["gamma"] * state["curvature"], min=settings.more["eps"])
    weight = weight * (1 - settings.lr * settings.weight_decay)
    weight = weight - settings.lr * torch.clamp(mean / size, -1.0, 1.0)
    return weight, {"exp_avg": mean, "curvature": state["curvature"]}


def follow_curvature(curvature: Tensor, grad: Tensor, tokens: float, beta2: float) -> Tensor:
    """The Gauss-Newton-Bartlett estimate: the gradient of the mean loss over labels that are drawn from the model's own
    logits, squared, times their number."""
    return torch.lerp(curvature, tokens * grad.square(), 1 - beta2)


def soap(weight: Tensor, grad: Tensor, state: State, settings: StepSettings) -> Result:
    """SOAP (Vyas et al. 2024): Adam in the eigenbasis of the gradient's two covariances. The first step only sets the
    basis; every `interval` steps a power step with QR refreshes it. Decides on the host."""
    beta1, beta2 = settings.more["betas"]
    count, new = int(settings.step) - 1, dict(state)
    if count:
        turned = _rotate(grad, state)
        mean = torch.lerp(state["exp_avg"], turned, 1 - beta1)
        square = torch.lerp(state["exp_avg_sq"], turned.square(), 1 - beta2)
        steps = settings.step - 1
        size = settings.lr * debias(beta2, steps).sqrt() / debias(beta1, steps)
        weight = weight - size * _rotate(mean / (square.sqrt() + settings.more["eps"]), state, back=True)
        weight = weight * (1 - settings.lr * settings.weight_decay)
        new |= {"exp_avg": _rotate(mean, state, back=True), "exp_avg_sq": square}
    for side, outer in (("left", grad @ grad.mT), ("right", grad.mT @ grad)) if grad.ndim == 2 else ():
        if f"{side}_basis" in state:
            covariance = new[f"{side}_cov"] = torch.lerp(state[f"{side}_cov"], outer, 1 - beta2)
            if not count:
                tiny = 1e-30 * torch.eye(len(covariance), dtype=grad.dtype, device=grad.device)
                new[f"{side}_basis"] = torch.linalg.eigh(covariance + tiny)[1].flip(1)
            elif count % settings.more["interval"] == 0:
                basis = state[f"{side}_basis"]
                order = (basis * (covariance @ basis)).sum(0).argsort(descending=True)
                new["exp_avg_sq"] = new["exp_avg_sq"].index_select(0 if side == "left" else 1, order)
                new[f"{side}_basis"] = torch.linalg.qr(covariance @ basis[:, order])[0]
    if count:
        new["exp_avg"] = _rotate(new["exp_avg"], new)
    return weight, new


def _rotate(matrix: Tensor, state: State, back: bool = False) -> Tensor:
    """Into the eigenbasis, or back."""
    if "left_basis" in state:
        matrix = (state["left_basis"] if back else state["left_basis"].mT) @ matrix
    if "right_basis" in state:
        matrix = matrix @ (state["right_basis"].mT if back else state["right_basis"])
    return matrix


def _zeros(*names: str) -> Callable[[Tensor], State]:
    return lambda weight: {name: torch.zeros_like(weight) for name in names}


def _adafactor_state(weight: Tensor) -> State:
    if weight.ndim < 2:
        return {"variance": torch.zeros_like(weight)}
    return {"row_var": torch.zeros_like(weight[..., :1]), "col_var": torch.zeros_like(weight[..., :1, :])}


def _sm3_state(weight: Tensor) -> State:
    sizes = [[n if i == axis else 1 for i, n in enumerate(weight.shape)] for axis in range(max(1, weight.ndim))]
    sums = {f"sum_{axis}": weight.new_zeros(size) for axis, size in enumerate(sizes)}
    return {**sums, "momentum_buffer": torch.zeros_like(weight)}


def _schedule_free_state(weight: Tensor) -> State:
    numbers = {"lr_max": weight.new_zeros(()), "weight_sum": weight.new_zeros(())}
    return {"x": weight.clone(), "z": weight.clone(), "exp_avg_sq": torch.zeros_like(weight), **numbers}


def _soap_state(weight: Tensor) -> State:
    state = _zeros("exp_avg", "exp_avg_sq")(weight)
    for side, size in zip(("left", "right"), weight.shape, strict=False) if weight.ndim == 2 else ():
        if size <= SOAP_LARGEST:
            state |= {f"{side}_cov": weight.new_zeros(size, size), f"{side}_basis": weight.new_zeros(size, size)}
    return state


@dataclass(frozen=True)
class Rule:
    """An update rule and its fresh state, from the whole weight if the rule is `whole`."""

    update: Callable[[Tensor, Tensor, State, StepSettings], Result]
    state: Callable[[Tensor], State]
    whole: bool = False
    on_host: bool = False  # decides by the step's number: a veto is read on the host
    settling: int = 0  # first steps that leave the weights alone
    curvature: bool = False  # takes gradients of sampled labels every `interval` steps
    average: str = ""  # the entry of the state that is evaluated and exported instead of the weights


RULES = {
    "adafactor": Rule(adafactor, _adafactor_state, whole=True),
    "lamb": Rule(lamb, _zeros("exp_avg", "exp_avg_sq")),
    "lars": Rule(lars, _zeros("momentum_buffer")),
    "sm3": Rule(sm3, _sm3_state, whole=True),
    "schedule_free": Rule(schedule_free, _schedule_free_state, average="x"),
    "ademamix": Rule(ademamix, _zeros("exp_avg", "exp_avg_slow", "exp_avg_sq")),
    "mars": Rule(mars, _zeros("exp_avg", "exp_avg_sq", "last_grad")),
    "sophia": Rule(sophia, _zeros("exp_avg", "curvature"), curvature=True),
    "soap": Rule(soap, _soap_state, whole=True, on_host=True, settling=1),
}
