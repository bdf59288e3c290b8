"""The account of a spec: every key that was set away from its default is either written for a framework or noted.

A writer says which keys its files carry and what is different there; what it says nothing of becomes a note by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import yaml
from pydantic import BaseModel

from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

# What is lost with a key that a framework has nothing for. The longest beginning that fits is taken.
LOST = {
    "budget.batch_changes": "the batch keeps its first size",
    "budget.stop": "the run ends with its last step",
    "checkpoint": "saves follow the framework's own rules",
    "data": "the framework reads data its own way",
    "data.clean": "the text was curated when it was prepared; raw files are not",
    "data.mix": "sources are not mixed by our counts",
    "data.phases": "the mixture stays as it begins",
    "dropout": "nothing is dropped",
    "evaluate": "held-out data is not evaluated",
    "guard": "no step is judged before its update, none is vetoed, rolled back or tried",
    "loss": "the plain cross-entropy is minimised",
    "loss_scale": "the framework scales fp16 by itself",
    "memory": "the framework keeps weights and moments its own way",
    "model": "the network there has no such part: IT IS ANOTHER MODEL",
    "model.init": "learning rates are not scaled by width (muP)",
    "observe": "shown as the framework shows it",
    "optimizer": "the optimizer there has no such setting",
    "optimizer.ema": "weights are not averaged",
    "optimizer.freeze": "everything trains",
    "optimizer.layer_decay": "all layers have one learning rate",
    "optimizer.veto": "no update is withheld",
    "parallel": "not laid out so",
    "tasks": "only the next token is learnt",
}
# True of every framework, whatever the spec says.
ALWAYS = (
    "guard: Bessemer's judge is not there: a bad step is not withheld, rolled back, tried or reported",
    "provenance: batches are not traced back to files and rows, and past steps do not replay",
    "checkpoint: no manifest is verified; saves are the framework's own",
)
NO_TRACE = {"name", "runs", "lints.silence"}  # say where our own files lie, and what we are not to say
DEFAULT = ModelShape(0, 0, 0, 0, 0, 0, 0)


def written_keys(spec: RunSpec) -> dict[str, Any]:
    """Every key that differs from its default, by its dotted name."""
    found: dict[str, Any] = {}

    def walk(value: Any, default: Any, key: str) -> None:
        if isinstance(value, BaseModel):
            blank = default if isinstance(default, BaseModel) else None
            for name, field in type(value).model_fields.items():
                usual = getattr(blank, name) if blank else field.get_default(call_default_factory=True)
                walk(getattr(value, name), usual, f"{key}.{name}" if key else name)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                walk(item, None, f"{key}.{name}")
        elif value != default:
            found[key] = value

    walk(spec, None, "")
    return {key: value for key, value in found.items() if key not in NO_TRACE}


class Ledger:
    """What a framework's files say of a spec, and what they do not."""

    def __init__(self, spec: RunSpec, framework: str) -> None:
        self.framework, self.written = framework, written_keys(spec)
        self._covered: list[str] = []
        self._noted: dict[str, str] = {}

    def covers(self, *keys: str) -> None:
        """The files carry these keys, and all below them; `*` stands for any name."""
        self._covered += keys

    def differs(self, key: str, how: str) -> None:
        """Something that a user must know, whether the key was written or not."""
        self._noted[key] = f"{self._noted[key]}; {how}" if key in self._noted else how

    def shape(self, shape: ModelShape, holds: Iterable[str]) -> None:
        """Cover the model, but for those of its properties that the framework's network does not hold."""
        self.covers("model")
        for field in fields(ModelShape):
            value = getattr(shape, field.name)
            if field.name not in holds and value != getattr(DEFAULT, field.name) and field.name != "wrapped_parameters":
                self.differs(f"model.{field.name}", f"{_short(value)} has no counterpart: {LOST['model']}")

    def notes(self) -> list[str]:
        """One line each: what is always so, what differs, and what has no counterpart."""
        left = {
            key: f"{_short(value)} has no counterpart in {self.framework}: {_lost(key)}"
            for key, value in self.written.items()
            if key not in self._noted and not self._is_covered(key)
        }
        return [*ALWAYS, *(f"{key}: {how}" for key, how in (self._noted | left).items())]

    def _is_covered(self, key: str) -> bool:
        return any(fnmatchcase(key, known) or fnmatchcase(key, f"{known}.*") for known in self._covered)


def _lost(key: str) -> str:
    known = [start for start in LOST if key == start or key.startswith(f"{start}.")]
    return LOST[max(known, key=len)] if known else "left out"


def _short(value: Any) -> str:
    if isinstance(value, list):
        value = [item.model_dump(exclude_defaults=True) if isinstance(item, BaseModel) else item for item in value]
    elif not isinstance(value, (str, int, float, bool, type(None))):
        return str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 120 else f"{text[:117]}..."
