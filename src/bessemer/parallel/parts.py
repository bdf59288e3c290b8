"""What a process holds of tensors that are divided over a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bessemer.dtensor import is_dtensor
from bessemer.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shards(tensor: Tensor) -> int:
    """Into how many parts it is divided."""
    count = 1
    if is_dtensor(tensor):
        for dimension, placement in enumerate(tensor.placements):
            count *= 1 if placement.is_replicate() else tensor.device_mesh.size(dimension)
    return count


def share_of(tensor: Tensor, world: World) -> float:
    """One over the number of processes that hold the same part of it: each stage of a pipeline has its own tensors."""
    return shards(tensor) * world.layout.pp / world.size


def square_of(parameters: Iterable[nn.Parameter], world: World) -> Tensor:
    """This process's part of the square of the gradients' norm, such that the sum over all is the whole: what several
    hold counts for each by its share. One flat sum, since torch's own norm refuses gradients of several meshes."""
    squares: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            squares.setdefault(share_of(parameter.grad, world), []).append(local(parameter.grad))
    norms = (
        torch.stack(torch._foreach_norm(held, 2, dtype=torch.float32)).double().square().sum() * share
        for share, held in squares.items()
    )
    return torch.stack(list(norms)).sum()


def place_of(tensor: DTensor) -> tuple[slice, ...]:
    """Where in the whole this process's part lies."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Take this process's part of a whole that every process has."""
    local(tensor).copy_(whole[place_of(tensor)] if is_dtensor(tensor) else whole)
