"""Tensor parallelism: the matrices of a layer are sharded over the mesh's `tp` ranks, by heads and inner units,
column-wise into a branch and row-wise out of it. With `sequence`, activations in between are sharded along the row:
norms work on shards, and an all-gather before and a reduce-scatter after the matrices replace the all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bessemer.model.transformer import TransformerBlock
from bessemer.spec.shape import ModelShape

COLUMNS = Shard(1)  # of (B, T, W)


class GatheredNorm(SequenceParallel):
    """A norm over sequence shards whose output is gathered for the matrices after it."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh) -> Any:
        return outputs.redistribute(placements=(Replicate(),))


class Replicated(ParallelStyle):
    """The same on every rank, on the same input. Its weights become replicated DTensors, so that all weights of a model
    are on one mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                replicated = DTensor.from_local(parameter.data, mesh, (Replicate(),), run_check=False)
                module.register_parameter(key, nn.Parameter(replicated, requires_grad=parameter.requires_grad))

        def wrap_inputs(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
                if isinstance(x, Tensor) and not isinstance(x, DTensor) else x for x in inputs
            )  # fmt: skip

        def unwrap_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, replicate, wrap_inputs, unwrap_output)


def uses_sequence_parallel(shape: ModelShape, requested: bool) -> bool:
    """Whether sequence parallelism applies: each branch must start with a norm, where activations are gathered."""
    return requested and shape.norm_place in ("pre", "sandwich")


def shards_vocab(shape: ModelShape, tp: int) -> bool:
    """Whether embedding and head are sharded by vocabulary; one that is not divisible stays unsharded."""
    return tp > 1 and shape.vocab % tp == 0


def shards_head(shape: ModelShape, tp: int) -> bool:
    """Whether the head is sharded by vocabulary too: a head of classes is small and stays unsharded."""
    return shards_vocab(shape, tp) and not shape.labels


def parallelize_tensors(model: Any, mesh: DeviceMesh, sequence: bool) -> None:
    """Parallelize a decoder in place; activations enter and leave as plain tensors. A pipeline stage lacks some
    modules."""
    shape, tp = model.shape, mesh.size()
    sequence = uses_sequence_parallel(shape, sequence)
    plan: dict[str, ParallelStyle] = {}
    shard_vocab = shards_vocab(shape, tp)
    for name, module in model.named_children():
        if name == "embedding" and shard_vocab:
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif name == "norm":
            plan[name] = GatheredNorm() if sequence else Replicated()
        elif name not in ("blocks", "head") and any(True for _ in module.parameters()):
            plan[name] = Replicated()
    parallelize_module(model, mesh, plan)
    for i, block in enumerate(model.blocks):
        if not isinstance(block, TransformerBlock):  # on another stage
            continue
        _parallelize_block(block, mesh, sequence)
        if i == 0 and sequence:
            scatter = PrepareModuleInput(
                input_layouts=(Replicate(), None, None), desired_input_layouts=(COLUMNS, None, None),
                use_local_output=True,
            )  # fmt: skip
            parallelize_module(block, mesh, scatter)
    head, placement = getattr(model, "head", None), Shard(0) if shards_head(shape, tp) else Replicate()
    if head is not None:
        _shard_parameters(head, mesh, placement)
    if getattr(model, "head_bias", None) is not None:
        _shard_parameters(model, mesh, placement, only="head_bias")


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, placement: Any, only: str | None = None) -> None:
    """Shard parameters that the loss multiplies by itself."""
    from torch.distributed.tensor import distribute_tensor

    for key, parameter in list(module.named_parameters(recurse=False)):
        if only in (None, key):
            sharded = distribute_tensor(parameter.data, mesh, (placement,), src_data_rank=None)
            module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _parallelize_block(block: TransformerBlock, mesh: DeviceMesh, sequence: bool) -> None:
    """Norms before a branch gather; norms after it work on the scattered branch output."""
    output = RowwiseParallel(output_layouts=COLUMNS if sequence else Replicate())
    before = GatheredNorm() if sequence else Replicated()
    after = SequenceParallel(use_local_output=True) if sequence else Replicated()
    head_norms = SequenceParallel(sequence_dim=2, use_local_output=True)  # (B, T, N, D)
    styles: dict[str, ParallelStyle] = {
        "attention_norm": before, "ffn_norm": before, "attention_out_norm": after, "ffn_out_norm": after,
        "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
        "attention.query_norm": head_norms, "attention.key_norm": head_norms, "attention.out": output,
        "ffn.gate": ColwiseParallel(), "ffn.up": ColwiseParallel(), "ffn.down": output,
    }  # fmt: skip
    present = {name for name, _ in block.named_modules()}
    parallelize_module(block, mesh, {name: style for name, style in styles.items() if name in present})


def replicate_hidden(hidden: Tensor, mesh: DeviceMesh, shard_vocab: bool) -> Tensor:
    """The head's input as a plain tensor. If the vocabulary is sharded, each rank's gradient is a partial sum."""
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)
    return hidden.to_local(grad_placements=(Partial(),) if shard_vocab else None)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        ctx.size, ctx.start = part.shape[-1], dist.get_rank(group) * part.shape[-1]
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[..., ctx.start : ctx.start + ctx.size], None


def gather_logits(part: Tensor, group: Any) -> Tensor:
    """All logits from every rank's part of the vocabulary. All ranks must compute the same loss from them: the
    gradient of a part is its columns of that loss's gradient."""
    gathered: Tensor = _GatherColumns.apply(part, group)  # type: ignore[no-untyped-call]
    return gathered
