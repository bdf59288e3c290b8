"""The adapter section: which low-rank matrices train beside the frozen weights of a model, and how many they are.

A folder in PEFT's format has its settings in adapter_config.json, which `read_peft` translates to this section.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bessemer.errors import UserError
from bessemer.spec.quantity import ShortSection, setting
from bessemer.spec.shape import ModelShape, parameter_counts

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
AutoRank = Annotated[int, Field(ge=1, le=4096)] | Literal["auto"]
AutoAlpha = Annotated[float, Field(gt=0, le=1e6)] | Literal["auto"]
Kind = Literal["auto", "lora", "rslora", "dora", "pissa", "ia3", "prompt", "prefix"]
PEFT_KINDS = {"LORA": "lora", "IA3": "ia3", "PROMPT_TUNING": "prompt", "PREFIX_TUNING": "prefix"}
VIRTUAL = ("prompt", "prefix")
Base = Literal["full", "nf4"]
# Of a weight in NF4: 4 bits, its share of the 8-bit scale of 64 weights and of the fp32 scale of 256 such scales.
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8


# With these PEFT changes the base's weights, or computes more than W x + scale * B A x.
_CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_OTHER_FUNCTIONS = (
    "alora_invocation_tokens", "use_qalora", "layer_replication", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip


class AdapterSpec(ShortSection, short="kind"):
    """Low-rank adapters (LoRA) beside the linear layers of a trained model, whose own weights are frozen. `adapter:
    lora` is short for `adapter: {kind: lora}`, and `adapter: qlora` for `adapter: {kind: lora, base: nf4}`."""

    kind: Kind = setting(
        "lora",
        "lora; rslora (scaled by alpha / sqrt(rank)); dora (also trains the length of each row); pissa (starts from "
        "the largest singular vectors of each matrix); ia3 (factors of keys, values and ffn units); prompt (trained "
        "embeddings before every document) or prefix (trained keys and values in every layer); auto: full fine-tuning, "
        "lora, or lora with base: nf4, the first that fits the memory",
        "dora",
    )
    base: Base = setting(
        "full",
        "how the frozen linear layers are held: full (as memory.weights), or nf4 (QLoRA: 4.127 bits a weight, with "
        "double quantization)",
        "nf4",
    )
    rank: AutoRank = setting("auto", "rank of each adapter", 16)
    alpha: AutoAlpha = setting("auto", "the adapter's output is scaled by alpha / rank", 32)
    dropout: float = setting(0.0, "dropout of the adapter's input", 0.05, ge=0, lt=1)
    virtual_tokens: int = setting(20, "virtual tokens of prompt and prefix", 50, ge=1, le=4096)
    targets: Literal["all-linear"] | list[str] = setting(
        "all-linear",
        "adapted layers: all-linear (of all blocks, without routers), or names, layers and globs",
        ["query", "value", "blocks.8-15.ffn"],
    )
    modules_to_save: list[Literal["embedding", "head"]] = setting(
        [], "modules that are trained in full: embedding, head", ["embedding", "head"]
    )
    lr_ratio: float = setting(1.0, "learning rate of the B matrices as a factor (LoRA+)", 16, gt=0, le=1000)
    path: str | None = setting(
        None,
        "adapter to start from: a folder in PEFT's format, which decides kind, rank, alpha and targets",
        "my-adapter/",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_qlora(cls, value: Any) -> Any:
        section = {"kind": value} if isinstance(value, str) else value
        if not isinstance(section, dict) or section.get("kind") != "qlora":
            return value
        if section.get("base", "nf4") != "nf4":
            raise ValueError("qlora has base: nf4: remove base, or write kind: lora")
        return {**section, "kind": "lora", "base": "nf4"}

    @model_validator(mode="after")
    def _check_auto(self) -> AdapterSpec:
        if self.kind == "auto" and (self.path or self.base != "full"):
            raise ValueError(f"auto chooses kind and base: remove {'path' if self.path else 'base'}, or kind: auto")
        return self

    @model_validator(mode="after")
    def _check_ia3(self) -> AdapterSpec:
        of_matrices = {
            "rank": self.rank != "auto", "alpha": self.alpha != "auto", "dropout": self.dropout > 0,
            "lr_ratio": self.lr_ratio != 1,
        }  # fmt: skip
        if self.kind == "ia3" and any(of_matrices.values()):
            raise ValueError(f"ia3 trains factors, not matrices: remove {next(k for k, v in of_matrices.items() if v)}")
        of_layers = of_matrices | {
            "targets": self.targets != "all-linear",
            "modules_to_save": bool(self.modules_to_save),
        }
        if self.kind in VIRTUAL and (key := next((k for k, v in of_layers.items() if v), None)):
            raise ValueError(f"{self.kind} trains virtual tokens, no layers: remove {key}")
        if self.kind not in VIRTUAL and not self.path and self.virtual_tokens != 20:
            raise ValueError(f"virtual_tokens are those of prompt and prefix, not of {self.kind}: remove them")
        return self

    @model_validator(mode="after")
    def _check_path(self) -> AdapterSpec:
        if self.path and self.kind == "pissa":
            raise ValueError("pissa starts from the base's own matrices: remove path, or write kind: lora")
        if self.path and (self.targets != "all-linear" or self.modules_to_save):
            raise ValueError("the folder of path names the layers: remove targets and modules_to_save")
        if self.targets == []:
            raise ValueError("no layer is adapted: write targets: all-linear, or names such as [query, value]")
        return self

    def scale(self, rank: int, alpha: float) -> float:
        """The factor on the adapter's output."""
        return float(alpha / (rank**0.5 if self.kind == "rslora" else rank))


