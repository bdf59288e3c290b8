"""What packs that are not exact do to a tensor: bf16, 8 bits, and changes below a threshold left out.

8 bits are codes in blocks of 128 with the largest magnitude of each block (8.25 bits per number). Moments that are
never negative, Adam's second, are kept as square roots, and what is not zero is never rounded to zero: the next update
would divide by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Literal["same", "bf16", "int8"]
BLOCK = 128


@dataclass(frozen=True)
class RoundedTensor:
    """`stored` is what is packed, `restored` what unpacking gives back, `how` an entry of the index for it."""

    stored: Tensor
    restored: Tensor
    how: dict[str, Any]


def is_exact(name: str, tensor: Tensor) -> bool:
    """Counts stay exact, and so do biases that change by thousandths, and all but weights and moments."""
    wide = tensor.is_floating_point() and tensor.element_size() > 2
    group = name.partition(".")[0]
    return not wide or tensor.ndim == 0 or name.endswith("choice_bias") or group not in ("model", "optimizer")


def round_tensor(name: str, tensor: Tensor, rounding: Rounding) -> RoundedTensor:
    """A tensor as a pack stores it. What is not finite is not rounded to 8 bits."""
    if rounding == "same" or is_exact(name, tensor):
        return RoundedTensor(tensor, tensor, {})
    if rounding == "bf16":
        return RoundedTensor(tensor.bfloat16(), tensor.bfloat16().to(tensor.dtype), {})
    if not tensor.numel() or not tensor.isfinite().all():
        return RoundedTensor(tensor, tensor, {})
    squares = name.startswith("optimizer") and bool((tensor >= 0).all())
    stored = _to_int8(tensor.double(), squares)
    how = {"rounding": "int8", "squares": squares, "values_shape": list(tensor.shape)}
    return RoundedTensor(stored, restore(stored, how).to(tensor.dtype), how)


def restore(stored: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """The values of a stored tensor."""
    if entry.get("rounding") != "int8":
        return stored
    count = math.prod(entry["values_shape"])
    scale_bytes = 4 * -(-count // BLOCK)
    scales = torch.from_numpy(np.frombuffer(stored[:scale_bytes].numpy().tobytes(), np.float32).copy())
    codes = F.pad(stored[scale_bytes:].view(torch.int8), (0, -count % BLOCK)).view(-1, BLOCK)
    values = (codes.double() * scales.double()[:, None]).flatten()[:count].view(entry["values_shape"])
    return values.square() if entry["squares"] else values


def _to_int8(tensor: Tensor, squares: bool) -> Tensor:
    """The bytes of the scales (float32), then the codes."""
    values = (tensor.sqrt() if squares else tensor).flatten()
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) / 127).float()
    units = blocks / scales.double().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = units.round().clamp(-127, 127)
    if squares:
        codes = codes.where(units <= 0, codes.clamp(min=1))
    return torch.cat((scales.view(torch.uint8), codes.to(torch.int8).flatten()[: len(values)].view(torch.uint8)))


def keep_changes(tensor: Tensor, base: Tensor, threshold: float) -> tuple[Tensor, int]:
    """The base with the elements that differ from it by more than `threshold` times the root mean square of the base,
    and their number. NaN and infinity count as changes."""
    finite = base.double().nan_to_num(0.0, 0.0, 0.0)
    limit = threshold * finite.square().mean().sqrt()
    same = (tensor.double() - base.double()).abs() <= limit
    return torch.where(same, base, tensor), int((~same).sum())
