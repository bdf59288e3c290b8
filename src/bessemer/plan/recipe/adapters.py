"""Decides the rank, alpha and learning rate of a run's adapters by the rules of fine_tuning.py."""

from __future__ import annotations

from dataclasses import replace

from bessemer.plan.decision import Plan, RecipeAnswer
from bessemer.plan.recipe.fine_tuning import LORA_FACTOR, SCHULMAN, LoraSettings, Use, lora
from bessemer.spec.adapter import read_peft
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

USES: dict[str, Use] = {
    "pretrain": "domain",
    "classify": "style",
    **dict.fromkeys(RL_OBJECTIVES, "rl"),
}  # others learn to follow instructions
RSLORA = "Kalajdzievski 2023, rsLoRA"
PISSA = "Meng et al. 2024, PiSSA"
IA3, IA3_RATE = "Liu et al. 2022, IA3", 3e-3
RATES, VIRTUAL_RATE = {"prompt": 3e-2, "prefix": 1e-2}, "PEFT's examples"


def decide_adapter(
    spec: RunSpec, shape: ModelShape, learnt_tokens: int, plan: Plan, previous: Plan | None = None
) -> tuple[int, float] | None:
    """Rank and alpha; None for a run without adapters. A resumed run keeps those of its first start."""
    if spec.adapter is None:
        return None
    adapter, key = read_peft(spec.adapter), "adapter.rank"
    if adapter.kind in ("ia3", *RATES):  # have neither
        return 1, 1.0
    recipe = lora(shape, USES.get(spec.objective, "instructions"), 0.0, learnt_tokens)
    recipe = _fit(recipe, shape) if adapter.kind == "pissa" else recipe
    rank = plan.keep(key, adapter.rank, previous)
    if rank is None and spec.adapter.path:
        rank = plan.add(key, adapter.rank, f"that of {spec.adapter.path}", "model")
    elif rank is None:
        rank = plan.choose(key, adapter.rank, (recipe.value.rank, recipe.reason, recipe.source), recipe.basis)
    alpha = plan.keep("adapter.alpha", adapter.alpha, previous)
    if alpha is None:
        decided = {
            "rslora": (2 * int(rank) ** 0.5, "scales by alpha / sqrt(rank) = 2, as LoRA's", RSLORA),
            "pissa": (float(rank), "scales by 1: the factors have the size of the matrix", PISSA),
        }.get(adapter.kind, (2.0 * int(rank), "twice the rank", SCHULMAN))
        alpha = plan.choose("adapter.alpha", adapter.alpha, decided, recipe.basis)
    return int(rank), float(alpha)


def _fit(recipe: RecipeAnswer[LoraSettings], shape: ModelShape) -> RecipeAnswer[LoraSettings]:
    """A rank that every matrix has."""
    rank = min(recipe.value.rank, shape.kv_heads * shape.head_dim, shape.width)
    return replace(recipe, value=replace(recipe.value, rank=rank))


def adapter_rate(spec: RunSpec, rate: float, reason: str, source: str) -> tuple[float, str, str]:
    """The learning rate of a run from that of full fine-tuning, with reason and source."""
    if spec.adapter is None:
        return rate, reason, source
    kind = read_peft(spec.adapter).kind
    if kind == "pissa":
        return rate, f"{reason}; pissa takes the rate of full training", f"{source}; {PISSA}"
    if kind == "ia3":
        return IA3_RATE, "usual for factors of activations", IA3
    if kind in RATES:
        return RATES[kind], f"usual for {kind} tuning", VIRTUAL_RATE
    value = float(f"{LORA_FACTOR * rate:.2g}")
    return value, f"{reason}; ten times that for adapters", f"{source}; {SCHULMAN}"
