"""Gradient clipping other than by the global norm, centralization and noise. Everything stays on the device; statistics
exclude rejected steps and count what was clipped by its clipped value, so that a spike does not raise its own limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.optim.low_memory import hash_bits, shard_place
from bessemer.optim.rule_optimizer import sharded_norm
from bessemer.spec.optimizer import OptimizerSpec

AGC_SHARE, AGC_LEAST = 0.01, 1e-3  # Brock et al. 2021
ZCLIP_DECAY, ZCLIP_WARMUP, ZCLIP_Z = 0.97, 25, 2.5  # Kumar et al. 2025
ADAGC_DECAY, ADAGC_WARMUP, ADAGC_SHARE = 0.98, 100, 1.05  # Wang et al. 2025
NOISE_DECAY = 0.55  # Neelakantan et al. 2015
TINY = 1e-12


class GradientClipper:
    """Changes the gradients of a step in place. `parameters` are what the optimizer steps; `sharded` leads from one to
    the DTensor whose shard it is."""

    def __init__(
        self, spec: OptimizerSpec, parameters: Sequence[nn.Parameter], sharded: Mapping[nn.Parameter, Any],
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.spec, self.parameters, self.seed = spec, list(parameters), seed
        plain: Callable[[Tensor], Tensor] = torch.linalg.vector_norm
        self.norms = [partial(sharded_norm, sharded[p]) if p in sharded else plain for p in parameters]
        self.firsts = [shard_place(sharded.get(p, p)).first for p in parameters]
        device = self.parameters[0].device
        self.count = torch.zeros((), device=device)
        self.mean, self.variance = torch.zeros((), device=device), torch.zeros((), device=device)  # zclip
        self.limits_P = torch.full((len(self.parameters),), float("inf"), device=device)  # adagc

    def state(self) -> dict[str, Tensor]:
        """Live, by name."""
        if self.spec.clipping == "zclip":
            return {"count": self.count, "mean": self.mean, "variance": self.variance}
        return {"count": self.count, "limits": self.limits_P} if self.spec.clipping == "adagc" else {}

    @torch.no_grad()
    def clip(self, norm: Tensor, limit: float, scale: Tensor, reject: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Clips gradients that are `scale` times too large and have this global norm (without the scale). Returns what
        is left to divide them by, and the share of tensors (of `value` elements) that were clipped."""
        grads = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        for i, grad in grads:
            if self.spec.centralize and grad.ndim >= 2:
                grad -= grad.mean(tuple(range(1, grad.ndim)), keepdim=True)
            if self.spec.noise:
                size = scale * (self.spec.noise / (1 + step) ** NOISE_DECAY)
                grad += (size * normal_noise(grad, self.seed, step, i, self.firsts[i])).to(grad.dtype)
        accepted = 1 - reject
        match self.spec.clipping:
            case "value":
                clipped = [(grad.abs() > limit * scale).sum() for _, grad in grads]
                for _, grad in grads:
                    grad.copy_(torch.minimum(torch.maximum(grad, -limit * scale), limit * scale))
                return scale, torch.stack(clipped).sum() / sum(grad.numel() for _, grad in grads)
            case "parameter":
                return scale, self._scale_tensors(grads, scale, torch.full_like(self.limits_P, limit))[1]
            case "agc":
                return scale, torch.stack([_agc(self.parameters[i], grad, scale) for i, grad in grads]).mean()
            case "adagc":
                return self._adagc(grads, norm, limit, scale, accepted)
            case "zclip":
                chosen = self._zclip(norm.float(), limit, accepted)
                divisor = torch.clamp(norm.float() / chosen, min=1.0)
            case _:
                divisor = torch.clamp(norm.float() / limit, min=1.0)
        return divisor * scale, (divisor > 1).float()

    def _scale_tensors(self, grads: list[tuple[int, Tensor]], scale: Tensor, most_P: Tensor) -> tuple[Tensor, Tensor]:
        """Bound each tensor's norm. Returns the norms before and the share of tensors that were clipped."""
        norms_P, clipped = torch.zeros_like(most_P), []
        for i, grad in grads:
            norms_P[i] = self.norms[i](grad.float()) / scale
            factor = torch.clamp(most_P[i] / (norms_P[i] + TINY), max=1.0)
            grad.mul_(factor)
            clipped.append((factor < 1).float())
        return norms_P, torch.stack(clipped).mean()

    def _adagc(
        self, grads: list[tuple[int, Tensor]], norm: Tensor, limit: float, scale: Tensor, accepted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """At first by the global norm, while each tensor's smallest norm is learnt; then each by its own average."""
        early = self.count < ADAGC_WARMUP
        factor = torch.where(early, torch.clamp(limit / (norm.float() + TINY), max=1.0), 1.0)
        most_P = torch.where(early, torch.full_like(self.limits_P, float("inf")), ADAGC_SHARE * self.limits_P)
        norms_P, share = self._scale_tensors(grads, scale, most_P)
        used_P = torch.minimum(norms_P * factor, most_P)
        average_P = torch.lerp(used_P, self.limits_P, ADAGC_DECAY)
        learnt_P = torch.where(early, torch.minimum(self.limits_P, used_P), average_P)
        seen_P = torch.zeros_like(most_P, dtype=torch.bool)
        seen_P[[i for i, _ in grads]] = True
        self.limits_P.copy_(torch.where(seen_P & accepted.bool(), learnt_P, self.limits_P))
        self.count += accepted
        return scale / factor, torch.where(early, (factor < 1).float(), share)

    def _zclip(self, norm: Tensor, limit: float, accepted: Tensor) -> Tensor:
        """The limit of the global norm: where it is an outlier, the further out it lies the nearer to the mean."""
        early, spread = self.count < ZCLIP_WARMUP, self.variance.sqrt()
        z = (norm - self.mean) / (spread + TINY)
        chosen = torch.where(~early & (z > ZCLIP_Z), self.mean + ZCLIP_Z**2 / z * spread, norm).clamp(max=limit)
        value = torch.minimum(norm, chosen)
        keep = torch.where(early, self.count / (self.count + 1), ZCLIP_DECAY)  # the plain mean at first
        mean = keep * self.mean + (1 - keep) * value
        # Welford's form of the plain variance at first, then the deviation from the new mean.
        off = torch.where(early, (value - self.mean) * (value - mean), (value - mean).square())
        variance = keep * self.variance + (1 - keep) * off
        ok = accepted.bool()
        self.mean.copy_(torch.where(ok, mean, self.mean))
        self.variance.copy_(torch.where(ok, variance, self.variance))
        self.count += accepted
        return chosen.clamp(min=TINY)


def _agc(weight: Tensor, grad: Tensor, scale: Tensor) -> Tensor:
    """Adaptive clipping: a row's gradient is at most a hundredth of the row's norm. The share of rows clipped."""
    rows = tuple(range(1, grad.ndim)) if grad.ndim > 1 else tuple(range(grad.ndim))
    size = torch.linalg.vector_norm(weight.detach().float(), dim=rows, keepdim=True).clamp(min=AGC_LEAST)
    length = torch.linalg.vector_norm(grad.float(), dim=rows, keepdim=True) / scale
    factor = torch.clamp(AGC_SHARE * size / (length + TINY), max=1.0)
    grad.mul_(factor.to(grad.dtype))
    return (factor < 1).float().mean()


def normal_noise(like: Tensor, seed: int, step: int, index: int, first: int) -> Tensor:
    """Normal numbers as a pure function of seed, step, tensor and an element's place in the whole: a replay and any
    sharding draw the same."""
    place = torch.arange(like.numel(), device=like.device) + first
    key = (seed * 0x9E3779B1 + step * 0x85EBCA6B + index * 0xC2B2AE35) & 0x7FFFFFFF
    bits = [hash_bits(hash_bits(place.to(torch.int32)) ^ ((key + salt) & 0x7FFFFFFF)) for salt in (1, 2)]
    one, two = ((b.long() & 0xFFFFFF).double().add(0.5) / (1 << 24) for b in bits)
    return ((-2 * one.log()).sqrt() * torch.cos(2 * torch.pi * two)).float().view(like.shape)
