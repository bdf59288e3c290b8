"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of a blended momentum, with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """One moment a parameter; every weight moves by `lr` or not at all, so `lr` is smaller than AdamW's by 3 to 10."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "no closure is ever given here"
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            for p in moved:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            grads, moments = [p.grad for p in moved], [self.state[p]["exp_avg"] for p in moved]
            (blend, keep), lr = group["betas"], group["lr"]
            updates = torch._foreach_lerp(moments, grads, 1 - blend)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(moved, 1 - lr * group["weight_decay"])
            torch._foreach_add_(moved, updates, alpha=-lr)
            torch._foreach_lerp_(moments, grads, 1 - keep)
