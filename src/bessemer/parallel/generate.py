"""Generation with a model that a layout has placed: `gathered` yields a plain model for `Generator`.

The plain model is a copy of the modules without hooks of FSDP2, DDP or DTensor. It shares the weights that this rank
holds, so the only collectives of a step are those between tensor-parallel ranks: an all-reduce after each branch and
the embedding, and a gather of the logits. Data-parallel ranks take as many steps as their requests need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.dtensor import is_dtensor
from bessemer.errors import UserError
from bessemer.model.moe import MixtureOfExperts
from bessemer.model.transformer import Decoder
from bessemer.parallel.nf4 import ShardedNF4
from bessemer.parallel.shard import free_gathered_weights
from bessemer.parallel.world import World


class RowParallelLinear(nn.Linear):
    """The weight's columns, and so the input's, are divided over ranks; the output is complete on each."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """Ranks hold equally many rows of the weight, in order."""

    group: Any

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - dist.get_rank(self.group) * len(self.weight)
        remote = (rows < 0) | (rows >= len(self.weight))
        x = F.embedding(rows.masked_fill(remote, 0), self.weight).masked_fill(remote[..., None], 0.0)
        dist.all_reduce(x, group=self.group)
        return x


class TensorParallelDecoder(Decoder):
    """A decoder with this rank's heads, inner units and vocabulary. Logits have the same bits on every rank: they are
    gathered, or rank 0's if the head is not divided."""

    group: Any
    lockstep = True

    def logits(self, hidden_BTW: Tensor, product: Callable[..., Tensor] = F.linear) -> Tensor:
        logits = super().logits(hidden_BTW, product).contiguous()
        if logits.shape[-1] == self.shape.vocab:
            dist.broadcast(logits, group=self.group, group_src=0)
            return logits
        shards = [torch.empty_like(logits) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(shards, logits, group=self.group)
        return torch.cat(shards, dim=-1)

    def equal_on_all_ranks(self, number: int) -> bool:
        limits = torch.tensor([number, -number], device=self.head_weight.device)
        dist.all_reduce(limits, dist.ReduceOp.MAX, group=self.group)
        return int(limits[0]) == -int(limits[1])


@contextmanager
def gathered(model: Decoder, world: World) -> Iterator[Decoder]:
    """A plain model in evaluation mode for a `Generator` that is created and used inside the block. All ranks enter
    together and may leave at different times; the weights must not change inside.

    Until the end of the block it takes the memory of this rank's weights without the sharding of FSDP and of experts,
    in the compute dtype; nothing for replicas. Ranks of a tensor-parallel group must run the same requests."""
    _refuse_unsupported(model, world)
    local_model: Any = None
    try:
        with torch.inference_mode(False), torch.no_grad():  # training uses the gathered tensors again
            for module in model.modules():
                if (unshard := getattr(module, "unshard", None)) is not None:  # FSDP2's
                    unshard()
            local_model = _plain_copy(model, world.group("tp") if world.layout.tp > 1 else None, {})
        yield local_model.eval()
    finally:
        for module in local_model.modules() if local_model else ():
            module._parameters = dict.fromkeys(module._parameters)  # their memory is freed: fail rather than read it
        free_gathered_weights(model)


def own_copy(local: Decoder, dtype: torch.dtype | None) -> Decoder:
    """A copy of a model that `gathered` yields, with weights of its own: it stays usable after the block. With `dtype`,
    its numbers are converted."""
    copies: dict[Any, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for parameter in local.parameters():
            number = dtype is not None and parameter.is_floating_point()
            own = parameter.data.to(dtype if number else parameter.dtype, copy=True)
            copies[parameter] = nn.Parameter(own, requires_grad=False)
        copied: Any = _plain_copy(local, None, copies)
    return copied.eval()  # type: ignore[no-any-return]


def _refuse_unsupported(model: Decoder, world: World) -> None:
    if world.layout.pp > 1:
        raise UserError(
            f"parallel.pp: {world.layout.pp}: a rank holds only some layers and cannot generate: save a checkpoint and "
            "generate with load_model(RUN), or use parallel.tp or parallel.dp_shard"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError(
            "parallel.deepspeed.zero: 3: DeepSpeed's sharded weights are not gathered for generation: write 2, or save "
            "a checkpoint and generate with load_model(RUN)"
        )


def _plain_copy(module: nn.Module, group: Any, copies: dict[Any, Any]) -> Any:
    """A copy of a module without hooks, with the weights of this rank. `copies` holds shared modules and weights."""
    if module in copies:
        return copies[module]
    kind = _plain_class(module, group)
    copy = copies[module] = object.__new__(kind)
    nn.Module.__init__(copy)
    state = vars(copy)  # hooks among them, which stay empty; recomputation sets `forward` to the original's
    state |= {name: value for name, value in vars(module).items() if name not in state and name != "forward"}
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in copies:
            copies[parameter] = _local_weight(parameter)
        copy._parameters[name] = None if parameter is None else copies[parameter]
    copy._buffers.update(module._buffers)
    copy._modules = {
        name: None if child is None else _plain_copy(child, group, copies) for name, child in module._modules.items()
    }
    if kind in (RowParallelLinear, VocabParallelEmbedding, TensorParallelDecoder):
        copy.group = group
    if isinstance(copy, MixtureOfExperts):
        copy.dispatch = None  # all experts are here
    return copy


def _plain_class(module: nn.Module, group: Any) -> type[nn.Module]:
    """The class of a module before FSDP2 or DDP extended it, or the one that communicates with tensor-parallel
    ranks."""
    kind = type(module)
    while kind.__module__.startswith("torch.distributed"):
        kind = kind.__mro__[2]
    if group is not None and kind is Decoder:
        return TensorParallelDecoder
    weight = module._parameters.get("weight")
    if weight is not None and is_dtensor(weight) and weight.device_mesh.mesh_dim_names == ("tp",):
        (placement,) = weight.placements
        if issubclass(kind, nn.Linear) and placement.is_shard(1):
            return RowParallelLinear
        if issubclass(kind, nn.Embedding) and placement.is_shard(0):
            return VocabParallelEmbedding
    return kind


def _local_weight(parameter: nn.Parameter) -> nn.Parameter:
    """In the same memory, except for experts of other ranks, which are gathered."""
    tensor = parameter.data
    if isinstance(tensor, ShardedNF4):
        tensor = tensor.gathered()
    if is_dtensor(tensor):
        tensor = tensor.to_local() if tensor.device_mesh.mesh_dim_names == ("tp",) else tensor.full_tensor()
    return nn.Parameter(tensor, requires_grad=False)
