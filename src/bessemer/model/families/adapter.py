"""A LoRA adapter folder of PEFT, read as the Hugging Face folder of its base model with the adapter merged in."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder, read_header, read_json, read_tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")


class AdapterFolder(HfFolder):
    """`read` adds scale * B A to the weights that the adapter changes."""

    def __init__(self, path: str | Path) -> None:
        self.adapter = Path(os.path.expanduser(path))
        config = read_json(self.adapter / ADAPTER_CONFIG)
        if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("bias", "none") != "none":
            raise UserError(
                f"{path}: only plain LoRA adapters can be merged, without DoRA or trained biases; merge it with PEFT's "
                "merge_and_unload and load the merged folder"
            )
        base = str(config.get("base_model_name_or_path") or "")
        if not (Path(base) / "config.json").is_file():
            raise UserError(f"{path}: its base model {base!r} is no folder here; correct base_model_name_or_path")
        super().__init__(base)
        self.lora = config
        self.factors: dict[tuple[str, str], str] = {}
        if not (self.adapter / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{path}: has no {ADAPTER_WEIGHTS}")
        self.header = read_header(self.adapter / ADAPTER_WEIGHTS)
        for name in self.header:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise UserError(f"{path}: {name!r} is not a LoRA factor, so it cannot be merged")
            self.factors[match[1], match[2]] = name
        unknown = sorted({module for module, _ in self.factors if f"{module}.weight" not in self.tensors})
        if unknown:
            raise UserError(
                f"{path}: the base model {base} has no {unknown[0]}.weight: the adapter is for another model"
            )

    def read(self, name: str) -> Tensor:
        weight, module = super().read(name), name.removesuffix(".weight")
        if (module, "A") not in self.factors or not name.endswith(".weight"):
            return weight
        a, b = (
            read_tensor(self.adapter, self.header[self.factors[module, side]], self.factors[module, side]).float()
            for side in "AB"
        )
        rank = len(a)
        alpha = next(
            (
                value
                for pattern, value in (self.lora.get("alpha_pattern") or {}).items()
                if re.search(rf"(^|\.){pattern}$", module)
            ),
            self.lora["lora_alpha"],
        )
        scale = alpha / (rank**0.5 if self.lora.get("use_rslora") else rank)
        delta = scale * (b @ a)
        return (weight.float() + (delta.T if self.lora.get("fan_in_fan_out") else delta)).to(weight.dtype)
