"""Quantized weights in the compressed-tensors format, which vLLM loads and transformers opens.

    pack-quantized   int4 and int8: `weight_packed` (O, I * bits / 32) int32, the first number in the lowest bits and
                     each plus 2^(bits - 1); `weight_scale` (O, I / group); `weight_shape`
    float-quantized  fp8: `weight` (O, I) float8_e4m3fn and `weight_scale` (O, 1); inputs are quantized per token
    int-quantized    int8 written by other programs: `weight` (O, I) int8 and `weight_scale` (O, 1)

A weight is code * scale. Legend: O and I outputs and inputs, G groups of inputs with one scale.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder, TensorInfo, read_tensor

METHOD = "compressed-tensors"
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored. `group` inputs share a scale; 0 is one scale per output."""

    name: str  # int4, int8 or fp8
    bits: int
    group: int = 0

    @property
    def is_float(self) -> bool:
        return self.name == "fp8"

    @property
    def half_range(self) -> float:
        """The magnitude that the largest weight of a group gets, in units of its scale."""
        return FP8_MAX if self.is_float else (2**self.bits - 1) / 2

    @property
    def code_dtype(self) -> torch.dtype:
        return FP8 if self.is_float else torch.int8

    def round(self, units: Tensor) -> Tensor:
        """Weights in units of their scale, rounded to values that the format has."""
        if self.is_float:
            return units.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(units.dtype)
        return units.round().clamp(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)

    def config(self, ignore: Collection[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. `ignore` names linear layers that are not quantized."""
        weights: dict[str, Any] = {
            "num_bits": self.bits, "type": "float" if self.is_float else "int", "symmetric": True, "dynamic": False,
            "strategy": "group" if self.group else "channel", "group_size": self.group or None, "actorder": None,
            "block_structure": None, "observer": "minmax", "observer_kwargs": {},
        }  # fmt: skip
        inputs = {**weights, "dynamic": True, "strategy": "token", "observer": None} if self.is_float else None
        scheme = {
            "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None,
        }  # fmt: skip
        return {
            "quant_method": METHOD, "format": "float-quantized" if self.is_float else "pack-quantized",
            "quantization_status": "compressed", "config_groups": {"group_0": scheme}, "ignore": sorted(ignore),
            "kv_cache_scheme": None, "global_compression_ratio": None,
        }  # fmt: skip


@dataclass
class QuantizedWeight:
    """`codes_OI` int8 or float8; `scale_OG` in the dtype that it is stored in."""

    form: WeightFormat
    codes_OI: Tensor
    scale_OG: Tensor

    def dense(self) -> Tensor:
        """The weights that it stands for, in float32."""
        codes_OGg = self.codes_OI.float().unflatten(1, (self.scale_OG.shape[1], -1))
        return (codes_OGg * self.scale_OG.float()[..., None]).flatten(1)

    def tensors(self, module: str) -> dict[str, Tensor]:
        """The tensors of a folder."""
        if self.form.is_float:
            return {f"{module}.weight": self.codes_OI, f"{module}.weight_scale": self.scale_OG.float()}
        return {
            f"{module}.weight_packed": pack(self.codes_OI, self.form.bits),
            f"{module}.weight_scale": self.scale_OG,
            f"{module}.weight_shape": torch.tensor(self.codes_OI.shape),
        }


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """Signed integers of 4 or 8 bits as int32 words."""
    per_word = 32 // bits
    unsigned = F.pad(codes_OI.to(torch.int64) + 2 ** (bits - 1), (0, -codes_OI.shape[1] % per_word))
    shifts = torch.arange(per_word, device=codes_OI.device) * bits
    words = (unsigned.unflatten(1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of pack."""
    shifts = torch.arange(32 // bits, device=packed.device) * bits
    unsigned = (packed.to(torch.int64)[..., None] >> shifts) & (2**bits - 1)
    return (unsigned.flatten(1)[:, :columns] - 2 ** (bits - 1)).to(torch.int8)


class CompressedFolder(HfFolder):
    """A compressed-tensors folder whose quantized weights are read as float32."""

    @cached_property
    def form(self) -> WeightFormat:
        """Refuses what this reader does not know."""
        config = self.config["quantization_config"]
        groups = list((config.get("config_groups") or {}).values())
        weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
        kind, bits, how = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        known = (kind == "int" and bits in (4, 8)) or (kind == "float" and bits == 8)
        formats = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
        if not (known and weights.get("symmetric") and how in ("group", "channel")) or (
            config.get("format") not in formats or config.get("transform_config") or weights.get("actorder") == "group"
        ):
            what = f"{config.get('format')} of {len(groups)} groups, {bits} bits {kind}, {how}"
            raise UserError(
                f"{self.path}: compressed-tensors as {what} cannot be read here: this reads symmetric int4, int8 and "
                "fp8 with scales by group or output; use the model's bf16 weights"
            )
        return WeightFormat(
            "fp8" if kind == "float" else f"int{bits}", int(bits or 0), int(weights.get("group_size") or 0)
        )

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:  # type: ignore[override]
        """The tensors of the dense model."""
        dense = {}
        for name, info in self._stored.items():
            module, _, part = name.rpartition(".")
            if part == "weight_packed":
                rows, columns = (int(size) for size in self._read_stored(f"{module}.weight_shape"))
                dense[f"{module}.weight"] = replace(info, shape=(rows, columns), dtype=torch.float32)
            elif f"{module}.weight_scale" not in self._stored:
                dense[name] = info
            elif part not in ("weight_scale", "weight_shape"):
                dense[name] = replace(info, dtype=torch.float32) if part == "weight" else info
        return dense

    @cached_property
    def _stored(self) -> dict[str, TensorInfo]:
        """The tensors of the files."""
        return HfFolder(self.path).tensors

    def _read_stored(self, name: str) -> Tensor:
        return read_tensor(self.path, self._stored[name], name)

    def read(self, name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if part != "weight" or f"{module}.weight_scale" not in self._stored:
            return self._read_stored(name)
        return self.read_quantized(module).dense()

    def read_quantized(self, module: str) -> QuantizedWeight:
        """The codes and scales of a linear layer."""
        scale_OG = self._read_stored(f"{module}.weight_scale")
        if f"{module}.weight_packed" not in self._stored:
            return QuantizedWeight(self.form, self._read_stored(f"{module}.weight"), scale_OG)
        columns = self.tensors[f"{module}.weight"].shape[1]
        packed = self._read_stored(f"{module}.weight_packed")
        return QuantizedWeight(self.form, unpack(packed, self.form.bits, columns), scale_OG)


def open_folder(path: str | Path) -> HfFolder:
    """A model's folder, compressed or not."""
    folder = HfFolder(path)
    named = folder.config.get("quantization_config")
    return CompressedFolder(path) if isinstance(named, dict) and named.get("quant_method") == METHOD else folder
