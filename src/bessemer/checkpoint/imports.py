"""Weights from other programs' files, by Bessemer's names: .pt, .bin, safetensors, torch DCP (FSDP), DeepSpeed.

Nothing here unpickles freely. torch reads with `weights_only`; what a file asks for beyond tensors and plain values is
named and refused, unless the user marked the path as trusted.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.checkpoint.manifest import NAME, Damaged, verify
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
    except Damaged as error:
        raise UserError(str(error)) from None
    if not weights:
        raise UserError(f"{path}: holds no weights")
    return weights


def _read_folder(folder: Path, trusted: bool) -> Mapping[str, Tensor]:
    from bessemer.checkpoint.imports_deepspeed import deepspeed_folder, read_deepspeed

    if (folder / ".metadata").exists():
        from bessemer.checkpoint.imports_dcp import ForeignReader

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
