"""The classify section: what is classified and by which labels. A model for it has a head of labels, not of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import model_validator

from bessemer.spec.quantity import SpecSection, setting
from bessemer.spec.shape import ModelShape


class ClassifySpec(SpecSection):
    """Classification of texts or of their words (`objective: classify`), from rows with labels."""

    kind: Literal["sequence", "token"] = setting(
        "sequence", "sequence (a label of each text) or token (a label of each word)", "token"
    )
    problem: Literal["single", "multi", "regression"] = setting(
        "single", "single (one label of several), multi (any number of them) or regression (a number)", "multi"
    )
    labels: list[str] = setting(
        [], "names of the labels, as they are written in the rows; numbers in the rows count from 0", ["bad", "good"]
    )
    pool: Literal["auto", "first", "last"] = setting(
        "auto", "the token whose hidden state is classified: auto is the last of causal models, else the first", "last"
    )

    @model_validator(mode="after")
    def _check_labels(self) -> ClassifySpec:
        if self.kind == "token" and self.problem != "single":
            raise ValueError(f"problem {self.problem} classifies texts: write kind: sequence, or problem: single")
        if self.problem == "regression":
            if self.labels:
                raise ValueError("regression has numbers, not labels: remove labels, or write problem: single")
            return self
        if len(self.labels) < (1 if self.problem == "multi" else 2):
            raise ValueError("names of the labels are missing: write for example labels: [negative, positive]")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"a label is listed twice: {', '.join(self.labels)}; write each once")
        return self

    @property
    def outputs(self) -> int:
        """Rows of the head."""
        return len(self.labels) or 1

    def pool_for(self, causal: bool) -> Literal["first", "last"]:
        return ("last" if causal else "first") if self.pool == "auto" else self.pool


def as_classifier(shape: ModelShape, classify: ClassifySpec) -> ModelShape:
    """The same body with a head of labels, as transformers builds it: a pooler where the first token of a bidirectional
    model stands for its text, and a bias except where the last token does."""
    first = classify.pool_for(shape.causal) == "first"
    return replace(
        shape, tied=False, head_transform=False, logit_cap=None, logit_scale=1.0, labels=classify.outputs,
        pooler=classify.kind == "sequence" and first and not shape.causal,
        head_bias=classify.kind == "token" or first,
    )  # fmt: skip
