"""Expert parallel: each process of `dp_shard` holds some of a layer's experts whole, and rows travel to them and back.

Rows come sorted by expert, so that what goes to one process lies together. How many go where is known only once the
router has spoken: the host reads it, once a layer and pass.
Legend: E experts, e those of a process, S rows of this process, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bessemer.model.moe import MixtureOfExperts
from bessemer.parallel.parts import local
from bessemer.parallel.world import World

STACKS = ("gate", "up", "down")


class _Travel(torch.autograd.Function):
    """Rows to and from every process of the group; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x_SW: Tensor, sent: list[int], taken: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.taken, ctx.group = sent, taken, group
        found = x_SW.new_empty(sum(taken), *x_SW.shape[1:])
        dist.all_to_all_single(found, x_SW.contiguous(), taken, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(found, grad.contiguous(), ctx.sent, ctx.taken, group=ctx.group)
        return found, None, None, None


@dataclass(frozen=True)
class Sending:
    """How one layer's rows find their experts."""

    group: Any
    size: int

    def __call__(self, x_SW: Tensor, counts_E: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sent_Pe = counts_E.view(self.size, -1)
        taken_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(taken_Pe, sent_Pe.contiguous(), group=self.group)
        sent, taken = torch.stack((sent_Pe.sum(1), taken_Pe.sum(1))).tolist()
        x_RW: Tensor = _Travel.apply(x_SW, sent, taken, self.group)
        # They come sorted by sender, then expert; experts want theirs together.
        expert_e = torch.arange(taken_Pe.shape[1], device=x_SW.device).repeat(self.size)
        order_R = expert_e.repeat_interleave(taken_Pe.flatten()).argsort(stable=True)
        y_RW = run(x_RW[order_R], taken_Pe.sum(0))
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=x_SW.device))
        y_SW: Tensor = _Travel.apply(y_RW[back_R], taken, sent, self.group)
        return y_SW


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each process of the mesh its experts, in place."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.dispatch = Sending(mesh.get_group(), mesh.size())
            for name in STACKS:
                if (stack := getattr(layer, name)) is not None:
                    divided = distribute_tensor(stack.data, mesh, (Shard(0),), src_data_rank=None)
                    setattr(layer, name, nn.Parameter(divided))


def divided_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights that no other process of their replica has: nothing is gathered or added up within it."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts) and layer.dispatch is not None:
            yield from (stack for name in STACKS if (stack := getattr(layer, name)) is not None)


def add_up_experts(model: nn.Module, world: World) -> None:
    """Add up the gradients of divided experts among replicas, before anybody looks at them."""
    if world.layout.ep == 1 or world.layout.dp_replicate == 1:
        return
    group = world.group("dp_replicate")
    waits = [
        dist.all_reduce(local(stack.grad), group=group, async_op=True)
        for stack in divided_experts(model)
        if stack.grad is not None
    ]
    for wait in waits:
        wait.wait()
