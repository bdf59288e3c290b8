"""Recognises DTensors without importing torch's DTensor module: that import takes a second, and a run of one process
has no DTensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. None exists before its module is loaded."""
    dtensor_class = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor_class is not None and isinstance(tensor, dtensor_class)
