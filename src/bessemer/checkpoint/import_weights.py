"""Imports weights from other programs' files under Bessemer's names: .pt, .bin, safetensors, torch DCP (FSDP,
torchtitan, accelerate), DeepSpeed (ZeRO 0 to 3).

Nothing is unpickled freely. torch reads with `weights_only`; whatever a file needs beyond tensors and plain values is
named and refused, unless the user trusts the path. Pickled objects in DCP folders (schedulers, counters) are dropped
from the index and never read. DeepSpeed's own classes are replaced by placeholders, so it need not be installed and
none of its code runs; its files are memory-mapped, so the moments, two thirds of them, are never read.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from bessemer.checkpoint.dcp import TensorReader, _IndexUnpickler
from bessemer.checkpoint.manifest import NAME, DamagedCheckpoint, verify
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError

# Keys under which scripts save a state dict.
_STATE_DICT_KEYS = ("module", "model", "state_dict", "model_state_dict", "weights")
# First words of names that training programs save besides the model.
_NOT_WEIGHTS = re.compile(
    r"^(app\.|state\.)?(optimizers?|optim|lr_schedulers?|schedulers?|guard|train_state|dataloader|rng\w*)\."
)
_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pt", "*.bin", "*.pth")  # the first pattern with a match is used
# What torch.compile, DDP, FSDP, DeepSpeed or scripts add to parameter names.
_PREFIXES = re.compile(r"^((module|model|app|state_dict|model_state_dict)\.)+")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def import_weights(path: Path, trusted: bool = False) -> dict[str, Tensor]:
    """The weights of a file or folder, by native names, on the CPU. Needs memory for the model once.

    `trusted` lets torch unpickle anything in the files, which runs any code they name.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    weights: dict[str, Tensor] = {}
    try:
        tensors = _read_folder(path, trusted) if path.is_dir() else _read_file(path, trusted)
        for name in tensors:
            if _NOT_WEIGHTS.match(name):  # not read from disk
                continue
            if (native := _PREFIXES.sub("", _WRAPPERS.sub("", name))) in weights:
                raise UserError(f"{path}: two tensors map to {native!r}; the file should hold one model")
            weights[native] = tensors[name].detach()
    except DamagedCheckpoint as error:
        raise UserError(str(error)) from None
    if not weights:
        raise UserError(f"{path}: holds no weights")
    return weights


def _read_folder(folder: Path, trusted: bool) -> Mapping[str, Tensor]:
    if (folder / ".metadata").exists():
        if (folder / NAME).exists():  # our own checkpoint, which has hashes
            verify(folder)
        return SavedTensors(folder, reader=ForeignReader(folder))
    if (inner := deepspeed_folder(folder)) is not None:
        return read_deepspeed(inner, trusted)
    files = next((sorted(folder.glob(kind)) for kind in _FILES if any(folder.glob(kind))), [])
    if not files:
        raise UserError(
            f"{folder}: no importable checkpoint; expected .safetensors, .pt or .bin files, "
            "a torch DCP folder (.metadata) or a DeepSpeed one (*_model_states.pt)"
        )
    return {name: tensor for file in files for name, tensor in _read_file(file, trusted).items()}


def _read_file(path: Path, trusted: bool) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path}: is not a safetensors file: {error}") from None
    return _state_dict(load_pickled(path, trusted), path)


def load_pickled(path: Path, trusted: bool = False) -> Any:
    """What torch.save wrote, on the CPU and memory-mapped if possible. Only tensors and plain values, unless
    trusted."""
    try:
        return _load(path, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)|`?([\w.]+)`? (?:is|was) not an allowed", str(error))
        problem = f"needs {match[1] or match[2]}" if match else f"is no plain pickle ({_first_line(error)})"
        raise UserError(
            f"{path}: {problem}, which could run code; it was not loaded. Pass --trust only if you trust its author"
        ) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise UserError(f"{path}: cannot be read by torch: {_first_line(error)}") from None


