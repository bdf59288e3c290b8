"""Weights from other programs' files, by Bessemer's names: .pt, .bin, safetensors, torch DCP (FSDP), DeepSpeed.

Nothing here unpickles freely. torch reads with `weights_only`; what a file asks for beyond tensors and plain values is
named and refused, unless the user marked the path as trusted.

torch DCP folders of other programs (FSDP, torchtitan, accelerate): their tensors, without their pickles.

Such a folder may hold objects beside tensors (schedulers, counters), each a pickle of its own. They are left out of the
index here, so that nothing ever asks for their bytes.

DeepSpeed checkpoint folders: the fp32 weights put together from the partitions of ZeRO stages 0 to 3.

The optimizer files hold three of DeepSpeed's own classes. They are read as inert stand-ins, so DeepSpeed need not be
installed and none of its code runs. Files are mapped, not read: the moments, two thirds of them, never leave the disk.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from bessemer.checkpoint.dcp import TensorReader, _IndexUnpickler
from bessemer.checkpoint.manifest import NAME, DamagedCheckpoint, verify
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.errors import UserError

# Keys under which scripts save a state dict.
_WHOLE = ("module", "model", "state_dict", "model_state_dict", "weights")
# First words of what training programs save beside the model, in one flat list of names.
_NOT_WEIGHTS = re.compile(
    r"^(app\.|state\.)?(optimizers?|optim|lr_schedulers?|schedulers?|guard|train_state|dataloader|rng\w*)\."
)
_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pt", "*.bin", "*.pth")  # the first kind that a folder has
# What compile, DDP, FSDP, DeepSpeed or a saving script put before a parameter's name, or into it.
_PREFIXES = re.compile(r"^((module|model|app|state_dict|model_state_dict)\.)+")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def import_weights(path: Path, trusted: bool = False) -> dict[str, Tensor]:
    """The weights in a file or folder, by native names, on the CPU. Costs memory for the model once.

    `trusted` lets torch unpickle anything the files hold, which runs whatever code they name.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    weights: dict[str, Tensor] = {}
    try:
        found = _read_folder(path, trusted) if path.is_dir() else _read_file(path, trusted)
        for name in found:
            if _NOT_WEIGHTS.match(name):  # left on the disk where they can be
                continue
            if (native := _PREFIXES.sub("", _WRAPPERS.sub("", name))) in weights:
                raise UserError(f"{path}: two tensors would be {native!r}; keep one model in the file")
            weights[native] = found[name].detach()
    except DamagedCheckpoint as error:
        raise UserError(str(error)) from None
    if not weights:
        raise UserError(f"{path}: holds no weights")
    return weights


def _read_folder(folder: Path, trusted: bool) -> Mapping[str, Tensor]:
    if (folder / ".metadata").exists():
        if (folder / NAME).exists():  # our own: the manifest knows what its files should be
            verify(folder)
        return SavedTensors(folder, reader=ForeignReader(folder))
    if (inner := deepspeed_folder(folder)) is not None:
        return read_deepspeed(inner, trusted)
    files = next((sorted(folder.glob(kind)) for kind in _FILES if any(folder.glob(kind))), [])
    if not files:
        raise UserError(
            f"{folder}: no checkpoint that can be imported; there should be .safetensors, .pt or .bin files, "
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
    """What torch.save wrote, on the CPU and mapped where it can be. Tensors and plain values only, unless trusted."""
    try:
        return _load(path, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)|`?([\w.]+)`? (?:is|was) not an allowed", str(error))
        what = f"asks for {asked[1] or asked[2]}" if asked else f"is no plain pickle ({_first_line(error)})"
        raise UserError(
            f"{path}: {what}, which could run code; it was not loaded. Pass --trust only if you trust its author"
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


def _state_dict(found: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what a script saved: all of it, or one of its entries."""
    for key in ("", *_WHOLE):
        inner: Any = found if not key else found.get(key) if isinstance(found, dict) else None
        if isinstance(inner, dict) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            return dict(inner)
    kind = f"keys {', '.join(map(str, list(found)[:6]))}" if isinstance(found, dict) else type(found).__name__
    raise UserError(f"{path}: no state dict found ({kind}); save model.state_dict() with torch.save")


def fit(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Tensor]:
    """Exactly the named tensors of a model, or UserError in one line that says what does not fit.

    A tied output embedding saved twice is dropped where it equals the input one.
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


def refuse_other_names(weights: Mapping[str, Tensor], where: str) -> None:
    """Where no model is at hand to compare with: at least the names must be those of a Bessemer model."""
    known = re.compile(r"^(embedding|head|norm|blocks\.\d+\.\w+(\.\w+)?)\.(weight|bias)$")
    if odd := [name for name in weights if not known.match(name)]:
        raise UserError(
            f"{where}: these are not the names of a Bessemer model: {_some(odd)}; "
            "there should be embedding.weight, blocks.0.attention..., norm.weight"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _ForeignUnpickler(_IndexUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"):
            return BytesStorageMetadata  # an empty data class that marks an entry as an object
        return super().find_class(module, name)


class ForeignReader(TensorReader):
    """The safe reader for an index that names objects too: it knows only the tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            metadata = _ForeignUnpickler(io.BytesIO(path.read_bytes()), path).load()
            kept = {
                name: entry
                for name, entry in metadata.state_dict_metadata.items()
                if not isinstance(entry, BytesStorageMetadata)
            }
            places = {str(place.relative_path) for place in metadata.storage_data.values()}
        except DamagedCheckpoint:
            raise
        except Exception as error:  # a damaged pickle raises almost anything
            raise DamagedCheckpoint(f"{path}: unreadable index: {error}") from None
        if outside := sorted(name for name in places if Path(name).name != name):
            raise DamagedCheckpoint(f"{path}: points outside its folder, to {outside[0]}; it was not loaded")
        return Metadata(kept, storage_data=metadata.storage_data, storage_meta=StorageMeta(load_id=self.load_id))


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
    about = _load_partition(models[0], trusted)
    partitions = _by_rank(folder, "optim")
    if not partitions:  # ZeRO 0: the weights stand in the model file
        return dict(about["module"])
    states = [_load_partition(path, trusted)["optimizer_state_dict"] for path in partitions]
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


def _load_partition(path: Path, trusted: bool) -> dict[str, Any]:
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
    parts = [_load_partition(path, trusted)["frozen_param_fragments"] for path in models] if shapes else []
    return {name: _join((part[name] for part in parts), shape) for name, shape in shapes.items()}


def _join(parts: Iterable[Tensor], shape: Iterable[int]) -> Tensor:
    """Parts of a flattened tensor; the last is padded."""
    size = tuple(shape)
    return torch.cat(list(parts))[: math.prod(size)].view(size).clone()


def _check_used(used: int, available: int, slack: int) -> None:
    if not 0 <= available - used <= slack:  # partitions are padded to a multiple of twice the ranks
        raise IndexError(f"{used} numbers wanted, {available} there")
