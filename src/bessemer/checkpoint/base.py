"""The frozen weights of a run, which its checkpoints leave out if the base that the run started from holds them.

The manifest names the base and has a digest of each tensor that is left out. A base is a Hugging Face folder or another
checkpoint, which may have a base itself. Its tensors are read one at a time, converted to native names and to the dtype
that the run holds them in, and compared with their digest at every read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from bessemer.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, read_manifest
from bessemer.errors import UserError
from bessemer.model.quantized import rounded_to_nf4

# hf_body: a folder without its head, for a classifier; wrapped: one that transformers runs.
Kind = Literal["hf", "hf_body", "wrapped", "checkpoint"]


@dataclass(frozen=True)
class FrozenTensor:
    """A tensor that a checkpoint leaves out, as the run holds it. If the run quantizes it, dtype and digest are of the
    tensor before that."""

    dtype: str
    shape: list[int]
    xxh3_128: str
    quantization: str | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> FrozenTensor:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = str(xxhash.xxh3_128(content.data).hexdigest())
        return cls(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class FrozenBase:
    """Where frozen tensors are read from, by their names in the model."""

    kind: Kind
    path: str
    tensors: dict[str, FrozenTensor]

    @property
    def fingerprint(self) -> str:
        return _fingerprint({name: tensor.xxh3_128 for name, tensor in self.tensors.items()})

    @property
    def quantized(self) -> set[str]:
        """The tensors that the run holds in NF4."""
        return {name for name, tensor in self.tensors.items() if tensor.quantization}

    def only(self, names: Collection[str]) -> FrozenBase | None:
        """The same base for some of its tensors; None if there are none."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
        return replace(self, tensors=tensors) if tensors else None

    def to_json(self) -> dict[str, Any]:
        tensors = {name: asdict(tensor) for name, tensor in self.tensors.items()}
        for entry in tensors.values():
            if entry["quantization"] is None:  # as in earlier versions
                del entry["quantization"]
        return {"kind": self.kind, "path": self.path, "tensors": tensors, "fingerprint": self.fingerprint}

    @classmethod
    def of(cls, manifest: Manifest) -> FrozenBase | None:
        """The base of a checkpoint; None if it holds every tensor itself."""
        base = manifest.base
        if not base:
            return None
        tensors = {name: FrozenTensor(**entry) for name, entry in base["tensors"].items()}
        return cls(base["kind"], base["path"], tensors)


def _fingerprint(digests: dict[str, str]) -> str:
    return str(xxhash.xxh3_128(json.dumps(digests, sort_keys=True).encode()).hexdigest())


class ChangedBase(UserError):
    """A base has changed or is gone; the message has both fingerprints."""


class FrozenTensors(Mapping[str, Tensor]):
    """The tensors that a checkpoint leaves to its base, read from there on access and verified, or ChangedBase. Those
    that the run quantizes have the rounded values that it computes with."""

    def __init__(self, base: FrozenBase, checkpoint: Path) -> None:
        self.base, self.checkpoint = base, checkpoint

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.original(name)
        return rounded_to_nf4(tensor) if self.base.tensors[name].quantization else tensor

    def original(self, name: str) -> Tensor:
        """The tensor of the base, before it is quantized."""
        expected = self.base.tensors[name]
        tensor = self._read(name)
        if tensor is None or FrozenTensor.of(tensor) != replace(expected, quantization=None):
            digests = {other: self._digest(other) for other in self.base.tensors}
            raise self._error(f"has changed in {name} and now has fingerprint {_fingerprint(digests)}")
        return tensor

    def verify(self) -> None:
        """Read every tensor, one at a time, and compare it with its digest."""
        for name in self:
            self.original(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base.tensors)

    def __len__(self) -> int:
        return len(self.base.tensors)

    @cached_property
    def _source(self) -> Mapping[str, Tensor]:
        if not os.path.exists(self.base.path):
            link = f"move it back, or link its new place with `ln -s NEW_PLACE {self.base.path}`"
            raise self._error("is gone, so there is no fingerprint to compare", link)
        try:
            return open_weights(self.base.kind, Path(self.base.path))
        except (UserError, DamagedCheckpoint) as error:
            raise self._error(f"now has no fingerprint, because it cannot be opened ({error})") from None

    def _read(self, name: str) -> Tensor | None:
        """None if the base has no such tensor that can be read: its content is not that of the save."""
        source = self._source
        try:
            return source[name].to(self.base.tensors[name].torch_dtype)
        except ChangedBase:  # of the base itself
            raise
        except (KeyError, RuntimeError, UserError, DamagedCheckpoint):
            return None

    def _digest(self, name: str) -> str:
        tensor = self._read(name)
        return "" if tensor is None else FrozenTensor.of(tensor).xxh3_128

    def _error(self, problem: str, fix: str = "put the original back there, or start a new run") -> ChangedBase:
        return ChangedBase(
            f"{self.checkpoint}: its frozen weights are those of {self.base.path} (fingerprint "
            f"{self.base.fingerprint}), which {problem}: {fix}"
        )