def _load(path: Path, weights_only: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):  # the format before torch 1.6
            raise
        return torch.load(path, map_location="cpu", weights_only=weights_only)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what a script saved: all of it, or one of its entries."""
    for key in ("", *_STATE_DICT_KEYS):
        inner: Any = content if not key else content.get(key) if isinstance(content, dict) else None
        if isinstance(inner, dict) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            return dict(inner)
    kind = f"keys {', '.join(map(str, list(content)[:6]))}" if isinstance(content, dict) else type(content).__name__
    raise UserError(f"{path}: no state dict found ({kind}); save model.state_dict() with torch.save")


def select_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Tensor]:
    """Exactly the tensors of a model, or a UserError that says what does not fit.

    A tied output embedding that was saved twice is dropped if it equals the input one.
    """
    extra = [name for name in weights if name not in shapes]
    tied = weights.get("embedding.weight", torch.empty(0))
    if "head.weight" in extra and torch.equal(weights["head.weight"], tied):
        extra.remove("head.weight")
    problems = []
    if missing := [name for name in shapes if name not in weights]:
        problems.append(f"missing {_some(missing)}")
    if extra:
        problems.append(f"unexpected {_some(extra)}")
    for name, shape in shapes.items():
        if name in weights and tuple(weights[name].shape) != tuple(shape):
            problems.append(f"{name} is {tuple(weights[name].shape)}, the model has {tuple(shape)}")
    if problems:
        raise UserError(f"{where}: does not fit the model: {'; '.join(problems[:4])}")
    return {name: weights[name] for name in shapes}


def require_native_names(weights: Mapping[str, Tensor], where: str) -> None:
    """Without a model to compare with, at least the names must be those of a Bessemer model."""
    native = re.compile(r"^(embedding|head|norm|blocks\.\d+\.\w+(\.\w+)?)\.(weight|bias)$")
    if foreign := [name for name in weights if not native.match(name)]:
        raise UserError(
            f"{where}: not the names of a Bessemer model: {_some(foreign)}; "
            "expected embedding.weight, blocks.0.attention..., norm.weight"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _ForeignUnpickler(_IndexUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"):
            return BytesStorageMetadata  # an empty data class that marks pickled objects
        return super().find_class(module, name)


class ForeignReader(TensorReader):
    """The safe reader for an index that also lists objects: it returns only the tensors."""

    unpickler, skip_objects = _ForeignUnpickler, True


_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")


class _Placeholder:
    """Takes the place of a pickled DeepSpeed object and does nothing."""

    def __init__(self, *_: Any) -> None: ...


_PLACEHOLDERS: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Placeholder, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def deepspeed_folder(folder: Path) -> Path | None:
    """The newest step's folder of a DeepSpeed checkpoint; None if it is not DeepSpeed's."""
    latest = folder / "latest"
    named = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
    inner = folder / named
    if inner.parent != folder and inner != folder:
        raise UserError(f"{latest}: points outside its folder, to {inner}")
    return inner if any(inner.glob("*_model_states.pt")) else None


def read_deepspeed(folder: Path, trusted: bool) -> dict[str, Tensor]:
    """All weights, in fp32 if the optimizer keeps a master copy."""
    models = _by_rank(folder, "model")
    model = _load_partition(models[0], trusted)
    partitions = _by_rank(folder, "optim")
    if not partitions:  # ZeRO 0: the weights are in the model file
        return dict(model["module"])
    states = [_load_partition(path, trusted)["optimizer_state_dict"] for path in partitions]
    count = states[0].get("partition_count", 0)
    if (ranks := max(count) if isinstance(count, list) else count) != len(states):
        raise UserError(f"{folder}: {len(states)} of {ranks} optimizer files: the checkpoint is incomplete")
    buffers = set(model.get("buffer_names") or ())
    try:
        if int(states[0].get("zero_stage", 0)) < 3:  # the model file has everything, if not in fp32
            weights = {**model["module"], **_zero12(model, states)}
        else:
            weights = {name: tensor for name, tensor in model["module"].items() if name in buffers}
            weights |= _zero3(model, states) | _frozen3(models, model, trusted)
    except (KeyError, IndexError, TypeError, RuntimeError) as error:  # RuntimeError: a slice beyond the end
        raise UserError(f"{folder}: its partitions do not match the model file: {error}") from None
    for copy, original in (model.get("shared_params") or {}).items():
        if original in weights:
            weights[copy] = weights[original]
    return weights


def _load_partition(path: Path, trusted: bool) -> dict[str, Any]:
    with torch.serialization.safe_globals(_PLACEHOLDERS if not trusted else []):
        content = load_pickled(path, trusted)
    key = "optimizer_state_dict" if path.name.endswith("_optim_states.pt") else "module"
    if not isinstance(content, dict) or not isinstance(content.get(key), dict):
        raise UserError(f"{path}: has no {key}: not a DeepSpeed checkpoint file")
    return content


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Files of a kind in rank order. Only one model-parallel rank: others hold slices of matrices."""
    files = sorted(folder.glob(f"*_{kind}_states.pt"))
    if split := [path for path in files if "expert" in path.name or not re.search(r"mp_rank_00_", path.name)]:
        raise UserError(
            f"{split[0]}: a tensor- or expert-parallel model; convert it with DeepSpeed's ds_to_universal first"
        )

    def rank(path: Path) -> int:
        match = _RANK.search(path.name)
        return int(match[1]) if match else 0

    return sorted(files, key=rank)


def _zero12(model: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Each parameter group is one vector in equal parts, one per rank, with its parameters one after another."""
    weights = {}
    all_paddings = states[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        vector = torch.cat([state["single_partition_of_fp32_groups"][group] for state in states])
        offset = 0
        for k, (name, shape) in enumerate(shapes.items()):
            weights[name] = vector.narrow(0, offset, math.prod(shape)).view(tuple(shape)).clone()
            offset += math.prod(shape) + (all_paddings[group][k] if all_paddings else 0)
        _check_used(offset, vector.numel(), slack=4 * len(states))
    return weights


def _zero3(model: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Each parameter is split into equal parts, one per rank; a rank's parts follow each other over all groups."""
    flat = [torch.cat(state["fp32_flat_groups"]) for state in states]
    weights, offset = {}, 0
    for name, shape in ((n, s) for shapes in model["param_shapes"] for n, s in shapes.items()):
        part = -(-math.prod(shape) // len(states))
        weights[name] = _join((vector.narrow(0, offset, part) for vector in flat), shape)
        offset += part
    _check_used(offset, flat[0].numel(), slack=0)
    return weights


def _frozen3(models: list[Path], model: dict[str, Any], trusted: bool) -> dict[str, Tensor]:
    shapes = model.get("frozen_param_shapes") or {}
    parts = [_load_partition(path, trusted)["frozen_param_fragments"] for path in models] if shapes else []
    return {name: _join((part[name] for part in parts), shape) for name, shape in shapes.items()}


def _join(parts: Iterable[Tensor], shape: Iterable[int]) -> Tensor:
    """Parts of a flattened tensor; the last is padded."""
    size = tuple(shape)
    return torch.cat(list(parts))[: math.prod(size)].view(size).clone()


def _check_used(used: int, available: int, slack: int) -> None:
    if not 0 <= available - used <= slack:  # partitions are padded to a multiple of twice the ranks
        raise IndexError(f"{used} numbers expected, {available} found")
