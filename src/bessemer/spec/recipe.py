"""`recipe: compatible`: settings that reach a loss in less time, as defaults of keys that the spec leaves out.

Every one can be exported: the architecture is that of Qwen3. What each brings is in docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.spec.schema import RunSpec

COMPATIBLE: dict[str, dict[str, Any]] = {
    "model": {"qk_norm": "head", "init": "zero", "tied": False},
    "optimizer": {"name": "muon"},
    "schedule": {"kind": "linear", "floor": 0.0},
}
MUON = {"cautious": True}


def expand_recipe(spec: dict[str, Any]) -> dict[str, Any]:
    """The sections of a spec with the recipe's settings where they leave them out."""
    if spec.get("recipe") != "compatible":
        return spec
    expanded = dict(spec)
    for name, defaults in COMPATIBLE.items():
        section = {"preset": spec[name]} if isinstance(spec.get(name), str) else spec.get(name, {})
        if isinstance(section, Mapping):
            expanded[name] = defaults | dict(section)
    optimizer = expanded.get("optimizer")
    if isinstance(optimizer, dict) and optimizer["name"] == "muon" and isinstance(optimizer.get("muon", {}), Mapping):
        optimizer["muon"] = MUON | dict(optimizer.get("muon", {}))
    if isinstance(schedule := expanded.get("schedule"), dict) and schedule["kind"] == "exponential":
        schedule["floor"] = dict(spec.get("schedule", {})).get("floor", 0.1)  # which never reaches 0
    return expanded


def recipe_problems(spec: RunSpec) -> Iterator[str]:
    """Why the recipe does not apply to a spec."""
    if spec.recipe == "standard":
        return
    if spec.objective != "pretrain" or spec.start_from or spec.model.hf:
        yield "compatible is for pre-training from random weights: remove this"
    elif spec.model.moe or spec.model.mla or spec.model.mamba or spec.model.init == "mup":
        yield "compatible is for dense models without latent attention, state spaces or muP: remove this"