def frozen_tensors(checkpoint: Path) -> FrozenTensors | None:
    """What a checkpoint leaves to its base; None if it holds every tensor. Reads nothing but the manifest."""
    base = FrozenBase.of(read_manifest(checkpoint)) if (checkpoint / NAME).exists() else None
    return FrozenTensors(base, checkpoint) if base else None


def open_weights(kind: Kind, path: Path) -> Mapping[str, Tensor]:
    """The weights of a folder or a checkpoint by their native names, read on access. Adapters are merged."""
    if kind == "wrapped":
        from bessemer.model.wrapped import WrappedWeights

        return WrappedWeights(path)
    if kind != "checkpoint":
        return FolderWeights(path, body=kind == "hf_body")
    from bessemer.model.adapters import MergedWeights

    return MergedWeights(CheckpointWeights(path))


class CheckpointWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint and its base; split weights are joined to fp32."""

    def __init__(self, folder: Path) -> None:
        from bessemer.checkpoint.tensors import SavedTensors

        read_manifest(folder)
        self._saved = SavedTensors(folder)

    def __getitem__(self, name: str) -> Tensor:
        from bessemer.checkpoint.store import MODEL, join_split_weight, remainder_name

        weight, remainder = self._saved[MODEL + name], remainder_name(MODEL + name)
        return join_split_weight(weight.float(), self._saved[remainder]) if remainder in self._saved else weight

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix("model.") for name in self._saved if name.startswith("model."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OriginalWeights(CheckpointWeights):
    """The same before any weight is quantized."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._frozen = frozen_tensors(folder)

    def __getitem__(self, name: str) -> Tensor:
        if self._frozen is not None and name in self._frozen.base.quantized:
            return self._frozen.original(name)
        return super().__getitem__(name)


class FolderWeights(Mapping[str, Tensor]):
    """The weights of a Hugging Face folder of a native family, in the folder's dtypes. Holds the tensors of one weight
    mapping at a time."""

    def __init__(self, path: Path, body: bool) -> None:
        from bessemer.model.classifier import body_family
        from bessemer.model.families.adapter import ADAPTER_CONFIG, AdapterFolder
        from bessemer.model.families.folder import HfFolder, complete_names
        from bessemer.model.families.registry import Family, WeightMapping, read_shape

        self._folder = AdapterFolder(path) if (path / ADAPTER_CONFIG).exists() else HfFolder(path)
        family: Family
        if body:
            family = body_family(self._folder.config)
            shape = family.shape(self._folder.config)
        else:
            family, shape = read_shape(self._folder.config)
        complete_names(self._folder, shape, family)
        self._mappings: dict[str, WeightMapping] = {
            name: mapping for mapping in family.weight_mappings(shape) for name in mapping.native_names
        }
        self._converted: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._converted:
            mapping = self._mappings[name]
            self._converted = {}
            tensors = mapping.to_native([self._folder.read(hf_name) for hf_name in mapping.hf_names])
            self._converted = dict(zip(mapping.native_names, tensors, strict=True))
        return self._converted[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mappings)

    def __len__(self) -> int:
        return len(self._mappings)
