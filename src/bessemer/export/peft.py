"""Writes the adapter of a run in PEFT's format, and checks it: read back and merged into its base, it must give the
weights that the run's own adapter gives. If the run held its base in NF4, both are merged into the base before that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.checkpoint.base import CheckpointWeights, FolderWeights, FrozenBase, OriginalWeights
from bessemer.checkpoint.manifest import read_manifest
from bessemer.errors import UserError
from bessemer.export.gate import Mismatch
from bessemer.export.hf import NativeModel, choose_family
from bessemer.model.adapters import MergedWeights, is_part, merge
from bessemer.model.families.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PeftAdapter,
    ia3_files,
    read_adapter,
    wrapped_files,
)
from bessemer.model.families.folder import HfFolder, _write, atomic_folder
from bessemer.model.virtual_tokens import VIRTUAL
from bessemer.model.virtual_tokens import to_peft as virtual_files
from bessemer.spec.adapter import AdapterSpec
from bessemer.spec.load import load_spec

TOLERANCE = 1e-5  # of the largest number of a merged matrix, besides the rounding of the base's dtype


def to_peft(native: NativeModel, out: Path, base: Path | None = None, overwrite: bool = False) -> tuple[int, str]:
    """Write the adapter's folder; returns the number of its tensors and the result of the check, in words.
    `base` is the Hugging Face folder that the adapter is for, by default the one that the run started from."""
    saved = CheckpointWeights(native.checkpoint)
    tensors = {name: saved[name] for name in saved if is_part(name)}
    if not tensors or native.shape.labels:
        problem = "is a classifier" if tensors else "has no adapter"
        raise UserError(f"{native.place}: {problem}, and --to peft writes adapters of language models: use --to hf")
    folder = HfFolder(base or _base_folder(native))
    spec = load_spec(native.place / "spec.yaml").adapter or AdapterSpec()
    if native.shape.wrapped:
        place_of_base, rslora = str(folder.path.absolute()), spec.kind == "rslora"
        files = wrapped_files(tensors, native.shape, place_of_base, spec.dropout, rslora)
        return _write_wrapped(files, native, out, overwrite)
    family, place_of_base = choose_family(native.shape, None, folder), str(folder.path.absolute())
    if any(name.endswith(f".{VIRTUAL}") for name in tensors):
        return _write_virtual(tensors, native, out, place_of_base, overwrite)
    if any(name.endswith((".ia3_in", ".ia3_out")) for name in tensors):
        if spec.modules_to_save:
            raise UserError(
                f"{native.place}: PEFT's IA3 is exported without modules_to_save: use --to hf, which merges"
            )
        config, weights = ia3_files(tensors, native.shape, family, place_of_base)
    else:
        adapter = PeftAdapter(tensors, native.shape, family, spec.kind == "rslora")
        config, weights = adapter.files(place_of_base, spec.dropout)
    with atomic_folder(out, overwrite) as place:
        from safetensors.torch import save_file

        place.mkdir(parents=True)
        save_file(weights, place / ADAPTER_WEIGHTS, {"format": "pt"})
        _write(place / ADAPTER_CONFIG, config)
        gap = _largest_gap(MergedWeights(OriginalWeights(native.checkpoint)), place)
    return len(weights), f"merged into its base it differs by {gap:.1e}"


def _write_virtual(
    tensors: dict[str, Tensor], native: NativeModel, out: Path, base: str, overwrite: bool
) -> tuple[int, str]:
    """Writes virtual tokens and reads them back, which must give the same bits."""
    from safetensors.torch import save_file

    config, weights = virtual_files(tensors, native.shape, base)
    with atomic_folder(out, overwrite) as place:
        place.mkdir(parents=True)
        save_file(weights, place / ADAPTER_WEIGHTS, {"format": "pt"})
        _write(place / ADAPTER_CONFIG, config)
        read = read_adapter(place, native.shape)
        if different := [name for name, tensor in tensors.items() if not torch.equal(read[name], tensor)]:
            raise Mismatch(f"the adapter in PEFT's format is not the same: {different[0]} differs")
    return len(weights), "read back with the same bits"


def _write_wrapped(
    files: tuple[dict[str, Any], dict[str, Tensor]], native: NativeModel, out: Path, overwrite: bool
) -> tuple[int, str]:
    """Writes the adapter of a model that transformers runs, and merges what is read back."""
    from safetensors.torch import save_file

    config, weights = files
    original, largest = OriginalWeights(native.checkpoint), 0.0
    merged = MergedWeights(original)
    with atomic_folder(out, overwrite) as place:
        place.mkdir(parents=True)
        save_file(weights, place / ADAPTER_WEIGHTS, {"format": "pt"})
        _write(place / ADAPTER_CONFIG, config)
        read = read_adapter(place, native.shape)
        for module in merged.adapted:
            parts = {name.rpartition(".")[2]: read[name] for name in read if name.rpartition(".")[0] == module}
            expected, weight = merged[f"{module}.weight"].double(), original[f"{module}.weight"]
            gap = float((merge(module, weight, parts).double() - expected).abs().max() / expected.abs().max())
            if not gap <= TOLERANCE + torch.finfo(weight.dtype).eps:
                problem = f"{module} differs by {gap:.1e} when merged"
                raise Mismatch(f"the adapter in PEFT's format is not the same: {problem}")
            largest = max(largest, gap)
    return len(weights), f"merged into its base it differs by {largest:.1e}"


def held_in_nf4(native: NativeModel) -> int:
    """How many weights of the base the run held in NF4."""
    base = FrozenBase.of(read_manifest(native.checkpoint))
    return len(base.quantized) if base else 0


def _base_folder(native: NativeModel) -> Path:
    base = FrozenBase.of(read_manifest(native.checkpoint))
    if base is None or base.kind == "checkpoint":
        raise UserError(
            f"{native.place}: its base is not a Hugging Face folder: export the base with `bessemer export RUN --to "
            "hf --out FOLDER` and pass --base FOLDER"
        )
    return Path(base.path)


def _largest_gap(merged: MergedWeights, place: Path) -> float:
    """The largest difference over all matrices that the adapter changes; Mismatch beyond the tolerance."""
    written, largest = FolderWeights(place, body=False), 0.0
    for name in sorted(f"{module}.{part}" for module in merged.adapted for part in ("weight", "bias")):
        if name not in merged:
            continue
        module, expected, actual = name.rpartition(".")[0], merged[name].double(), written[name]
        tolerance = TOLERANCE + torch.finfo(actual.dtype).eps
        if actual.shape != expected.shape:
            raise Mismatch(f"{module} has shape {tuple(actual.shape)} in the base folder, not {tuple(expected.shape)}")
        gap = float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not gap <= tolerance:
            raise Mismatch(f"the adapter in PEFT's format is not the same: {module} differs by {gap:.1e} when merged")
        largest = max(largest, gap)
    return largest
