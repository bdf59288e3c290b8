"""Tensor parallel: every matrix of a layer is divided among the processes of the mesh's `tp`, heads and inner units
first along the way in, then along the way out. With `sequence`, what lies between is divided along the row: norms work
on their part, and a gather before a matrix and a scattered sum after it take the place of one sum of everything.
"""

from __future__ import annotations

from typing import Any

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

from bessemer.model.block import TransformerBlock
from bessemer.spec.shape import ModelShape

COLUMNS = Shard(1)  # of (B, T, W)


class Gathered(SequenceParallel):
    """A norm over parts of rows, whose result is then whole everywhere: what the matrices behind it read."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh) -> Any:
        return outputs.redistribute(placements=(Replicate(),))


class Whole(ParallelStyle):
    """The same on every process, on the same input: its weights are noted as such, so that all weights of a model lie
    on one mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def note(name: str, held: nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in held.named_parameters(recurse=False):
                whole = DTensor.from_local(parameter.data, mesh, (Replicate(),), run_check=False)
                held.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def enter(held: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
                if isinstance(x, Tensor) and not isinstance(x, DTensor) else x for x in inputs
            )  # fmt: skip

        def leave(held: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, note, enter, leave)


def sequential(shape: ModelShape, asked: bool) -> bool:
    """Whether rows are divided between the matrices: each branch must begin with a norm, where they are gathered."""
    return asked and shape.norm_place in ("pre", "sandwich")


def divides_words(shape: ModelShape, tp: int) -> bool:
    """Whether embeddings and head are divided by words; an odd vocabulary stays whole."""
    return tp > 1 and shape.vocab % tp == 0


def divide_tensors(model: Any, mesh: DeviceMesh, sequence: bool) -> None:
    """Divide a decoder in place; activations go in and come out as plain tensors. A stage of a pipeline lacks some."""
    shape, tp = model.shape, mesh.size()
    sequence = sequential(shape, sequence)
    plan: dict[str, ParallelStyle] = {}
    words = divides_words(shape, tp)
    for name, module in model.named_children():
        if name == "embedding" and words:
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif name == "norm":
            plan[name] = Gathered() if sequence else Whole()
        elif name not in ("blocks", "head") and any(True for _ in module.parameters()):
            plan[name] = Whole()
    parallelize_module(model, mesh, plan)
    for i, block in enumerate(model.blocks):
        if not isinstance(block, TransformerBlock):  # held by another stage
            continue
        _divide_block(block, mesh, sequence)
        if i == 0 and sequence:
            scatter = PrepareModuleInput(
                input_layouts=(Replicate(), None, None), desired_input_layouts=(COLUMNS, None, None),
                use_local_output=True,
            )  # fmt: skip
            parallelize_module(block, mesh, scatter)
    head = getattr(model, "head", None)
    if head is not None:
        _note(head, mesh, Shard(0) if words else Replicate())
    if getattr(model, "head_bias", None) is not None:
        _note(model, mesh, Shard(0) if words else Replicate(), only="head_bias")


def _note(module: nn.Module, mesh: DeviceMesh, placement: Any, only: str | None = None) -> None:
    """Divide parameters whose products the loss makes itself."""
    from torch.distributed.tensor import distribute_tensor

    for key, parameter in list(module.named_parameters(recurse=False)):
        if only in (None, key):
            divided = distribute_tensor(parameter.data, mesh, (placement,), src_data_rank=None)
            module.register_parameter(key, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _divide_block(block: TransformerBlock, mesh: DeviceMesh, sequence: bool) -> None:
    """Norms that stand before a branch gather; those behind work on what the branch adds, which is scattered."""
    leaves = RowwiseParallel(output_layouts=COLUMNS if sequence else Replicate())
    before = Gathered() if sequence else Whole()
    after = SequenceParallel(use_local_output=True) if sequence else Whole()
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)  # norms of each head: (B, T, N, D)
    styles: dict[str, ParallelStyle] = {
        "attention_norm": before, "ffn_norm": before, "attention_out_norm": after, "ffn_out_norm": after,
        "attention.query": ColwiseParallel(), "attention.key": ColwiseParallel(), "attention.value": ColwiseParallel(),
        "attention.query_norm": heads, "attention.key_norm": heads, "attention.out": leaves,
        "ffn.gate": ColwiseParallel(), "ffn.up": ColwiseParallel(), "ffn.down": leaves,
    }  # fmt: skip
    found = {name for name, _ in block.named_modules()}
    parallelize_module(block, mesh, {name: style for name, style in styles.items() if name in found})


def whole_hidden(hidden: Tensor, mesh: DeviceMesh, words: bool) -> Tensor:
    """What the head reads, as a plain tensor. Where words are divided, each process's gradient is a part of the sum."""
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)
    return hidden.to_local(grad_placements=(Partial(),) if words else None)
