"""AdamW whose update a verdict can withhold.

The verdict is a float32 tensor, exactly 0 or 1. Fused AdamW takes it as `found_inf` and the clip divisor as
`grad_scale`: no host sync, and a rejected step leaves weights, moments and counts bit-untouched even under NaN. Where
there is no fused kernel the verdict is read once on the host before the step. Which of the two is safe here is not
assumed: a probe on one parameter proves it at start.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Named = Iterable[tuple[str, nn.Parameter]]
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class GuardedAdamW:
    """torch's AdamW with a veto. Matrices are decayed, vectors are not."""

    def __init__(self, named: Named, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        self.device = self.parameters[0].device
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.fused = fused_veto_works(self.device)
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=betas,
            eps=eps,
            fused=self.fused,
            foreach=None if self.fused else True,
        )

    def grad_norm(self) -> Tensor:
        """Global norm; NaN or Inf as soon as one gradient is."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def step(self, lr: float, reject: Tensor, divisor: Tensor) -> None:
        """Divide gradients by `divisor` and update, unless `reject` is 1. Gradients are spent either way."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.fused:
            self.optimizer.found_inf = reject  # type: ignore[attr-defined]
            self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bool(reject):
            torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, tensors only; made if no step was taken yet, so that a load has where to write."""
        result = {}
        for name, parameter in self.named:
            state = self.optimizer.state[parameter]
            if not state:
                # As torch lays it out: fused keeps the count on the device, the others on the CPU.
                state["step"] = torch.zeros(
                    (), dtype=torch.float32, device=self.device if self.fused else "cpu"
                )
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for key in MOMENTS:
                result[f"{name}.{key}"] = state[key]
        return result


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are divided by so that their norm is at most `limit`."""
    return torch.clamp(norm.float() / limit, min=1.0)


def fused_veto_works(device: torch.device) -> bool:
    """Whether fused AdamW exists on this device and leaves everything untouched when told to skip a NaN gradient."""
    parameter = nn.Parameter(torch.ones(4, device=device))
    try:
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        for reject in (0.0, 1.0):
            before = [t.clone() for t in (parameter.detach(), *optimizer.state[parameter].values())]
            parameter.grad = torch.full_like(parameter, float("nan") if reject else 1.0)
            optimizer.found_inf = torch.tensor(reject, device=device)  # type: ignore[attr-defined]
            optimizer.grad_scale = torch.tensor(float("nan") if reject else 1.0, device=device)  # type: ignore[attr-defined]
            optimizer.step()
    except RuntimeError:
        return False
    after = [parameter.detach(), *optimizer.state[parameter].values()]
    moved = not torch.equal(parameter.detach(), torch.ones_like(parameter))
    return moved and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
