"""A parameter that is divided among processes, as the part that this one holds: a step that goes element by element is
taken on the part as on any tensor. Saved state is given back as parts of a whole, which any other layout can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.dtensor import is_dtensor


@dataclass(frozen=True)
class Place:
    """Of a part in its whole."""

    first: int  # index of its first element, counted flat
    size: int  # elements of the whole
    even: bool = True  # every process holds equally many rows


@torch.no_grad()
def held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer is given instead of a divided parameter; a whole one stays as it is."""
    return nn.Parameter(held(parameter)) if is_dtensor(parameter) else parameter


def place_of(parameter: Tensor) -> Place:
    if not is_dtensor(parameter):
        return Place(0, parameter.numel())
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    first = sum(at * step for at, step in zip(offset, parameter.stride(), strict=True))
    by_rows, parts = True, 1
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            by_rows &= type(placement) is Shard and placement.dim == 0
            parts *= mesh.size(dimension)
    return Place(first, parameter.numel(), parts == 1 or (by_rows and parameter.shape[0] % parts == 0))


def of_whole(tensor: Tensor, parameter: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A part of state beside a part of a parameter, as a part of the whole's state; the same memory. `shape` is that of
    the whole state, where it is not the parameter's. Built by hand: `from_local` would move what lies on the host."""
    if not is_dtensor(parameter):
        return tensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    size = torch.Size(parameter.shape if shape is None else shape)
    strides = torch.empty(size, device="meta").stride()
    meta = TensorMeta(size, strides, tensor.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(tensor, spec, requires_grad=False)
