"""The families we know: which one a config.json belongs to, and which ones can hold a native model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from bessemer.errors import UserError
from bessemer.model.families.family import WRAP, Config, Family
from bessemer.spec.shape import ModelShape, Rope

# model_type -> its object, imported when it is needed. A native model is exported as the first that can hold it.
FAMILIES: dict[str, str] = {
    "llama": "llama.LLAMA",
    "qwen3": "llama.QWEN3",
    "qwen2": "llama.QWEN2",
    "mistral": "llama.MISTRAL",
    "olmo2": "llama.OLMO2",
    "phi3": "llama.PHI3",
    "gemma2": "gemma.GEMMA2",
    "gemma3_text": "gemma.GEMMA3",
    "gpt_neox": "gpt.GPT_NEOX",
    "gpt2": "gpt.GPT2",
    "falcon": "gpt.FALCON",
    "bloom": "gpt.BLOOM",
    "mixtral": "experts_llama.MIXTRAL",
    "qwen3_moe": "experts_llama.QWEN3_MOE",
    "deepseek_v3": "experts_llama.DEEPSEEK_V3",
    "deepseek_v2": "experts_llama.DEEPSEEK_V2",
    "mamba2": "mamba2.MAMBA2",
    "bert": "encoders.BERT",
    "t5": "encoders.T5",
}
_WRONG_KIND = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def family_named(model_type: str) -> Family:
    module, name = FAMILIES[model_type].split(".")
    family: Family = getattr(import_module(f"bessemer.model.families.{module}"), name)
    return family


def family_of(config: Config) -> Family:
    """By the class that wrote the file; by `model_type` if it names none."""
    kind, named = config.get("model_type"), config.get("architectures")
    named = named if isinstance(named, list) else []
    # The likely one first: the others need not be imported.
    for model_type in sorted(FAMILIES, key=lambda known: known != kind):
        family = family_named(model_type)
        if (not named and model_type == kind) or set(named) & set(family.architectures):
            return family
    what = f"architectures: {', '.join(map(str, named))}" if named else f"model_type: {kind!r}"
    known = ", ".join(family_named(kind).architectures if kind in FAMILIES else FAMILIES)
    raise UserError(f"config.json: {what} is none of those we know ({known}); {_way_out(config, named)}")


def _way_out(config: Config, named: list[Any]) -> str:
    """What can be done with a model of no native family: transformers itself runs causal ones."""
    if not named or any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in named):
        return WRAP
    if "text_config" in config:
        return "it reads more than text: save its text part as a model of its own, with transformers"
    return "only models that predict the next token (…ForCausalLM) can be trained through transformers"


def read_shape(config: Config) -> tuple[Family, ModelShape]:
    """The family and the shape that it reads. Values of a wrong kind are told in one line, too."""
    family = family_of(config)
    try:
        shape = family.shape(config)
        if min(shape.vocab, shape.width, shape.layers, shape.heads, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
            raise ValueError("sizes that do not go together")
        return family, shape
    except _WRONG_KIND as error:
        what = f"is no configuration of {family.name} ({type(error).__name__}: {error})"
        raise UserError(f"config.json: {what}; download or save it again") from error


def families_for(shape: ModelShape) -> list[Family]:
    """Those that can hold the shape without loss, the preferred one first."""
    found = []
    for family in map(family_named, FAMILIES):
        with suppress(UserError):  # says that it cannot
            found += [] if _lost(shape, family) else [family]
    return found


def nearest_difference(shape: ModelShape) -> str:
    """For the message when there is none: what the nearest family cannot hold."""
    near, refused = [], ""
    for family in map(family_named, FAMILIES):
        try:
            near.append((family.name, _lost(shape, family)))
        except UserError as error:
            refused = refused or str(error)
    if not near:
        return refused
    name, lost = min(near, key=lambda found: len(found[1]))
    return f"the nearest is {name}, which cannot hold {', '.join(lost)}"


def _lost(shape: ModelShape, family: Family) -> list[str]:
    """What a trip through the family's config.json would change. UserError if it refuses the trip."""
    shape = _spelled_out(shape)
    try:
        found = _spelled_out(family.shape(family.config(shape)))
    except _WRONG_KIND as error:  # it lacks a part that all of the family have, experts for instance
        raise UserError(f"{family.name} cannot say it ({error})") from error
    names = [field.name for field in fields(shape)]
    return [f"{name} {getattr(shape, name)!r}" for name in names if getattr(shape, name) != getattr(found, name)]


def _spelled_out(shape: ModelShape) -> ModelShape:
    """One model may be said in several ways: patterns go layer by layer, and what the network does not read is even."""
    layers = range(shape.layers)
    same: dict[str, Any] = {"windows": tuple(map(shape.window, layers)), "mixers": tuple(map(shape.mixer, layers))}
    if shape.moe is not None:  # how its balance was trained is no part of the model
        group: dict[str, Any] = {"top_groups": 1, "group_score": "max"} if shape.moe.groups == 1 else {}
        same["moe"] = replace(shape.moe, bias_rate=0.0, capacity=None, balance=0.0, router_z=0.0, **group)
        same |= {"ffn": shape.moe.ffn} if all(map(shape.has_experts, layers)) else {}
    if shape.mla is not None:
        same |= {"kv_heads": shape.heads, "head_dim": shape.key_dim}
    if "attention" not in same["mixers"]:
        same |= {"heads": 1, "kv_heads": 1, "head_dim": 1, "windows": (0,), "rope": Rope()}
        same |= {"positions": "none"} if shape.positions == "rope" else {}
    return replace(shape, **same)
