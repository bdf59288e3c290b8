"""The supported families: which one a config.json belongs to, and which ones can represent a native model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import WRAP, Config, Family
from bessemer.spec.shape import ModelShape, Rope

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
