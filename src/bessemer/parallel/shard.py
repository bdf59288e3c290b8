"""Expert parallel: each process of `dp_shard` holds some of a layer's experts whole, and rows travel to them and back.

Rows come sorted by expert, so that what goes to one process lies together. How many go where is known only once the
router has spoken: the host reads it, once a layer and pass.
Legend: E experts, e those of a process, S rows of this process, W width.

What a process holds of tensors that are divided over a mesh.

A model over the mesh: whole replicas whose gradients are added up, or each divided, layer by layer.

Gradients are sums, never means: a loss is divided by the tokens of the whole step, whoever computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bessemer.dtensor import is_dtensor
from bessemer.model.init import init_weights
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import network
from bessemer.parallel.replicas import Told, add_up_gradients
from bessemer.parallel.world import World
from bessemer.spec.parallel import ParallelSpec, ShardSpec

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
class ExpertExchange:
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
            layer.dispatch = ExpertExchange(mesh.get_group(), mesh.size())
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


if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def lay_over(
    model: Any, world: World, half: bool, asked: ParallelSpec | None = None, roots: Sequence[Any] = ()
) -> Told | None:
    """Divide weights, gradients and moments over the world's mesh, or replicate them, in place; make the optimizer
    after this. With `half`, layers are gathered and computed in bf16 from weights in fp32, and their gradients are
    added up in fp32. `roots` are the stages of a pipeline in this process, instead of the model. What is returned, if
    anything, has to hear the verdict of each step."""
    asked = asked or ParallelSpec()
    if world.mesh is None:
        return None
    if not world.divided:
        return add_up_gradients(model, world, asked.replicas)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = world.mesh["dp_replicate", "dp_shard"] if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    # A pipeline passes through its layers once for each micro-batch: they stay gathered until the step is over.
    how = asked.shard.model_copy(update={"reshard": "never"}) if roots else asked.shard
    for root in roots or (model,):
        shard_weights(root, mesh, policy, how)
    return None


def shard_weights(root: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy, asked: ShardSpec) -> None:
    """FSDP2 over groups of layers, and over the rest. Experts that are divided among processes already stay out."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    reshard = {"auto": None, "always": True, "never": False}[asked.reshard]
    blocks = [block for block in root.blocks if any(True for _ in block.parameters())]
    groups = [blocks[i : i + asked.layers] for i in range(0, len(blocks), asked.layers)]
    apart = set(divided_experts(root))
    for group in groups:
        ours = apart & {parameter for block in group for parameter in block.parameters()}
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ours or None)
    # The head's weight is read after the root's forward pass, by the loss: the root stays gathered until the backward.
    last = None if reshard else reshard
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=last, ignored_params=apart or None)
    if asked.prefetch > 1:  # of one torch takes care itself
        for i, group in enumerate(groups):
            group[0].set_modules_to_forward_prefetch([g[0] for g in groups[i + 1 : i + 1 + asked.prefetch]])
            before = groups[max(0, i - asked.prefetch) : i]
            group[0].set_modules_to_backward_prefetch([g[0] for g in reversed(before)])
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other, and nothing is to be divided


def drop_gathered(model: nn.Module) -> None:
    """Let go of weights that a forward pass without a backward gathered: an update changes only the shards, and the
    next forward pass would read the old ones."""
    for module in model.modules():
        if (reshard := getattr(module, "reshard", None)) is not None:  # FSDP2's, without importing it
            reshard()


def send_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next forward and backward pass adds gradients up among processes: only the last of a step does."""
    if (switch := getattr(model, "set_requires_gradient_sync", None)) is not None:
        switch(now)


def first_weights(model: Any, roots: Sequence[Any], device: torch.device, seed: int, init: str) -> None:
    """Memory and first values for a model that was only laid out. Each process draws what one process would, a layer at
    a time, and keeps its part: no process ever holds the whole."""
    for root in roots or (model,):
        root.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    held = dict(model.named_parameters())
    with torch.device("meta"):
        twin = network(model.shape)
    names = [f"blocks.{i}" for i in range(len(twin.blocks))]
    names += [name for name, _ in twin.named_children() if name != "blocks"]
    for name in names:
        if not any(key.startswith(f"{name}.") for key in held):
            continue
        part = twin.get_submodule(name)
        part.to_empty(device=device)
        init_weights(twin, seed, init, under=f"{name}.")
        for key, parameter in part.named_parameters():
            fill(held.pop(f"{name}.{key}"), parameter)
        part.to("meta")
    for parameter in held.values():  # on the model itself: a bias of the head
        fill(parameter, torch.zeros(parameter.shape, device=device))
