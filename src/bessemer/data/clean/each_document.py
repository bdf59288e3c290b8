"""What the local steps have in common that look at one document after another."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.data.document import Document
from bessemer.data.step import Outcome


class EachDocument:
    version = 1

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self.outcome(document) for document in documents]

    def outcome(self, document: Document) -> Outcome:
        raise NotImplementedError
