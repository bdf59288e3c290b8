"""Rotary positions (RoFormer), half-split layout as in Llama checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin by position, grown on demand and kept per device and type. Not a parameter, never saved."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def get(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(length, head_dim) each, computed in float32 (float64 for float64 models)."""
        cos_TD, sin_TD = self._tables.get((device, dtype), (None, None))
        if cos_TD is None or sin_TD is None or len(cos_TD) < length:
            with torch.inference_mode(False):  # a table first asked for by generation must serve training too
                cos_TD, sin_TD = self._make(1 << max(length - 1, 1).bit_length(), device, dtype)
            self._tables[device, dtype] = (cos_TD, sin_TD)
        return cos_TD[:length], sin_TD[:length]

    def _make(self, size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        halves = torch.arange(0, self.head_dim, 2, device=device, dtype=exact) / self.head_dim
        angle_TH = torch.outer(torch.arange(size, device=device, dtype=exact), 1.0 / self.theta**halves)
        angle_TD = torch.cat((angle_TH, angle_TH), dim=-1)
        return angle_TD.cos().to(dtype), angle_TD.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """x cos + rotate(x) sin; the backward pass is the rotation by the opposite angle, so nothing of x is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def, override]
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def rotate(x_BTND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each head's vector by its position."""
    out: Tensor = _Rotate.apply(x_BTND, cos_TD[None, :, None], sin_TD[None, :, None])  # type: ignore[no-untyped-call]
    return out
