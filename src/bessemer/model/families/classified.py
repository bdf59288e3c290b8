"""Families under a classification head: XForSequenceClassification and XForTokenClassification of Hugging Face.

A folder of such a class loads whole, into a `Classifier`, with `Classified`; of a language model's folder `Headless`
loads what belongs to the body, and the classes begin anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bessemer.errors import UserError
from bessemer.model.classifier import Kind, headless
from bessemer.model.families.family import Config, Family, Piece, same
from bessemer.model.families.llama import linear
from bessemer.model.families.registry import family_of
from bessemer.spec.shape import ModelShape

_CLASSES: dict[Kind, str] = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
# These call the last layer `classifier` where the others, and their own sequence classes, say `score`.
_OLDER = ("gpt2", "gpt_neox", "bloom", "falcon")


@dataclass(frozen=True)
class Headless:
    """A family as far as the hidden states."""

    whole: Family

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.whole.architectures

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self.whole.ignored, r"^(lm_head|cls|embed_out|score|classifier|bert\.pooler)\.")

    def shape(self, config: Config) -> ModelShape:
        return headless(self.whole.shape(config))

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return self.whole.config(shape)

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        yield from self.whole.pieces(headless(shape))


@dataclass(frozen=True)
class Classified(Headless):
    """`shape` is the body's; the number of labels is part of the family, as no shape has it."""

    kind: Kind
    labels: int = 2

    @property
    def architectures(self) -> tuple[str, ...]:
        stem = self.whole.architectures[0].split("For")[0].removesuffix("LMHeadModel")
        return (stem + _CLASSES[self.kind],)

    @property
    def has_pooler(self) -> bool:
        return self.name == "bert" and self.kind == "sequence"

    def config(self, shape: ModelShape) -> dict[str, Any]:
        names = {str(i): f"LABEL_{i}" for i in range(self.labels)}
        more = {"architectures": [*self.architectures], "id2label": names}
        return self.whole.config(shape) | more | {"label2id": {name: int(i) for i, name in names.items()}}

    def pieces(self, shape: ModelShape) -> Iterator[Piece]:
        for piece in super().pieces(shape):
            yield replace(piece, ours=tuple(f"body.{name}" for name in piece.ours))
        if self.has_pooler:
            yield from linear("bert.pooler.dense", "pooler", bias=True)
        older = self.name == "bert" or (self.name in _OLDER and self.kind == "token")
        head = "classifier" if older else "score"
        yield same(f"{head}.weight", "score.weight")
        if self.name == "bert" or self.kind == "token":
            yield same(f"{head}.bias", "score.bias")


def classified(config: Config) -> Classified:
    """What the file of a classifier says; UserError if it is none."""
    named = str((config.get("architectures") or [""])[0])
    for kind, ending in _CLASSES.items():
        if named.endswith(ending):
            labels = len(config.get("id2label") or {}) or config.get("num_labels") or 2
            return Classified(family_of({"model_type": config.get("model_type")}), kind, labels)
    raise UserError(
        f"config.json: architectures: {named!r} is no {' and no '.join('...' + c for c in _CLASSES.values())}"
    )
