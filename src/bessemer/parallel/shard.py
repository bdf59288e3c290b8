"""A model over the mesh: whole replicas whose gradients are added up, or each divided, layer by layer.

Gradients are sums, never means: a loss is divided by the tokens of the whole step, whoever computed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bessemer.parallel.world import World


def lay_over(model: Any, world: World, half: bool) -> None:
    """Lay the model over the world's mesh, in place; make the optimizer after this. With `half`, layers are gathered
    and computed in bf16 from weights in fp32, and their gradients are added up in fp32."""
    if world.size == 1:
        return
    assert world.mesh is not None
    if world.layout.dp_shard == 1:
        replicate(model, device_mesh=world.mesh["dp_replicate"])
        model.register_comm_hook(world.mesh["dp_replicate"].get_group(), _add_up)
        return
    mesh = world.mesh if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other, and nothing is to be divided


def send_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next forward and backward pass adds gradients up among processes: only the last of a step does."""
    if (switch := getattr(model, "set_requires_gradient_sync", None)) is not None:
        switch(now)


def _add_up(group, bucket):  # type: ignore[no-untyped-def]
    """Without annotations: DDP reads them, and refuses those that are text."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards(tensor: Tensor) -> int:
    """Into how many parts it is divided."""
    count = 1
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            count *= tensor.device_mesh.size(dimension) if placement.is_shard() else 1
    return count


def square_of(parameters: Iterable[nn.Parameter], size: int) -> Tensor:
    """This process's part of the square of the gradients' norm, such that the sum over all is the whole: what several
    hold counts for each by its share. One flat sum, since torch's own norm refuses gradients of several meshes."""
    squares: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            squares.setdefault(shards(parameter.grad), []).append(local(parameter.grad))
    norms = (
        torch.stack(torch._foreach_norm(held, 2, dtype=torch.float32)).double().square().sum() * (parts / size)
        for parts, held in squares.items()
    )
    return torch.stack(list(norms)).sum()
