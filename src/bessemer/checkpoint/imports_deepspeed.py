"""DeepSpeed checkpoint folders: the fp32 weights put together from the partitions of ZeRO stages 0 to 3.

The optimizer files hold three of DeepSpeed's own classes. They are read as inert stand-ins, so DeepSpeed need not be
installed and none of its code runs. Files are mapped, not read: the moments, two thirds of them, never leave the disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.checkpoint.imports import load_pickled
from bessemer.errors import UserError

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")


class _Inert:
    """Takes whatever a pickled object of DeepSpeed's holds and does nothing."""

    def __init__(self, *_: Any) -> None: ...


_STAND_INS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def deepspeed_folder(folder: Path) -> Path | None:
    """The folder of the newest step, of what DeepSpeed wrote; None if it is not DeepSpeed's."""
    latest = folder / "latest"
    named = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    inner = folder / named
    if inner.parent != folder and inner != folder:
        raise UserError(f"{latest}: points outside its folder, to {inner}")
    return inner if any(inner.glob("*_model_states.pt")) else None


def read_deepspeed(folder: Path, trusted: bool) -> dict[str, Tensor]:
    """All weights, in fp32 where the optimizer keeps a master copy of them."""
    models = _by_rank(folder, "model")
    about = _load(models[0], trusted)
    partitions = _by_rank(folder, "optim")
    if not partitions:  # ZeRO 0: the weights stand in the model file
        return dict(about["module"])
    states = [_load(path, trusted)["optimizer_state_dict"] for path in partitions]
    count = states[0].get("partition_count", 0)
    if (ranks := max(count) if isinstance(count, list) else count) != len(states):
        raise UserError(f"{folder}: {len(states)} optimizer files of {ranks}: the checkpoint is not complete")
    buffers = set(about.get("buffer_names") or ())
    try:
        if int(states[0].get("zero_stage", 0)) < 3:  # the model file has it all, if not in fp32
            weights = {**about["module"], **_zero12(about, states)}
        else:
            weights = {name: tensor for name, tensor in about["module"].items() if name in buffers}
            weights |= _zero3(about, states) | _frozen3(models, about, trusted)
    except (KeyError, IndexError, TypeError, RuntimeError) as error:  # torch's for a slice beyond the end is the last
        raise UserError(f"{folder}: its partitions do not hold what the model file says: {error}") from None
    for copy, original in (about.get("shared_params") or {}).items():
        if original in weights:
            weights[copy] = weights[original]
    return weights


def _load(path: Path, trusted: bool) -> dict[str, Any]:
    with torch.serialization.safe_globals(_STAND_INS if not trusted else []):
        found = load_pickled(path, trusted)
    key = "optimizer_state_dict" if path.name.endswith("_optim_states.pt") else "module"
    if not isinstance(found, dict) or not isinstance(found.get(key), dict):
        raise UserError(f"{path}: has no {key}: it is not a file of a DeepSpeed checkpoint")
    return found


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Files of a kind in the order of ranks. Only one model-parallel rank: others hold slices of matrices."""
    found = sorted(folder.glob(f"*_{kind}_states.pt"))
    if split := [path for path in found if "expert" in path.name or not re.search(r"mp_rank_00_", path.name)]:
        raise UserError(
            f"{split[0]}: a model split by tensors or experts; convert it with DeepSpeed's ds_to_universal first"
        )

    def rank(path: Path) -> int:
        match = _RANK.search(path.name)
        return int(match[1]) if match else 0

    return sorted(found, key=rank)


def _zero12(about: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Each parameter group is one vector cut into equal parts, one a rank; parameters lie in it one after another."""
    weights = {}
    all_paddings = states[0].get("param_alignment_paddings")
    for group, shapes in enumerate(about["param_shapes"]):
        vector = torch.cat([state["single_partition_of_fp32_groups"][group] for state in states])
        offset = 0
        for k, (name, shape) in enumerate(shapes.items()):
            weights[name] = vector.narrow(0, offset, math.prod(shape)).view(tuple(shape)).clone()
            offset += math.prod(shape) + (all_paddings[group][k] if all_paddings else 0)
        _check_used(offset, vector.numel(), slack=4 * len(states))
    return weights


def _zero3(about: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Each parameter is cut into equal parts, one a rank; a rank's parts lie one after another, over all groups."""
    flat = [torch.cat(state["fp32_flat_groups"]) for state in states]
    weights, offset = {}, 0
    for name, shape in ((n, s) for shapes in about["param_shapes"] for n, s in shapes.items()):
        part = -(-math.prod(shape) // len(states))
        weights[name] = _join((vector.narrow(0, offset, part) for vector in flat), shape)
        offset += part
    _check_used(offset, flat[0].numel(), slack=0)
    return weights


def _frozen3(models: list[Path], about: dict[str, Any], trusted: bool) -> dict[str, Tensor]:
    shapes = about.get("frozen_param_shapes") or {}
    parts = [_load(path, trusted)["frozen_param_fragments"] for path in models] if shapes else []
    return {name: _join((part[name] for part in parts), shape) for name, shape in shapes.items()}


def _join(parts: Iterable[Tensor], shape: Iterable[int]) -> Tensor:
    """Parts of a flattened tensor; the last is padded."""
    size = tuple(shape)
    return torch.cat(list(parts))[: math.prod(size)].view(size).clone()


def _check_used(used: int, available: int, slack: int) -> None:
    if not 0 <= available - used <= slack:  # partitions are padded to a multiple of twice the ranks
        raise IndexError(f"{used} numbers wanted, {available} there")
