"""A model over the mesh: whole replicas whose gradients are added up, or each divided, layer by layer.

Gradients are sums, never means: a loss is divided by the tokens of the whole step, whoever computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bessemer.model.init import init_weights
from bessemer.model.transformer import network
from bessemer.parallel.experts import divided_experts
from bessemer.parallel.parts import fill
from bessemer.parallel.replicas import Told, add_up_gradients
from bessemer.parallel.world import World
from bessemer.spec.parallel import ParallelSpec, ShardSpec

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
