"""The precision of forward and backward passes; weights and moments stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def compute_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """bf16 through autocast, or fp32 as it is. bf16 has fp32's range, so no loss scaling is needed."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
