"""Recognises tensors that are divided over a device mesh, without importing torch's DTensor: that import takes a second
and a run of one process has no such tensor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. There is none before its module is loaded."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
