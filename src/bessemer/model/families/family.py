"""What a model family is: a translation of config.json to a `ModelShape` and back, and of tensors by `WeightMapping`s.

A `WeightMapping` is the smallest group of tensors that translates on its own (for example, a fused QKV matrix and the
three native ones), so converting a checkpoint of any size holds only one mapping in memory. Expected shapes follow from
the mappings applied to meta tensors. Mappings only move numbers, so a round trip is bit-exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from bessemer.errors import UserError
from bessemer.spec.shape import Activation, ModelShape, Rope

if TYPE_CHECKING:  # configs are translated without torch
    from torch import Tensor

Config = Mapping[str, Any]
WRAP = "`model: {hf: PATH, wrap: true}` trains it through transformers"
Translate = Callable[[list["Tensor"]], list["Tensor"]]


def _identity(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


@dataclass(frozen=True)
class WeightMapping:
    """Tensors by their Hugging Face names, by their native names, and the conversion between them."""

    hf_names: tuple[str, ...]
    native_names: tuple[str, ...]
    to_native: Translate = _identity
    to_hf: Translate = _identity


def rename(hf: str, native: str) -> WeightMapping:
    return WeightMapping((hf,), (native,))


def layers(shape: ModelShape, prefix: str) -> Iterator[tuple[str, str]]:
    """The prefixes of each layer's Hugging Face and native names."""
    return ((f"{prefix}.{i}", f"blocks.{i}") for i in range(shape.layers))


def transposed(hf: str, native: str) -> WeightMapping:
    """GPT-2 stores linear weights transposed."""

    def transpose(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].t().contiguous()]

    return WeightMapping((hf,), (native,), transpose, transpose)


def fused(hf: str, native: tuple[str, ...], sizes: tuple[int, ...], dim: int = 0) -> WeightMapping:
    """One Hugging Face tensor is the concatenation of several native ones."""

    def split(tensors: list[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in tensors[0].split(sizes, dim)]

    def join(tensors: list[Tensor]) -> list[Tensor]:
        import torch

        return [torch.cat(tensors, dim)]

    return WeightMapping((hf,), native, split, join)


class Family(Protocol):
    """One architecture of Hugging Face."""

    @property
    def name(self) -> str:
        """config.json's model_type."""
        ...

    @property
    def architectures(self) -> tuple[str, ...]:
        """Class names; exports write the first."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of superfluous tensors in older files."""
        ...

    def shape(self, config: Config) -> ModelShape:
        """Raises UserError, naming the key, for a config that the native model does not support."""
        ...

    def config(self, shape: ModelShape) -> dict[str, Any]:
        """The inverse of `shape`, as far as the family can express it; exporters check that
        `family.shape(family.config(shape)) == shape`."""
        ...

    def weight_mappings(self, shape: ModelShape) -> Iterable[WeightMapping]:
        """Covers every tensor of both sides once, except a tied head."""
        ...


def read_keys(values: Config, keys: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a `ModelShape`; `keys` maps config.json's keys to fields."""
    return {field: values[key] for key, field in keys.items()}


def write_keys(family: Family, shape: ModelShape, keys: Mapping[str, str]) -> dict[str, Any]:
    """The inverse of `read_keys`, with the family's architecture and model_type."""
    config = {"architectures": [family.architectures[0]], "model_type": family.name}
    return config | {key: getattr(shape, field) for key, field in keys.items()}


# Keys that most decoders and BERT share.
COMMON_KEYS = {
    "vocab_size": "vocab", "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "intermediate_size": "ffn", "max_position_embeddings": "max_positions", "tie_word_embeddings": "tied",
}  # fmt: skip


def refuse(config: Config, key: str, *allowed: Any, why: str = "the native model does not support it") -> None:
    """Raises unless the key is absent or has one of the allowed values."""
    if key in config and config[key] not in (*allowed, None):
        fix = "" if config.get("model_type") in ("bert", "t5") else f"; {WRAP}"  # only causal models can be wrapped
        raise UserError(f"config.json: {key}: {config[key]!r} is not supported ({why}){fix}")


def need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"config.json: {key} is missing: the configuration is incomplete")
    return config[key]


ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu", "relu2": "relu2",
}  # fmt: skip


def activation(config: Config, key: str) -> Activation:
    name = need(config, key)
    if name not in ACTIVATION_NAMES:
        raise UserError(f"config.json: {key}: {name!r} is not one of {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[name]


def read_rope(config: Config, parameters: Mapping[str, Any] | None = None) -> Rope:
    """Reads both forms: `rope_theta` with `rope_scaling`, and `rope_parameters` (transformers 5).

    Only the keys that a kind of scaling uses are read, so that equal positions give equal `Rope`s.
    """
    values = {**(config.get("rope_scaling") or {}), **(parameters or config.get("rope_parameters") or {})}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _SCALINGS:
        raise UserError(f"config.json: rope scaling {kind!r} is not one of {', '.join(_SCALINGS)}")
    theta: float = values.get("rope_theta") or config.get("rope_theta") or 10_000.0
    share: float = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rope = Rope(theta=float(theta), share=float(share), scaling=_SCALINGS[kind])
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=float(need(values, "factor")))
    longest = int(need(config, "max_position_embeddings"))
    if kind == "dynamic":  # transformers uses this, whatever else the file says
        return replace(rope, factor=float(need(values, "factor")), original=longest)
    key = "original_max_position_embeddings"  # takes precedence at the top level (Phi-3)
    original = int(config.get(key) or values.get(key) or longest)
    rope = replace(rope, original=original, factor=float(values.get("factor") or longest / original))
    if kind == "llama3":
        low, high = float(need(values, "low_freq_factor")), float(need(values, "high_freq_factor"))
        return replace(rope, low_freq=low, high_freq=high)
    rope = replace(rope, attention_factor=values.get("attention_factor"))
    if kind == "yarn":
        return replace(
            rope, beta_fast=float(values.get("beta_fast") or 32.0), beta_slow=float(values.get("beta_slow") or 1.0),
            truncate=bool(values.get("truncate", True)), mscale=float(values.get("mscale") or 0.0),
            mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
        )  # fmt: skip
    return replace(rope, short=tuple(need(values, "short_factor")), long=tuple(need(values, "long_factor")))


_SCALINGS: dict[str, Any] = {
    "default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "longrope": "longrope",
    "su": "longrope", "llama3": "llama3",
}  # fmt: skip


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which all versions of transformers and other readers understand."""
    config: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.share != 1.0:
        config["partial_rotary_factor"] = rope.share
    if rope.scaling == "none":
        return config
    if rope.scaling == "ntk":  # equal to another base, which the exporter writes
        raise UserError("rope scaling ntk cannot be expressed in config.json: write its theta instead")
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling != "linear":
        scaling["original_max_position_embeddings"] = rope.original
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {key: getattr(rope, key) for key in ("mscale", "mscale_all_dim") if getattr(rope, key)}
    if rope.scaling == "longrope":
        scaling |= {"short_factor": list(rope.short), "long_factor": list(rope.long)}
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    return config | {"rope_scaling": scaling}
