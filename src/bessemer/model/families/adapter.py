"""LoRA adapter folders in PEFT's format: read as the Hugging Face folder of the base model with the adapter merged in,
as native tensors to train on, and written from native ones.

PEFT's names are those of the base model's family. Where the family stores several native matrices as one, their
adapters become one of the sum of their ranks, block by block.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.adapters import merge
from bessemer.model.classifier import without_head
from bessemer.model.families.folder import HfFolder, read_header, read_tensor
from bessemer.model.families.registry import Family, WeightMapping, families_for
from bessemer.model.virtual_tokens import PEFT_TENSOR, PEFT_TYPES, from_peft
from bessemer.model.wrapped import INNER
from bessemer.spec.adapter import ADAPTER_CONFIG as ADAPTER_CONFIG
from bessemer.spec.adapter import ADAPTER_WEIGHTS, AdapterSpec, read_peft, read_peft_config
from bessemer.spec.shape import ModelShape

PREFIX = "base_model.model."
_FACTOR = re.compile(r"base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?")
_SAVED = re.compile(r"base_model\.model\.(.+?)(?:\.modules_to_save(?:\.default)?)?\.weight")
_VECTOR = re.compile(r"base_model\.model\.(.+)\.ia3_l(?:\.default)?")
_PARTS = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude"}


def is_virtual(path: str | Path) -> bool:
    """Whether a folder holds virtual tokens, which no weight can be merged with."""
    return read_peft_config(path)["peft_type"] in PEFT_TYPES.values()


def _read_virtual(path: str | Path, shape: ModelShape) -> dict[str, Tensor]:
    """The virtual tokens of a folder by native names."""
    place = Path(path).expanduser()
    header = read_header(place / ADAPTER_WEIGHTS)
    if set(header) != {PEFT_TENSOR}:
        raise UserError(f"{path}: holds {', '.join(sorted(header))}, not only {PEFT_TENSOR}")
    return from_peft(read_peft_config(path), {PEFT_TENSOR: read_tensor(place, header[PEFT_TENSOR], PEFT_TENSOR)}, shape)


class PeftFolder:
    """An adapter's configuration and tensors, read one at a time. `factors` are names in the file by module and part;
    `saved` are those of modules that were trained in full."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = read_peft_config(path)
        if not (self.path / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{path}: has no {ADAPTER_WEIGHTS}")
        self.header = read_header(self.path / ADAPTER_WEIGHTS)
        self.factors: dict[str, dict[str, str]] = {}
        self.saved: dict[str, str] = {}
        self.vectors: dict[str, str] = {}  # of IA3: (O, 1), or (1, I) for feed-forward layers
        for name in self.header:
            if match := _FACTOR.fullmatch(name):
                self.factors.setdefault(match[1], {})[_PARTS[match[2]]] = name
            elif match := _VECTOR.fullmatch(name):
                self.vectors[match[1]] = name
            elif self.config.get("modules_to_save") and (match := _SAVED.fullmatch(name)):
                self.saved[match[1]] = name
            else:
                raise UserError(f"{path}: {name!r} is not a LoRA factor, so it cannot be merged")
        expected = {"lora_a", "lora_b", "magnitude"} if self.config.get("use_dora") else {"lora_a", "lora_b"}
        if incomplete := [module for module, parts in self.factors.items() if set(parts) != expected]:
            parts = ", ".join(sorted(self.factors[incomplete[0]]))
            raise UserError(f"{path}: {incomplete[0]} has {parts}, but {ADAPTER_CONFIG} describes {sorted(expected)}")

    def read(self, name: str) -> Tensor:
        return read_tensor(self.path, self.header[name], name)

    def parts(self, module: str) -> dict[str, Tensor]:
        """The factors of a module as native parts: (R, I), (O, R) and (O,)."""
        tensors = {part: self.read(name) for part, name in self.factors[module].items()}
        return tensors | {"lora_scale": torch.tensor(self.scale(module, len(tensors["lora_a"])))}

    def scale(self, module: str, rank: int) -> float:
        patterns = self.config.get("alpha_pattern") or {}
        matches = (value for pattern, value in patterns.items() if re.search(rf"(^|\.){pattern}$", module))
        alpha = next(matches, self.config["lora_alpha"])
        return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))


def _base_of(path: str | Path, config: Mapping[str, Any]) -> str:
    base = str(config.get("base_model_name_or_path") or "")
    if not (Path(base) / "config.json").is_file():
        raise UserError(f"{path}: its base model {base!r} is no folder here; correct base_model_name_or_path")
    return base


