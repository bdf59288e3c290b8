"""Helpers for DTensors, without importing torch's DTensor module: that import takes a second, and a run of one process
has no DTensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. None exists before its module is loaded."""
    dtensor_class = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor_class is not None and isinstance(tensor, dtensor_class)


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this process holds, in the same memory; a plain tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def wrap_shard(shard: Tensor, like: DTensor, shape: Sequence[int] | None = None) -> DTensor:
    """A shard as part of a DTensor with the mesh and placements of `like`, in the same memory; `shape` is the global
    shape if it differs. Built by hand: `DTensor.from_local` would move a shard in host memory to the mesh's device."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    size = torch.Size(like.shape if shape is None else shape)
    stride = torch.empty(size, device="meta").stride() if shape is not None else like.stride()
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(size, stride, shard.dtype))
    return DTensor(shard, spec, requires_grad=False)


def place_of(tensor: DTensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def shard_of(tensor: Tensor, full: Tensor) -> Tensor:
    """The part of a full tensor that this rank holds, if it is sharded like `tensor`."""
    return full[place_of(tensor)] if is_dtensor(tensor) else full


def copy_shard(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's shard from a full tensor that every rank has."""
    import torch

    with torch.no_grad():
        local(tensor).copy_(shard_of(tensor, full))
