"""What trains and what does not. Parameters without gradients are not copied into snapshots, and checkpoints leave out
those that the base of the run holds: the Hugging Face folder or the checkpoint that it started from.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bessemer.checkpoint.base import FrozenBase, FrozenTensor, Kind, open_weights
from bessemer.dtensor import local, shard_of
from bessemer.errors import UserError
from bessemer.model.quantized import NF4, is_quantized, same_codes
from bessemer.parallel.world import World
from bessemer.train.engine import Engine


def frozen_names(model: nn.Module) -> set[str]:
    """Parameters of this rank that do not train."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def find_base(engine: Engine, kind: Kind, path: str | Path) -> FrozenBase | None:
    """The base of a run that has just loaded its weights from `path`: the frozen parameters that are there bit for bit.
    Others, such as an embedding with added tokens or a new head, stay in the checkpoints. None without any.

    Collective. Every rank reads the frozen weights once more.
    """
    names = frozen_names(engine.model)
    if not any(engine.world.gather(bool(names))):
        return None
    path = Path(os.path.abspath(os.path.expanduser(path)))
    weights, source = engine.optimizer.weights(engine.model), open_weights(kind, path)
    equal: dict[str, FrozenTensor] = {}
    for name in source:
        if name in names and is_quantized(weights[name]):
            tensor = source[name]
            # Equal bits on every kind of device: what differs here is another folder than the one that was loaded.
            if not same_codes(weights[name], tensor):
                raise UserError(f"{path}: {name} has changed since it was loaded: start the run again")
            equal[name] = replace(FrozenTensor.of(tensor), quantization=NF4)
        elif name in names:
            tensor = source[name].to(weights[name].dtype)
            if tensor.shape == weights[name].shape and _same_bits(weights[name], tensor):
                equal[name] = FrozenTensor.of(tensor)
    ranks = engine.world.gather((equal, names - set(equal)))
    tensors = {name: tensor for part, _ in ranks for name, tensor in part.items()}
    different = {name for _, missing in ranks for name in missing}
    return FrozenBase(kind, str(path), tensors).only(set(tensors) - different)


def _same_bits(held: Tensor, full: Tensor) -> bool:
    """Whether this rank's shard of a weight equals that part of the full tensor, NaN included."""
    parts = (local(held).detach().cpu(), shard_of(held, full))
    return torch.equal(*(part.contiguous().reshape(-1).view(torch.uint8) for part in parts))


def still_frozen(base: FrozenBase | None, model: nn.Module, world: World) -> FrozenBase | None:
    """The base of a resumed run: checkpoints leave out what they did before, unless it trains now. Collective."""
    names = {name for part in world.gather(frozen_names(model)) for name in part}
    return base.only(names) if base else None