class VirtualFolder(HfFolder):
    """The base of a folder with virtual tokens, which `read_adapter` reads."""

    def __init__(self, path: str | Path) -> None:
        self.adapter_path = Path(path)
        super().__init__(_base_of(path, read_peft_config(path)))


class AdapterFolder(HfFolder):
    """`read` adds scale * B A to the weights that the adapter changes."""

    def __init__(self, path: str | Path) -> None:
        if is_virtual(path):
            raise UserError(f"{path}: virtual tokens cannot be merged into weights: generate with the folder itself")
        self.adapter = PeftFolder(path)
        super().__init__(_base_of(path, self.adapter.config))
        changed = [*self.adapter.factors, *self.adapter.saved, *self.adapter.vectors]
        if unknown := sorted(module for module in changed if f"{module}.weight" not in self.tensors):
            raise UserError(
                f"{path}: the base model {self.path} has no {unknown[0]}.weight: the adapter is for another model"
            )

    def read(self, name: str) -> Tensor:
        weight, module = super().read(name), name.removesuffix(".weight")
        if (place := name.rpartition(".")[0]) in self.adapter.vectors:
            return self._scaled(place, name, weight)
        if name.endswith(".weight") and module in self.adapter.saved:
            return self.adapter.read(self.adapter.saved[module])
        if module not in self.adapter.factors or not name.endswith(".weight"):
            return weight
        parts, turned = self.adapter.parts(module), bool(self.adapter.config.get("fan_in_fan_out"))
        if "magnitude" in parts:
            merged = merge(module, weight.t() if turned else weight, parts)
            return merged.t().contiguous() if turned else merged
        delta = self.adapter.scale(module, len(parts["lora_a"])) * (parts["lora_b"].float() @ parts["lora_a"].float())
        return (weight.float() + (delta.T if turned else delta)).to(weight.dtype)

    def _scaled(self, module: str, name: str, tensor: Tensor) -> Tensor:
        """A weight or bias with the factors of IA3."""
        vector = self.adapter.read(self.adapter.vectors[module]).float()
        if name.endswith(".bias"):
            return tensor if len(vector) == 1 else (tensor.float() * vector.flatten()).to(tensor.dtype)
        turned = bool(self.adapter.config.get("fan_in_fan_out"))
        return (tensor.float() * (vector.t() if turned else vector)).to(tensor.dtype)


def read_adapter(path: str | Path, shape: ModelShape) -> dict[str, Tensor]:
    """The tensors of an adapter by native names, for a model of that shape."""
    if is_virtual(path):
        return _read_virtual(path, shape)
    folder = PeftFolder(path)
    if shape.wrapped:
        return _wrapped_parts(folder)
    modules = {*folder.factors, *folder.saved, *folder.vectors}
    for family in families_for(without_head(shape) if shape.labels else shape):
        mappings = {mapping.hf_names[0].removesuffix(".weight"): mapping for mapping in _matrices(family, shape)}
        if modules <= mappings.keys():
            return dict(_native_parts(folder, mappings))
    raise UserError(f"adapter.path: {path} adapts {min(modules)}, which this model does not have: use its own base")


def _wrapped_parts(folder: PeftFolder) -> dict[str, Tensor]:
    """For a model that transformers runs: the names are its own."""
    if other := sorted({*folder.saved, *folder.vectors}) or folder.config.get("fan_in_fan_out"):
        what = other[0] if isinstance(other, list) else "fan_in_fan_out"
        raise UserError(f"adapter.path: {folder.path}: {what}: only matrices of linear layers are read for model.wrap")
    return {f"{INNER}{module}.{part}": t for module in folder.factors for part, t in folder.parts(module).items()}


def with_folder(adapter: AdapterSpec, shape: ModelShape) -> AdapterSpec:
    """The section with all settings of the folder that it names, its layers by their native names."""
    if adapter.path is None or is_virtual(adapter.path):
        return read_peft(adapter)
    names = read_adapter(adapter.path, shape)
    layers = [name.rpartition(".")[0] for name in names if name.endswith((".lora_a", ".ia3_in", ".ia3_out"))]
    saved = [name.removesuffix(".trained") for name in names if name.endswith(".trained")]
    return read_peft(adapter).model_copy(update={"targets": layers, "modules_to_save": saved})


def _matrices(family: Family, shape: ModelShape) -> Iterator[WeightMapping]:
    mappings = family.weight_mappings(without_head(shape) if shape.labels else shape)
    return (m for m in mappings if len(m.hf_names) == 1 and m.hf_names[0].endswith(".weight"))


