"""Replicated models (DDP): how replicas sum their gradients, and how they may share the optimizer state (ZeRO-1).

Gradients are sums, never means. They may be sent in bf16 or as low-rank approximations (PowerSGD); both change the
losses. ZeRO-1 does not: each replica holds the moments of some parameters, updates those and broadcasts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.quantized import is_quantized
from bessemer.optim.choose import freeze, lr_scales, make_optimizer
from bessemer.optim.guarded import GuardedOptimizer
from bessemer.optim.low_memory import to_low_precision
from bessemer.parallel.world import World
from bessemer.spec.schema import ReplicasSpec, RunSpec


class Fp32Reduce:
    """Sums bf16 gradients over a group in fp32, which DDP's buckets do not support: each gradient is sent as soon as it
    is ready, and the backward pass ends when all have arrived. All ranks run the same graph and so send in the same
    order."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.group, self.sync = group, True
        self.pending: list[tuple[Tensor, Tensor, Any]] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reduce)
        model.set_requires_gradient_sync = self.set_sync  # type: ignore[assignment]

    def set_sync(self, sync: bool) -> None:
        """Whether the next backward pass sends; see `shard.send_gradients`."""
        self.sync = sync

    @torch.no_grad()
    def _reduce(self, parameter: Tensor) -> None:
        if not self.sync or parameter.grad is None:
            return
        if not self.pending:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]
        fp32 = parameter.grad.float()  # no copy if it is fp32 already
        self.pending.append((parameter.grad, fp32, dist.all_reduce(fp32, group=self.group, async_op=True)))

    @torch.no_grad()
    def _finish(self) -> None:
        for gradient, fp32, work in self.pending:
            work.wait()
            if fp32 is not gradient:
                gradient.copy_(fp32)
        self.pending = []


EXACT_STEPS = 3  # before PowerSGD starts: earlier DDP still changes its buckets, and sizes would not match
BROADCAST_BYTES = 64 << 20  # of weights per broadcast
VerdictHook = Callable[[Tensor], None]  # called with the verdict of each step


def replicate_model(model: Any, world: World, spec: ReplicasSpec) -> VerdictHook | None:
    """Make `model` one of the replicas, in place. Returns a hook for each step's verdict, if one is needed."""
    assert world.mesh is not None
    mesh = world.mesh["dp_replicate"]
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        if spec.compress != "none":
            raise UserError(
                f"parallel.replicas.compress: {spec.compress} does not support bf16 weights: write none, or "
                "memory.weights: fp32"
            )
        Fp32Reduce(model, mesh.get_group())
        return None
    from torch.distributed._composable.replicate import replicate

    # Every rank reads the same files: DDP need not broadcast weights, and cannot if they are quantized.
    plain = not any(map(is_quantized, model.parameters()))
    replicate(model, device_mesh=mesh, bucket_cap_mb=spec.bucket_mb, static_graph=spec.static_graph, init_sync=plain)
    if spec.compress == "powersgd":
        power_sgd = PowerSgd(mesh.get_group(), spec.rank)
        model.register_comm_hook(power_sgd, _sum_power_sgd)
        return power_sgd.after_step
    model.register_comm_hook(mesh.get_group(), _sum_bf16 if spec.compress == "bf16" else _sum)
    return None


# The hooks have no annotations: DDP inspects them and rejects strings.


def _sum(group, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda done: _finished(done, buffer))


def _sum_bf16(group, bucket):  # type: ignore[no-untyped-def]
    """Like torch's own hook, which averages, and which DDP rejects by name without NCCL."""
    buffer = bucket.buffer()
    rounded = buffer.to(torch.bfloat16)
    work = dist.all_reduce(rounded, group=group, async_op=True)
    return work.get_future().then(lambda done: buffer.copy_(_finished(done, rounded)))


def _finished(done: Any, tensor: Tensor) -> Tensor:
    """The tensor that was reduced in place; raises the error of the reduction. Some groups' futures carry no value."""
    done.value()
    return tensor


def _sum_power_sgd(power_sgd, bucket):  # type: ignore[no-untyped-def]
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    # A replayed step gets no verdict.
    power_sgd.reset(bucket.index(), lambda memory: ~memory.isfinite().all())
    size = power_sgd.state.process_group.size()
    return powerSGD_hook(power_sgd.state, bucket).then(lambda done: done.value().mul_(size))  # the hook averages


class PowerSgd:
    """PowerSGD's memory: the approximation error of the last gradients, to be added to the next, and the directions
    that the next approximation starts from. A rejected step must leave nothing in it, or NaN would persist."""

    def __init__(self, group: Any, rank: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=EXACT_STEPS)
        self._initial: dict[int, Tensor] = {}

    def after_step(self, reject: Tensor) -> None:
        """Reset the memory after a rejected step."""
        for index in self.state.q_memory_dict:
            self.reset(index, lambda memory: reject.bool())

    @torch.no_grad()
    def reset(self, index: int, when: Callable[[Tensor], Tensor]) -> None:
        """Reset the memory of a bucket if `when` is true on the device, without the host."""
        errors, directions = self.state.error_dict.get(index), self.state.q_memory_dict.get(index)
        if errors is None or directions is None:
            return
        if index not in self._initial:  # equal on all ranks, like the directions
            noise = torch.randn(directions.shape, generator=torch.Generator().manual_seed(index))
            self._initial[index] = noise.to(directions)
        errors.masked_fill_(when(errors), 0.0)
        torch.where(when(directions), self._initial[index], directions, out=directions)


def zero1_optimizer(model: nn.Module, spec: RunSpec, world: World) -> GuardedOptimizer:
    """Like `optim.choose.optimizer_for`, with the state of this replica's share of the parameters only (ZeRO-1). After
    every step, also a rejected one, each replica broadcasts its share: no host reads the verdict."""
    assert world.mesh is not None
    freeze(model, spec.optimizer.freeze)
    if spec.memory.kept != "fp32":
        to_low_precision(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    mesh = world.mesh["dp_replicate"]
    owners = assign_owners([parameter.numel() for _, parameter in named], mesh.size())
    local_pairs = [pair for pair, owner in zip(named, owners, strict=True) if owner == mesh.get_local_rank()]
    if len(set(owners)) < mesh.size():
        raise UserError(
            f"parallel.replicas.divide_optimizer: {len(named)} tensors are too few for {mesh.size()} replicas: "
            "write false"
        )
    local_optimizer = make_optimizer(local_pairs, spec.optimizer, lr_scales(model, spec), spec.memory, spec.seed)
    guarded = GuardedOptimizer(named, local_optimizer.optimizers, local_optimizer.path, local_optimizer.fallback_reason)
    shares = [
        [parameter.detach() for (_, parameter), owner in zip(named, owners, strict=True) if owner == rank]
        for rank in range(mesh.size())
    ]

    def broadcast_weights(reject: Tensor) -> None:
        for owner, share in enumerate(shares):
            dist._broadcast_coalesced(mesh.get_group(), share, BROADCAST_BYTES, owner)

    guarded.post_step_hooks.append(broadcast_weights)
    return guarded


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each tensor: the largest first, to the rank with the smallest total. Totals differ by at most one
    tensor."""
    totals, owners = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner = totals.index(min(totals))
        owners[index] = owner
        totals[owner] += sizes[index]
    return owners
