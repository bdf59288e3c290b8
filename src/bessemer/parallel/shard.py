"""Sharded models: FSDP2 layer by layer, expert parallelism, and helpers for sharded tensors. Gradients are sums, never
means: a loss is divided by the tokens of the whole step, whichever rank computed it.

Expert parallelism: each rank of `dp_shard` holds some of a layer's experts, and rows travel to them and back. Rows are
sorted by expert, so those for one rank are contiguous. The host reads the row counts once per layer and pass. Legend: E
experts, e those of a rank, S rows of this rank, P ranks, R received rows, W width.

What each rank holds: bytes of weights, gradients, moments and averages, sharded or not.

Sizes are read from the tensors themselves, so the table shows what a layout really did. A large weight that stayed
unsharded while others were sharded deserves a warning.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bessemer.dtensor import copy_shard, is_dtensor
from bessemer.dtensor import local as local
from bessemer.model.moe import MixtureOfExperts, invert_permutation
from bessemer.model.quantized import is_quantized, stored_bytes
from bessemer.model.transformer import init_weights, make_module
from bessemer.parallel.nf4 import ShardedNF4, without_quantized
from bessemer.parallel.replicas import VerdictHook, replicate_model
from bessemer.parallel.world import World
from bessemer.spec.quantity import human_bytes
from bessemer.spec.schema import ParallelSpec, ShardSpec

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

STACKS = ("gate", "up", "down")


class _AllToAll(torch.autograd.Function):
    """Exchanges rows with every rank of the group; the gradient is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, x_SW: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        rows = x_SW.new_empty(sum(received), *x_SW.shape[1:])
        dist.all_to_all_single(rows, x_SW.contiguous(), received, sent, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(rows, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return rows, None, None, None


@dataclass(frozen=True)
class ExpertExchange:
    """Sends one layer's rows to their experts and back."""

    group: Any
    size: int

    def __call__(self, x_SW: Tensor, counts_E: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sent_Pe = counts_E.view(self.size, -1)
        received_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(received_Pe, sent_Pe.contiguous(), group=self.group)
        sent, received = torch.stack((sent_Pe.sum(1), received_Pe.sum(1))).tolist()
        x_RW: Tensor = _AllToAll.apply(x_SW, sent, received, self.group)
        # Rows arrive sorted by sender, then expert; group them by expert.
        expert_e = torch.arange(received_Pe.shape[1], device=x_SW.device).repeat(self.size)
        order_R = expert_e.repeat_interleave(received_Pe.flatten()).argsort(stable=True)
        y_RW = run(x_RW[order_R], received_Pe.sum(0))
        y_SW: Tensor = _AllToAll.apply(y_RW[invert_permutation(order_R)], received, sent, self.group)
        return y_SW


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts over the mesh, in place."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.dispatch = ExpertExchange(mesh.get_group(), mesh.size())
            for name in STACKS:
                if (stack := getattr(layer, name)) is not None:
                    sharded = distribute_tensor(stack.data, mesh, (Shard(0),), src_data_rank=None)
                    setattr(layer, name, nn.Parameter(sharded))


def sharded_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights that no other rank of the replica holds: they are neither gathered nor reduced within it."""
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts) and layer.dispatch is not None:
            yield from (stack for name in STACKS if (stack := getattr(layer, name)) is not None)


def reduce_expert_gradients(model: nn.Module, world: World) -> None:
    """Sum the gradients of sharded experts over replicas, before anything reads them."""
    if world.layout.ep == 1 or world.layout.dp_replicate == 1:
        return
    group = world.group("dp_replicate")
    pending = [
        dist.all_reduce(local(stack.grad), group=group, async_op=True)
        for stack in sharded_experts(model)
        if stack.grad is not None
    ]
    for work in pending:
        work.wait()


def shards(tensor: Tensor) -> int:
    """The number of shards of a tensor."""
    if isinstance(tensor, ShardedNF4):
        return tensor.ranks
    count = 1
    if is_dtensor(tensor):
        for dimension, placement in enumerate(tensor.placements):
            count *= 1 if placement.is_replicate() else tensor.device_mesh.size(dimension)
    return count


def replica_share(tensor: Tensor, world: World) -> float:
    """One over the number of ranks that hold the same shard; each pipeline stage has its own tensors."""
    return shards(tensor) * world.layout.pp / world.size


def squared_grad_norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:
    """This rank's share of the squared gradient norm; the sum over all ranks is the total, since shards that several
    ranks hold are weighted by their share. Summed by hand: torch's norm rejects gradients of several meshes."""
    squares: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            squares.setdefault(replica_share(parameter.grad, world), []).append(local(parameter.grad))
    norms = [
        torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).double().square().sum() * share
        for share, gradients in squares.items()
    ]
    return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64, device=world.device)


def shard_or_replicate(
    model: Any, world: World, half: bool, spec: ParallelSpec | None = None, roots: Sequence[Any] = ()
) -> VerdictHook | None:
    """Shard weights, gradients and moments over the mesh, or replicate them, in place; build the optimizer afterwards.
    With `half`, layers are gathered and computed in bf16 from fp32 weights, and gradients are reduced in fp32. `roots`
    are this rank's pipeline stages, instead of the model. Returns a hook for each step's verdict, if one is needed."""
    spec = spec or ParallelSpec()
    if world.mesh is None:
        return None
    if not world.divided:
        return replicate_model(model, world, spec.replicas)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = world.mesh["dp_replicate", "dp_shard"] if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    # A pipeline runs its layers once per micro-batch: they stay gathered until the end of the step.
    shard_spec = spec.shard.model_copy(update={"reshard": "never"}) if roots else spec.shard
    for root in roots or (model,):
        shard_weights(root, mesh, policy, shard_spec)
    return None


def shard_weights(root: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy, spec: ShardSpec) -> None:
    """FSDP2 over groups of layers, and over the rest. Experts and weights in NF4 are sharded already."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    reshard = {"auto": None, "always": True, "never": False}[spec.reshard]
    blocks = [block for block in root.blocks if any(True for _ in block.parameters())]
    groups = [blocks[i : i + spec.layers] for i in range(0, len(blocks), spec.layers)]
    excluded = {*sharded_experts(root), *filter(is_quantized, root.parameters())}
    for group in groups:
        ignored = excluded & {parameter for block in group for parameter in block.parameters()}
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored or None)
    # The loss reads the head's weight after the root's forward pass: the root stays gathered until the backward pass.
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=excluded or None)
    if spec.prefetch > 1:  # torch itself prefetches one
        for i, group in enumerate(groups):
            group[0].set_modules_to_forward_prefetch([g[0] for g in groups[i + 1 : i + 1 + spec.prefetch]])
            before = groups[max(0, i - spec.prefetch) : i]
            group[0].set_modules_to_backward_prefetch([g[0] for g in reversed(before)])
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums, and nothing is averaged


def free_gathered_weights(model: nn.Module) -> None:
    """Free weights that a forward pass without a backward pass gathered: an update changes only the shards, and the
    next forward pass would use stale weights."""
    for module in model.modules():
        if (reshard := getattr(module, "reshard", None)) is not None:  # FSDP2's, without importing it
            reshard()


def set_gradient_sync(model: nn.Module, now: bool) -> None:
    """Whether the next forward and backward pass reduces gradients over ranks: only the last one of a step does."""
    if (set_sync := getattr(model, "set_requires_gradient_sync", None)) is not None:
        set_sync(now)


def init_sharded_weights(model: Any, roots: Sequence[Any], device: torch.device, seed: int, init: str) -> None:
    """Allocate and initialise a model that is on the meta device. Each rank draws the same values as a single process,
    a layer at a time, and keeps its shard: no rank ever holds the full model."""
    with without_quantized(model):
        for root in roots or (model,):
            root.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    unfilled = {name: parameter for name, parameter in model.named_parameters() if not is_quantized(parameter)}
    with torch.device("meta"):
        twin = make_module(model.shape)
    names = [f"blocks.{i}" for i in range(len(twin.blocks))]
    names += [name for name, _ in twin.named_children() if name != "blocks"]
    for name in names:
        if not any(key.startswith(f"{name}.") for key in unfilled):
            continue
        part = twin.get_submodule(name)
        part.to_empty(device=device)
        init_weights(twin, seed, init, under=f"{name}.")
        for key, parameter in part.named_parameters():
            if (target := unfilled.pop(f"{name}.{key}", None)) is not None:
                copy_shard(target, parameter)
        part.to("meta")
    for parameter in unfilled.values():  # of the model itself: the head's bias
        copy_shard(parameter, torch.zeros(parameter.shape, device=device))


# Warn from 1 MiB and a twentieth of a rank's weights on: gradients and moments are too large by as much. Norms, which
# stay unsharded by design, are far smaller in real models.
MIN_BYTES, MIN_SHARE = 1 << 20, 0.05


@dataclass
class Amount:
    """Tensors of one rank."""

    tensors: int = 0
    numbers: int = 0
    bytes: int = 0

    def add(self, tensor: Tensor) -> None:
        shard = local(tensor)
        self.tensors += 1
        self.numbers += shard.numel()
        self.bytes += stored_bytes(shard)


@dataclass
class MemoryKind:
    """Weights, gradients, moments or averages of one rank: shards, and full tensors."""

    divided: Amount = field(default_factory=Amount)
    whole: Amount = field(default_factory=Amount)

    @property
    def bytes(self) -> int:
        return self.divided.bytes + self.whole.bytes

    def add(self, tensor: Tensor, divided: bool = False) -> None:
        (self.divided if divided or shards(tensor) > 1 else self.whole).add(tensor)


@dataclass
class RankMemory:
    """One rank. `left_whole` lists large weights that are sharded less than others."""

    rank: int
    host: str
    weights: MemoryKind = field(default_factory=MemoryKind)
    gradients: MemoryKind = field(default_factory=MemoryKind)
    moments: MemoryKind = field(default_factory=MemoryKind)
    averages: MemoryKind = field(default_factory=MemoryKind)
    left_whole: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in (self.weights, self.gradients, self.moments, self.averages))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bytes": self.bytes}


def local_rank_memory(
    world: World, named: Iterable[tuple[str, nn.Parameter]], moments: Mapping[str, Tensor],
    averages: Mapping[str, Tensor] | None = None,
) -> RankMemory:  # fmt: skip
    """This rank's memory. Gradients are counted for trainable weights, in the weights' dtype."""
    memory = RankMemory(world.rank, socket.gethostname())
    pairs = list(named)
    trained = [name for name, parameter in pairs if parameter.requires_grad]
    for _, parameter in pairs:
        memory.weights.add(parameter)
        if parameter.requires_grad:
            memory.gradients.add(parameter)
    optimized = {key.rpartition(".")[0] for key in moments}
    zero1 = 0 < len(optimized) < len(trained)  # full tensors of some of the parameters
    for tensor in moments.values():
        memory.moments.add(tensor, zero1)
    for tensor in (averages or {}).values():
        memory.averages.add(tensor)
    memory.left_whole = left_whole(pairs, memory.weights.bytes)
    return memory


def left_whole(named: Iterable[tuple[str, nn.Parameter]], weight_bytes: int) -> list[str]:
    """Descriptions of large weights that are sharded less than others."""
    pairs = list(named)
    most = max((shards(parameter) for _, parameter in pairs), default=1)
    warnings = []
    for name, parameter in pairs:
        parts, size = shards(parameter), local(parameter).nbytes
        if parts < most and size >= max(MIN_BYTES, MIN_SHARE * weight_bytes):
            split = f"{parts} shards" if parts > 1 else "one piece"
            share = f"{human_bytes(size)}, {size / weight_bytes:.0%} of a rank's weights"
            warnings.append(f"{name} ({share}) stays in {split} while others are in {most}")
    return warnings


def gather_rank_memory(world: World, memory: RankMemory) -> list[dict[str, Any]]:
    """All ranks' memory, in rank order, on every rank."""
    return world.gather(memory.to_json())