def read_peft_config(path: str | Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter; UserError if it is another kind of adapter."""
    file = Path(os.path.expanduser(path)) / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path}: is not an adapter's folder (no {ADAPTER_CONFIG})") from None
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type") not in PEFT_KINDS:
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError(f"{file}: peft_type {kind!r}: only {', '.join(PEFT_KINDS)} can be read")
    if PEFT_KINDS[config["peft_type"]] in VIRTUAL and not isinstance(config.get("num_virtual_tokens"), int):
        raise UserError(f"{file}: has no num_virtual_tokens: save the adapter with PEFT again")
    if config["peft_type"] == "PREFIX_TUNING" and config.get("prefix_projection") and not config.get("inference_mode"):
        raise UserError(f"{file}: prefix_projection: the adapter still has its projection: save it with PEFT first")
    if config.get("bias", "none") != "none":
        raise UserError(f"{file}: bias {config['bias']!r}: only adapters without trained biases can be read")
    if str(init := config.get("init_lora_weights")).startswith(_CHANGED_BASE):
        raise UserError(
            f"{file}: init_lora_weights {init!r}: the adapter is for a changed base: save it with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...), which makes it one for the base itself"
        )
    if other := next((key for key in _OTHER_FUNCTIONS if config.get(key)), None):
        raise UserError(f"{file}: {other} {config[other]!r}: only plain LoRA, rsLoRA and DoRA can be read")
    return config


def read_peft(adapter: AdapterSpec) -> AdapterSpec:
    """The section with the kind, rank and alpha of the folder that it names; itself if it names none."""
    if adapter.path is None:
        return adapter
    config = read_peft_config(adapter.path)
    if (held := PEFT_KINDS[config["peft_type"]]) != "lora":
        if adapter.kind not in ("lora", held):
            problem = f"{adapter.kind} was requested, {adapter.path} holds {held}"
            raise UserError(f"adapter.kind: {problem}: write kind: {held}")
        tokens = {"virtual_tokens": int(config["num_virtual_tokens"])} if held in VIRTUAL else {}
        return adapter.model_copy(update={"kind": held, **tokens})
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    if config.get("use_dora") and config.get("use_rslora"):
        raise UserError(f"adapter.path: {adapter.path} has both use_dora and use_rslora: merge it with PEFT first")
    if adapter.kind not in ("lora", kind):
        raise UserError(f"adapter.kind: {adapter.kind} was requested, {adapter.path} holds {kind}: write kind: {kind}")
    for key, other in (("rank_pattern", adapter.rank), ("alpha_pattern", adapter.alpha)):
        if config.get(key):
            raise UserError(f"adapter.path: {adapter.path} has {key} ({other}): only one rank and alpha can be trained")
    for key, value in (("rank", config["r"]), ("alpha", config["lora_alpha"])):
        if getattr(adapter, key) not in ("auto", value):
            raise UserError(f"adapter.{key}: {getattr(adapter, key)}, but that of {adapter.path} is {value}: remove it")
    return adapter.model_copy(update={"kind": kind, "rank": config["r"], "alpha": float(config["lora_alpha"])})


MODULES = ("q", "k", "v", "o", "gate", "up", "down")


def matrix_sides(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(d_in, d_out) of each matrix of a layer."""
    width, inner, kv = shape.width, shape.attention_width, shape.kv_heads * shape.head_dim
    sides = {"q": (width, inner), "k": (width, kv), "v": (width, kv), "o": (inner, width)}
    if shape.gated:
        sides["gate"] = (width, shape.ffn)
    return sides | {"up": (width, shape.ffn), "down": (shape.ffn, width)}


def lora_parameters(shape: ModelShape, rank: int, modules: tuple[str, ...] = MODULES) -> int:
    """Trained parameters: the sum of r (d_in + d_out) over the adapted matrices of all layers."""
    if rank < 1:
        raise UserError(f"rank: {rank} is no rank: write at least 1, such as 16")
    sides = matrix_sides(shape)
    return shape.layers * rank * sum(sum(sides[name]) for name in modules if name in sides)


def quantized_parameters(shape: ModelShape) -> int:
    """Weights that `base: nf4` holds in 4 bits: linear layers of all blocks, without routers and stacked experts."""
    counts = parameter_counts(shape)
    return sum(counts.get(part, 0) for part in ("attention", "state space", "feed-forward", "shared experts"))


USUAL_RANK = 32  # for estimates before the rank is decided


def adapter_share(shape: ModelShape, adapter: AdapterSpec) -> float:
    """Trained parameters as a share of the model's, with adapters on all matrices: an upper bound for fewer targets."""
    rank = USUAL_RANK if adapter.rank == "auto" else adapter.rank
    modules = len(set(adapter.modules_to_save)) * shape.vocab * shape.width
    return min(1.0, (lora_parameters(shape, rank) + modules) / shape.parameters)
