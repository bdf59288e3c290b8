"""The steps `quality` and `domain`: a classifier trained from the user's own folders looks at each document."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from bessemer.data.clean.linear import load
from bessemer.data.clean.model_file import file_identity
from bessemer.data.clean.selection import Floats
from bessemer.data.clean.threshold import ScoredStep, Threshold
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.score import DomainSpec, QualitySpec

UNSURE = "unsure"


class Quality(ScoredStep):
    """Keeps documents that are probably of the classifier's first class, or the best share of them."""

    judging = ("keep", "per", "better")

    def __init__(self, spec: QualitySpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        self.threshold = Threshold("quality", spec.keep, spec.per, seed)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def scores(self, documents: Sequence[Document]) -> Floats:
        return self.model.scores([document.text for document in documents])


class Domain:
    """Labels documents with their class. It needs no other document for that, so it is a local step."""

    version = 1

    def __init__(self, spec: DomainSpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        unknown = [name for name in spec.keep or [] if name not in (*self.model.labels, UNSURE)]
        if unknown:
            has = ", ".join(self.model.labels)
            raise UserError(f"domain.keep: {spec.model} has no class {unknown[0]!r}; it has {has}")

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
            wanted = self.spec.keep is None or domain in self.spec.keep
            outcomes.append(None if wanted else Drop("domain not among those kept", domain))
        return outcomes
