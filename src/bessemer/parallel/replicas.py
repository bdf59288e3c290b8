"""Replicas whose weights are kept in bf16 and whose gradients add up in fp32. DDP's buckets have the type of the
weights, and refuse any other: here each gradient is sent as soon as it is known, in fp32, and the backward pass ends
when all of them have arrived.

Whole replicas of a model: how they add up their gradients, and how they may share out an optimizer's state.

Gradients are sums, never means. What is sent may be rounded to bf16 or approximated by matrices of low rank (PowerSGD):
both change the losses. An optimizer that is divided (ZeRO-1) does not: each replica keeps the moments of some of the
parameters, whole ones, steps those and sends them round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.optim.choose import freeze, lr_scales, make_optimizer
from bessemer.optim.guarded import GuardedOptimizer
from bessemer.optim.low_memory import to_low_precision
from bessemer.parallel.world import World
from bessemer.spec.parallel import ReplicasSpec
from bessemer.spec.schema import RunSpec


class Fp32Reduce:
    """Adds up the gradients of a model over a group. All processes run the same graph, and so send in one order."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.group, self.now = group, True
        self.under_way: list[tuple[Tensor, Tensor, Any]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)
        model.set_requires_gradient_sync = self.switch  # type: ignore[assignment]

    def switch(self, now: bool) -> None:
        """Whether the next backward pass sends; see `shard.send_gradients`."""
        self.now = now

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self.now or parameter.grad is None:
            return
        if not self.under_way:
            torch.autograd.Variable._execution_engine.queue_callback(self._arrive)  # type: ignore[attr-defined]
        wide = parameter.grad.float()  # itself, where it is fp32 already
        self.under_way.append((parameter.grad, wide, dist.all_reduce(wide, group=self.group, async_op=True)))

    @torch.no_grad()
    def _arrive(self) -> None:
        for gradient, wide, work in self.under_way:
            work.wait()
            if wide is not gradient:
                gradient.copy_(wide)
        self.under_way = []


EXACT_STEPS = 3  # before PowerSGD: with fewer, DDP has not yet settled on its buckets, and sizes do not match
ROUND = 64 << 20  # bytes of weights that are sent round together
Told = Callable[[Tensor], None]  # is given the verdict of a step


def add_up_gradients(model: Any, world: World, asked: ReplicasSpec) -> Told | None:
    """Make `model` one of the replicas, in place. Where something has to hear each step's verdict, that is returned."""
    assert world.mesh is not None
    mesh = world.mesh["dp_replicate"]
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        if asked.compress != "none":
            raise UserError(
                f"parallel.replicas.compress: {asked.compress}: memory.weights keeps bf16: write none, or fp32"
            )
        Fp32Reduce(model, mesh.get_group())
        return None
    from torch.distributed._composable.replicate import replicate

    replicate(model, device_mesh=mesh, bucket_cap_mb=asked.bucket_mb, static_graph=asked.static_graph)
    if asked.compress == "powersgd":
        low_rank = LowRank(mesh.get_group(), asked.rank)
        model.register_comm_hook(low_rank, _add_up_low_rank)
        return low_rank.judged
    model.register_comm_hook(mesh.get_group(), _add_up_bf16 if asked.compress == "bf16" else _add_up)
    return None


# The hooks have no annotations: DDP reads them, and refuses those that are text.


def _add_up(group, bucket):  # type: ignore[no-untyped-def]
    whole = bucket.buffer()
    work = dist.all_reduce(whole, group=group, async_op=True)
    return work.get_future().then(lambda done: _once(done, whole))


def _add_up_bf16(group, bucket):  # type: ignore[no-untyped-def]
    """As torch's own hook, which divides, and which DDP refuses by its name wherever there is no NCCL."""
    whole = bucket.buffer()
    rounded = whole.to(torch.bfloat16)
    work = dist.all_reduce(rounded, group=group, async_op=True)
    return work.get_future().then(lambda done: whole.copy_(_once(done, rounded)))


def _once(done: Any, tensor: Tensor) -> Tensor:
    """The tensor that was worked on in place; raises what went wrong. Some groups say no more than that it is done."""
    done.value()
    return tensor


def _add_up_low_rank(low_rank, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    # What a replayed step leaves behind is never judged.
    low_rank.forget(bucket.index(), lambda remembered: ~remembered.isfinite().all())
    size = low_rank.state.process_group.size()
    return powerSGD_hook(low_rank.state, bucket).then(lambda done: done.value().mul_(size))  # of a mean


class LowRank:
    """PowerSGD's memory: what was left out of the last gradients, to be added to the next, and the directions that the
    next approximation starts from. Nothing of a vetoed step may stay in it, or NaN would for ever."""

    def __init__(self, group: Any, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS)
        self._fresh: dict[int, Tensor] = {}

    def judged(self, reject: Tensor) -> None:
        """After a step: what a rejected one left behind is forgotten."""
        for index in self.state.q_memory_dict:
            self.forget(index, lambda remembered: reject.bool())

    @torch.no_grad()
    def forget(self, index: int, when: Callable[[Tensor], Tensor]) -> None:
        """What is remembered of a bucket, if `when` says so on the device: nothing waits for the host."""
        left_out, directions = self.state.error_dict.get(index), self.state.q_memory_dict.get(index)
        if left_out is None or directions is None:
            return
        if index not in self._fresh:  # the same everywhere, as the directions are
            noise = torch.randn(directions.shape, generator=torch.Generator().manual_seed(index))
            self._fresh[index] = noise.to(directions)
        left_out.masked_fill_(when(left_out), 0.0)
        torch.where(when(directions), self._fresh[index], directions, out=directions)


def optimizer_of_replicas(model: nn.Module, spec: RunSpec, world: World) -> GuardedOptimizer:
    """As `optim.choose.optimizer_for`, with the state of this replica's share of the parameters alone. After a step
    each sends its share round, also after a vetoed one: nobody reads the verdict on the host."""
    assert world.mesh is not None
    freeze(model, spec.optimizer.freeze)
    if spec.memory.kept != "fp32":
        to_low_precision(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    mesh = world.mesh["dp_replicate"]
    owners = share_out([parameter.numel() for _, parameter in named], mesh.size())
    mine = [pair for pair, owner in zip(named, owners, strict=True) if owner == mesh.get_local_rank()]
    if len(set(owners)) < mesh.size():
        raise UserError(
            f"parallel.replicas.divide_optimizer: {len(named)} tensors cannot be shared out among {mesh.size()} "
            "replicas: write false"
        )
    held = make_optimizer(mine, spec.optimizer, lr_scales(model, spec), spec.memory, spec.seed)
    guarded = GuardedOptimizer(named, held.optimizers, held.path, held.fallback_reason)
    shares = [
        [parameter.detach() for (_, parameter), owner in zip(named, owners, strict=True) if owner == each]
        for each in range(mesh.size())
    ]

    def send_round(reject: Tensor) -> None:
        for owner, share in enumerate(shares):
            dist._broadcast_coalesced(mesh.get_group(), share, ROUND, owner)

    guarded.afterwards.append(send_round)
    return guarded


def share_out(sizes: Sequence[int], among: int) -> list[int]:
    """To whom each goes, the largest first and always to who has least: at most one tensor's size apart."""
    held, owners = [0] * among, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = held.index(min(held))
        owners[index] = owner
        held[owner] += sizes[index]
    return owners
