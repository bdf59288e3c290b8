"""Classification heads on a native model, per text or per token, and their mapping to Hugging Face's
XForSequenceClassification and XForTokenClassification.

`ClassifierFamily` loads a full classifier folder into a `Classifier`; `HeadlessFamily` loads only the body of a
language model's folder, for a new head. Legend: B batch, T time, W width, D documents in the batch, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.llama import linear
from bessemer.model.families.registry import Config, Family, WeightMapping, family_of, rename
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape

ClassifierKind = Literal["sequence", "token"]
Pool = Literal["first", "last", "mean"]


def without_head(shape: ModelShape) -> ModelShape:
    """The same shape without the layers between hidden states and logits."""
    return replace(shape, tied=True, head_transform=False, head_bias=False)


class Classifier(nn.Module):
    """`body` has a shape from `without_head`. `hidden` adds BERT's pooler: a layer and a tanh before the classes. As in
    transformers, the last layer has a bias except with last-token pooling."""

    def __init__(
        self, body: Decoder, labels: int, kind: ClassifierKind = "sequence", pool: Pool = "last", hidden: bool = False
    ) -> None:
        super().__init__()
        self.body, self.shape, self.kind, self.pool, self.dropout = body, body.shape, kind, pool, 0.0
        width = body.shape.width
        self.pooler = nn.Linear(width, width) if hidden else None
        self.score = nn.Linear(width, labels, bias=kind == "token" or pool != "last")

    def forward(
        self, tokens_BT: Tensor, attention_mask: AttentionMask | None = None, types_BT: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, L) per token, or (D, L) per text: one per document in row order, or one per row without
        documents. Padding must have the document number -1."""
        x = self.body(tokens_BT, attention_mask, types_BT=types_BT)
        if self.kind == "sequence":
            x = pool_documents(x, attention_mask.documents_BT if attention_mask else None, self.pool)
        if self.pooler is not None:
            x = torch.tanh(self.pooler(x))
        return self.score(F.dropout(x, self.dropout, self.training))


def pool_documents(x_BTW: Tensor, documents_BT: Tensor | None, pool: Pool) -> Tensor:
    """(D, W): the first or last hidden state of each document, or their mean."""
    if documents_BT is None:
        documents_BT = torch.zeros(x_BTW.shape[:2], dtype=torch.int64, device=x_BTW.device)
    change_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
    edge_B1 = torch.ones_like(documents_BT[:, :1], dtype=torch.bool)
    is_token_BT, starts_BT = documents_BT >= 0, torch.cat((edge_B1, change_BT), dim=1)
    if pool == "first":
        return x_BTW[starts_BT & is_token_BT]
    if pool == "last":
        return x_BTW[torch.cat((change_BT, edge_B1), dim=1) & is_token_BT]
    number_R = starts_BT.flatten().cumsum(0) - 1  # of the document, counting padding
    lengths_D = number_R.bincount()
    sums_DW = x_BTW.new_zeros(len(lengths_D), x_BTW.shape[-1]).index_add(0, number_R, x_BTW.flatten(0, 1))
    return (sums_DW / lengths_D[:, None].to(x_BTW.dtype))[is_token_BT[starts_BT]]


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
    """`shape` is the body's. The number of labels belongs to the family, since a shape has none."""

    kind: ClassifierKind
    labels: int = 2

    @property
    def architectures(self) -> tuple[str, ...]:
        stem = self.family.architectures[0].split("For")[0].removesuffix("LMHeadModel")
        return (stem + _CLASSES[self.kind],)

    @property
    def has_pooler(self) -> bool:
        return self.name == "bert" and self.kind == "sequence"

    def config(self, shape: ModelShape) -> dict[str, Any]:
        names = {str(i): f"LABEL_{i}" for i in range(self.labels)}
        more = {"architectures": [*self.architectures], "id2label": names}
        return self.family.config(shape) | more | {"label2id": {name: int(i) for i, name in names.items()}}

    def weight_mappings(self, shape: ModelShape) -> Iterator[WeightMapping]:
        for mapping in super().weight_mappings(shape):
            yield replace(mapping, native_names=tuple(f"body.{name}" for name in mapping.native_names))
        if self.has_pooler:
            yield from linear("bert.pooler.dense", "pooler", bias=True)
        older = self.name == "bert" or (self.name in _OLDER and self.kind == "token")
        head = "classifier" if older else "score"
        yield rename(f"{head}.weight", "score.weight")
        if self.name == "bert" or self.kind == "token":
            yield rename(f"{head}.bias", "score.bias")


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