def _native_parts(folder: PeftFolder, mappings: Mapping[str, WeightMapping]) -> Iterator[tuple[str, Tensor]]:
    for module, name in folder.saved.items():
        (native,) = mappings[module].native_names
        yield f"{native.removesuffix('.weight')}.trained", mappings[module].to_native([folder.read(name)])[0]
    for module, name in folder.vectors.items():
        vector, (native, *others) = folder.read(name).float(), mappings[module].native_names
        layer = native.removesuffix(".weight")
        if others or (len(vector) == 1) != layer.endswith(".down"):
            able = "factors of the outputs of single layers and of the inputs of the last feed-forward layer"
            raise UserError(f"adapter.path: {folder.path}: {module}: only {able} can be read")
        part = "ia3_in" if len(vector) == 1 else "ia3_out"
        yield f"{layer}.{part}", (vector if len(vector) == 1 else mappings[module].to_native([vector])[0]).flatten()
    turned = bool(folder.config.get("fan_in_fan_out"))
    for module in folder.factors:
        parts, mapping = folder.parts(module), mappings[module]
        rows = {"lora_b": parts["lora_b"]}
        if "magnitude" in parts:
            rows["magnitude"] = parts["magnitude"].reshape(-1, 1)
        split = {part: mapping.to_native([t.t().contiguous() if turned else t]) for part, t in rows.items()}
        for i, native in enumerate(mapping.native_names):
            layer = native.removesuffix(".weight")
            yield f"{layer}.lora_a", parts["lora_a"]
            yield f"{layer}.lora_scale", parts["lora_scale"]
            for part, tensors in split.items():
                yield f"{layer}.{part}", tensors[i].flatten() if part == "magnitude" else tensors[i].contiguous()


