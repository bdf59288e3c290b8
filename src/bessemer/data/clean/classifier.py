"""The steps `quality` and `domain`: a classifier trained from the user's own folders looks at each document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bessemer.data.clean.linear import LinearModel, load
from bessemer.data.clean.model_file import file_identity
from bessemer.data.clean.selection import Ints
from bessemer.data.clean.threshold import Threshold
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Drop, Each, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.score import DomainSpec, QualitySpec

UNSURE = "unsure"


class Quality:
    """Keeps documents that are probably of the classifier's first class, or the best share of them."""

    version = 1
    judging = ("keep", "per", "better")

    def __init__(self, spec: QualitySpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        self.threshold = Threshold("quality", spec.keep, spec.per, seed)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        scores = self.model.scores([document.text for document in documents])
        return self.threshold.collected(scores, ordinals)

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Iterator[Arrays], dict[str, Any]]:
        return self.threshold.resolve(collected, each)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        return self.threshold.apply(documents, ordinals, ruling)


class Domain:
    """Labels documents with their class. It needs no other document for that, so it is a local step."""

    version = 1

    def __init__(self, spec: DomainSpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        self.kept = None if spec.keep is None else _known(spec.keep, self.model, spec)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        chances = self.model.probabilities([document.text for document in documents])
        outcomes: list[Outcome] = []
        for document, row in zip(documents, chances, strict=True):
            most = int(row.argmax())
            sure = row[most] >= self.spec.min_probability
            domain = self.model.labels[most] if sure else UNSURE
            document.labels["domain"] = domain
            wanted = self.kept is None or domain in self.kept
            outcomes.append(None if wanted else Drop("domain not among those kept", domain))
        return outcomes


def _known(keep: list[str], model: LinearModel, spec: DomainSpec) -> frozenset[str]:
    unknown = [name for name in keep if name not in model.labels and name != UNSURE]
    if unknown:
        raise UserError(
            f"domain.keep: {spec.model} has no class {unknown[0]!r}; it has {', '.join(model.labels)}"
        )
    return frozenset(keep)
