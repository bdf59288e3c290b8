"""Weights in half precision as float32 for a while: a step that is run again in full precision needs all of it so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Costs four bytes a weight; none where the weights are float32 already. Gradients do not outlast it."""
    half = [p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    held = [parameter.data for parameter in half]
    try:
        for parameter in half:
            parameter.grad, parameter.data = None, parameter.data.float()
        yield
    finally:
        for parameter, data in zip(half, held, strict=True):
            parameter.grad, parameter.data = None, data