def ia3_files(
    tensors: Mapping[str, Tensor], shape: ModelShape, family: Family, base: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and adapter_model.safetensors of IA3, from the native factors."""
    vectors: dict[str, Tensor] = {}
    turned = False
    for mapping in _matrices(family, shape):
        module, layer = (names[0].removesuffix(".weight") for names in (mapping.hf_names, mapping.native_names))
        if len(mapping.native_names) == 1 and f"{layer}.ia3_out" in tensors:
            vectors[module] = mapping.to_hf([tensors[f"{layer}.ia3_out"][:, None]])[0].reshape(-1, 1)
        elif len(mapping.native_names) == 1 and f"{layer}.ia3_in" in tensors:
            vectors[module] = tensors[f"{layer}.ia3_in"][None]
        elif any(f"{name.removesuffix('.weight')}.ia3_out" in tensors for name in mapping.native_names):
            raise UserError(
                f"{module} holds several layers, of which PEFT scales all or none: use --to hf, which merges"
            )
        turned |= module in vectors and mapping.to_hf([torch.zeros(2, 3)])[0].shape == (3, 2)
    inputs = [module for module, vector in vectors.items() if len(vector) == 1]
    config = {
        "peft_type": "IA3", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "target_modules": sorted(vectors), "feedforward_modules": sorted(inputs), "fan_in_fan_out": turned,
        "init_ia3_weights": True, "modules_to_save": None,
    }  # fmt: skip
    return config, {f"{PREFIX}{module}.ia3_l": vector.contiguous() for module, vector in vectors.items()}


def wrapped_files(
    tensors: Mapping[str, Tensor], shape: ModelShape, base: str, dropout: float, rslora: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and adapter_model.safetensors of a model that transformers runs."""
    return _WrappedAdapter(tensors, shape, None, rslora).files(base, dropout)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PeftAdapter:
    """Native adapter tensors, converted to PEFT's names and configuration for a base model of a family."""

    tensors: Mapping[str, Tensor]  # by native name, such as blocks.0.attention.query.lora_a
    shape: ModelShape
    family: Family
    rslora: bool = False

    @cached_property
    def modules(self) -> dict[str, dict[str, Tensor]]:
        """Parts by Hugging Face module."""
        return {
            mapping.hf_names[0].removesuffix(".weight"): parts
            for mapping in _matrices(self.family, self.shape)
            if (parts := self._join(mapping))
        }

    @cached_property
    def saved(self) -> dict[str, Tensor]:
        """Weights of modules that were trained in full, by Hugging Face module."""
        return {
            mapping.hf_names[0].removesuffix(".weight"): mapping.to_hf([self.tensors[name]])[0]
            for mapping in _matrices(self.family, self.shape)
            if (name := f"{mapping.native_names[0].removesuffix('.weight')}.trained") in self.tensors
        }

    def files(self, base: str, dropout: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """adapter_config.json, and the tensors of adapter_model.safetensors."""
        suffixes = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
        tensors = {
            f"{PREFIX}{module}.{suffixes[part]}": tensor.contiguous()
            for module, parts in self.modules.items()
            for part, tensor in parts.items()
            if part in suffixes
        }
        tensors |= {f"{PREFIX}{module}.weight": tensor.contiguous() for module, tensor in self.saved.items()}
        ranks = {module: len(parts["lora_a"]) for module, parts in self.modules.items()}
        alphas = {
            module: self._alpha(float(parts["lora_scale"]), ranks[module]) for module, parts in self.modules.items()
        }
        ((rank, _),), ((alpha, _),) = Counter(ranks.values()).most_common(1), Counter(alphas.values()).most_common(1)
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
            "lora_alpha": alpha, "lora_dropout": dropout, "bias": "none", "inference_mode": True,
            "use_rslora": self.rslora, "use_dora": any("magnitude" in parts for parts in self.modules.values()),
            "target_modules": self._targets(), "modules_to_save": [m.rpartition(".")[2] for m in self.saved] or None,
            "fan_in_fan_out": any(bool(parts["turned"]) for parts in self.modules.values()),
            "rank_pattern": {re.escape(module): r for module, r in ranks.items() if r != rank},
            "alpha_pattern": {re.escape(module): a for module, a in alphas.items() if a != alpha},
        }  # fmt: skip
        return config, tensors

    def _alpha(self, scale: float, rank: int) -> float:
        alpha = scale * (rank**0.5 if self.rslora else rank)
        return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-6) else alpha

    def _targets(self) -> list[str]:
        """Last names, if all modules of that name are adapted; else full names."""
        last = {module.rpartition(".")[2] for module in self.modules}
        every = [m.hf_names[0].removesuffix(".weight") for m in _matrices(self.family, self.shape)]
        full = all(module in self.modules for module in every if module.rpartition(".")[2] in last)
        return sorted(last) if full else list(self.modules)

    def _join(self, mapping: WeightMapping) -> dict[str, Tensor]:
        """The adapters of a mapping's native matrices as one; empty if it has none."""
        layers = [name.removesuffix(".weight") for name in mapping.native_names]
        adapted = [layer for layer in layers if f"{layer}.lora_a" in self.tensors]
        if not adapted:
            return {}
        if adapted != layers:
            raise UserError(
                f"{mapping.hf_names[0]} holds {', '.join(layers)}, of which only {', '.join(adapted)} has an adapter: "
                "PEFT cannot express that; export with --to hf, which merges it"
            )
        pairs = [self._pair(layer) for layer in layers]
        sizes = [len(b) for _, b in pairs]
        (joined,) = mapping.to_hf(list(torch.block_diag(*(b for _, b in pairs)).split(sizes)))
        turned = len(mapping.to_hf([torch.zeros(size, 1) for size in sizes])[0]) == 1  # GPT-2's matrices
        parts = {
            "lora_a": torch.cat([a for a, _ in pairs]), "lora_b": joined.t() if turned else joined,
            "lora_scale": self.tensors[f"{layers[0]}.lora_scale"], "turned": torch.tensor(turned),
        }  # fmt: skip
        if f"{layers[0]}.magnitude" in self.tensors:
            columns = [self.tensors[f"{layer}.magnitude"][:, None] for layer in layers]
            parts["magnitude"] = mapping.to_hf(columns)[0].flatten()
        return parts

    def _pair(self, layer: str) -> tuple[Tensor, Tensor]:
        """A and B; PiSSA's initial factors are subtracted by further rows and columns, as PEFT converts them."""
        a, b = self.tensors[f"{layer}.lora_a"], self.tensors[f"{layer}.lora_b"]
        if f"{layer}.initial_a" not in self.tensors:
            return a, b
        initial_a, initial_b = self.tensors[f"{layer}.initial_a"], self.tensors[f"{layer}.initial_b"]
        return torch.cat((a, initial_a)), torch.cat((b, -initial_b), dim=1)


class _WrappedAdapter(PeftAdapter):
    """Each matrix is one of PEFT's."""

    @cached_property
    def modules(self) -> dict[str, dict[str, Tensor]]:
        return {
            layer.removeprefix(INNER): self._parts(layer)
            for layer in (name.removesuffix(".lora_a") for name in self.tensors if name.endswith(".lora_a"))
        }

    @cached_property
    def saved(self) -> dict[str, Tensor]:
        return {}

    def _targets(self) -> list[str]:
        return list(self.modules)

    def _parts(self, layer: str) -> dict[str, Tensor]:
        a, b = self._pair(layer)
        own = {part: self.tensors[f"{layer}.{part}"] for part in ("lora_scale", "magnitude") if f"{layer}.{part}" in
               self.tensors}  # fmt: skip
        return {"lora_a": a, "lora_b": b, "turned": torch.tensor(False), **own}
