"""The supported families: which one a config.json belongs to, and which ones can represent a native model.

What a model family is: a translation of config.json to a `ModelShape` and back, and of tensors by `WeightMapping`s.

A `WeightMapping` is the smallest group of tensors that translates on its own (for example, a fused QKV matrix and the
three native ones), so converting a checkpoint of any size holds only one mapping in memory. Expected shapes follow from
the mappings applied to meta tensors. Mappings only move numbers, so a round trip is bit-exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from bessemer.errors import UserError
from bessemer.spec.shape import Activation, ModelShape, Rope

# model_type -> object, imported on demand. A native model is exported as the first family that can represent it.
FAMILIES: dict[str, str] = {
    "llama": "llama.LLAMA",
    "qwen3": "llama.QWEN3",
    "qwen2": "llama.QWEN2",
    "mistral": "llama.MISTRAL",
    "olmo2": "llama.OLMO2",
    "phi3": "llama.PHI3",
    "gemma2": "llama.GEMMA2",
    "gemma3_text": "llama.GEMMA3",
    "gpt_neox": "gpt.GPT_NEOX",
    "gpt2": "gpt.GPT2",
    "falcon": "gpt.FALCON",
    "bloom": "gpt.BLOOM",
    "mixtral": "experts_llama.MIXTRAL",
    "qwen3_moe": "experts_llama.QWEN3_MOE",
    "deepseek_v3": "experts_llama.DEEPSEEK_V3",
    "deepseek_v2": "experts_llama.DEEPSEEK_V2",
    "mamba2": "bert_t5_mamba.MAMBA2",
    "bert": "bert_t5_mamba.BERT",
    "t5": "bert_t5_mamba.T5",
}
_CONFIG_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def family_named(model_type: str) -> Family:
    module, name = FAMILIES[model_type].split(".")
    family: Family = getattr(import_module(f"bessemer.model.families.{module}"), name)
    return family


def family_of(config: Config) -> Family:
    """By the architecture in the file; by `model_type` if there is none."""
    kind, named = config.get("model_type"), config.get("architectures")
    named = named if isinstance(named, list) else []
    # The likely family first, so that the others need not be imported.
    for model_type in sorted(FAMILIES, key=lambda name: name != kind):
        family = family_named(model_type)
        if (not named and model_type == kind) or set(named) & set(family.architectures):
            return family
    value = f"architectures: {', '.join(map(str, named))}" if named else f"model_type: {kind!r}"
    supported = ", ".join(family_named(kind).architectures if kind in FAMILIES else FAMILIES)
    raise UserError(f"config.json: {value} is not supported ({supported}); {_suggest_fix(config, named)}")


def needs_wrap(config: Config) -> bool:
    """Whether the model has no native family, but transformers can run it as a causal model."""
    try:
        family_of(config)
    except UserError:
        named = config.get("architectures")
        return _suggest_fix(config, named if isinstance(named, list) else []) == WRAP
    return False


def _suggest_fix(config: Config, named: list[Any]) -> str:
    """What to do with a model of no native family: transformers can run causal ones."""
    if not named or any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in named):
        return WRAP
    if "text_config" in config:
        return "it is multimodal: save its text model separately with transformers"
    return "only models that predict the next token (…ForCausalLM) can be trained through transformers"


def read_shape(config: Config) -> tuple[Family, ModelShape]:
    """The family and the shape of a config. Also reports values of a wrong type in one line."""
    family = family_of(config)
    try:
        shape = family.shape(config)
        if min(shape.vocab, shape.width, shape.layers, shape.heads, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
            raise ValueError("inconsistent sizes")
        return family, shape
    except _CONFIG_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"config.json: no valid {family.name} config ({reason}); download or save it again") from error


def families_for(shape: ModelShape) -> list[Family]:
    """The families that can represent the shape without loss, the preferred one first."""
    able = []
    for family in map(family_named, FAMILIES):
        with suppress(UserError):  # the family cannot express the shape
            able += [] if _lost_fields(shape, family) else [family]
    return able


def nearest_difference(shape: ModelShape) -> str:
    """For the error message: what the nearest family cannot represent."""
    near, refused = [], ""
    for family in map(family_named, FAMILIES):
        try:
            near.append((family.name, _lost_fields(shape, family)))
        except UserError as error:
            refused = refused or str(error)
    if not near:
        return refused
    name, lost = min(near, key=lambda pair: len(pair[1]))
    return f"the nearest is {name}, which cannot hold {', '.join(lost)}"


def _lost_fields(shape: ModelShape, family: Family) -> list[str]:
    """The fields that a round trip through the family's config.json would change. UserError if it refuses the shape."""
    shape = _normalise(shape)
    try:
        restored = _normalise(family.shape(family.config(shape)))
    except _CONFIG_ERRORS as error:  # the shape lacks a part that the family requires, such as experts
        raise UserError(f"{family.name} cannot express it ({error})") from error
    names = [field.name for field in fields(shape)]
    return [f"{name} {getattr(shape, name)!r}" for name in names if getattr(shape, name) != getattr(restored, name)]


def _normalise(shape: ModelShape) -> ModelShape:
    """A canonical form of equivalent shapes: per-layer patterns are spelled out, and fields that the network ignores
    are reset."""
    layers = range(shape.layers)
    changes: dict[str, Any] = {"windows": tuple(map(shape.window, layers)), "mixers": tuple(map(shape.mixer, layers))}
    if shape.moe is not None:  # the balance settings are no part of the model
        group: dict[str, Any] = {"top_groups": 1, "group_score": "max"} if shape.moe.groups == 1 else {}
        changes["moe"] = replace(shape.moe, bias_rate=0.0, capacity=None, balance=0.0, router_z=0.0, **group)
        changes |= {"ffn": shape.moe.ffn} if all(map(shape.has_experts, layers)) else {}
    if shape.mla is not None:
        changes |= {"kv_heads": shape.heads, "head_dim": shape.key_dim}
    if "attention" not in changes["mixers"]:
        changes |= {"heads": 1, "kv_heads": 1, "head_dim": 1, "windows": (0,), "rope": Rope()}
        changes |= {"positions": "none"} if shape.positions == "rope" else {}
    return replace(shape, **changes)


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
