"""What the local steps have in common that look at one document after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from bessemer.data.document import Document
from bessemer.data.step import Outcome


class EachDocument(ABC):
    version = 1

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self.outcome(document) for document in documents]

    @abstractmethod
    def outcome(self, document: Document) -> Outcome: ...
