"""Classifiers as transformers has them: XForSequenceClassification and XForTokenClassification of a native family.

A classifier is a `Decoder` whose shape has labels (`spec.classify.as_classifier`): its head has a row for each label.
`ClassifierFamily` maps all of its weights, `HeadlessFamily` only those of the body, for a new head on a language model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.model.families.llama import linear
from bessemer.model.families.registry import Config, Family, WeightMapping, families_for, family_of, read_shape, rename
from bessemer.spec.shape import ModelShape

ClassifierKind = Literal["sequence", "token"]
HEAD = ("head.", "head_bias", "transform.")  # beginnings of the names of a classifier's own weights
PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "regression": "regression"}


def without_head(shape: ModelShape) -> ModelShape:
    """The same shape without the layers between hidden states and logits."""
    return replace(shape, tied=True, head_transform=False, head_bias=False, labels=0, pooler=False)


_CLASSES: dict[ClassifierKind, str] = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
# Their token classifiers call the last layer `classifier`; other families, and their sequence classifiers, `score`.
_OLDER = ("gpt2", "gpt_neox", "bloom", "falcon")


@dataclass(frozen=True)
class HeadlessFamily:
    """A family without its head."""

    family: Family

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.family.architectures

    @property
    def ignored(self) -> tuple[str, ...]:
        return (*self.family.ignored, r"^(lm_head|cls|embed_out|score|classifier|bert\.pooler)\.")

    def shape(self, config: Config) -> ModelShape:
        return without_head(self.family.shape(config))

    def config(self, shape: ModelShape) -> dict[str, Any]:
        return self.family.config(shape)

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from self.family.weight_mappings(without_head(shape))


@dataclass(frozen=True)
class ClassifierFamily(HeadlessFamily):
    """A family with a head of labels instead of its own."""

    kind: ClassifierKind
    labels: int = 2
    names: tuple[str, ...] = field(default=(), compare=False)
    problem: str = field(default="single", compare=False)

    @property
    def architectures(self) -> tuple[str, ...]:
        stem = self.family.architectures[0].split("For")[0].removesuffix("LMHeadModel")
        return (stem + _CLASSES[self.kind],)

    @property
    def has_pooler(self) -> bool:
        return self.name == "bert" and self.kind == "sequence"

    @property
    def has_bias(self) -> bool:
        return self.name == "bert" or self.kind == "token"

    def shape(self, config: Config) -> ModelShape:
        body = replace(super().shape(config), tied=False, logit_cap=None, logit_scale=1.0)
        return replace(body, labels=self.labels, pooler=self.has_pooler, head_bias=self.has_bias)

    def config(self, shape: ModelShape) -> dict[str, Any]:
        names = self.names or tuple(f"LABEL_{i}" for i in range(self.labels))
        more: dict[str, Any] = {
            "architectures": [*self.architectures],
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
        }
        if self.names:
            more["problem_type"] = PROBLEMS[self.problem]
        return self.family.config(with_usual_head(shape, self.family)) | more

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        yield from super().weight_mappings(shape)
        if self.has_pooler:
            yield from linear("bert.pooler.dense", "transform.linear", bias=True)
        older = self.name == "bert" or (self.name in _OLDER and self.kind == "token")
        head = "classifier" if older else "score"
        yield rename(f"{head}.weight", "head.weight")
        if self.has_bias:
            yield rename(f"{head}.bias", "head_bias")


def classifier_family(config: Config) -> ClassifierFamily:
    """The family of a classifier's config.json; UserError if it is not one."""
    named = str((config.get("architectures") or [""])[0])
    for kind, ending in _CLASSES.items():
        if named.endswith(ending):
            labels = len(config.get("id2label") or {}) or config.get("num_labels") or 2
            return ClassifierFamily(family_of({"model_type": config.get("model_type")}), kind, labels)
    raise UserError(
        f"config.json: architectures: {named!r} is neither {' nor '.join('...' + c for c in _CLASSES.values())}"
    )


def read_model(config: Config) -> tuple[Family, ModelShape]:
    """The family and the shape of a config, of a language model or of a classifier of texts or tokens."""
    named = str((config.get("architectures") or [""])[0])
    if not named.endswith(tuple(_CLASSES.values())):
        return read_shape(config)
    family = classifier_family(config)
    return family, family.shape(config)


def body_family(config: Config) -> HeadlessFamily:
    """The family of any folder's body, whether it is a language model or a classifier."""
    return HeadlessFamily(family_of({"model_type": config.get("model_type")}))


def head_of_folder(config: Config, shape: ModelShape) -> ClassifierFamily | None:
    """The family of a folder that is a classifier with the same head as the shape; None for other folders."""
    try:
        family = classifier_family(config)
    except UserError:
        return None
    theirs = family.shape(config)
    same = (theirs.labels, theirs.pooler, theirs.head_bias) == (shape.labels, shape.pooler, shape.head_bias)
    return family if same else None


def with_usual_head(shape: ModelShape, family: Family) -> ModelShape:
    """The shape of a language model with the same body, as a family's config.json needs it."""
    body, bert = without_head(shape), family.name == "bert"
    return replace(body, head_transform=bert, head_bias=bert)


def classifier_families(shape: ModelShape) -> list[Family]:
    """The families that can represent a classifier's body and have its head in transformers."""
    body = without_head(shape)
    able = families_for(replace(body, head_transform=True, head_bias=True)) if not shape.causal else families_for(body)
    return [family for family in able if not (shape.pooler and family.name != "bert")]
