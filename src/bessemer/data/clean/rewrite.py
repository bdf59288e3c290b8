"""The step `rewrite`: back-translation, paraphrase or any other augmentation by a function of the user's. It runs
while data is prepared, once per document, never while a model trains: the tokens of a step then stay a pure function
of the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from bessemer.data.clean.user_function import function_identity, load_function
from bessemer.data.document import Document
from bessemer.data.read.rows import repaired
from bessemer.data.step import Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.score import RewriteSpec

LABEL = "rewritten"
_SHARE_SEED = 0x72657772697465  # keeps the choice apart from other hashes of the same text


class Rewrite:
    """A LocalStep. The function must give a text the same result in any company: batches are not promised."""

    version = 1

    def __init__(self, spec: RewriteSpec, seed: int) -> None:
        self.spec = spec
        self._hash_seed = (seed ^ _SHARE_SEED) % 2**64
        self._limit = round(spec.share * 2**64)
        self.identity = function_identity(spec.function, "rewrite")  # an edited function is another step
        self._function: Callable[[list[str]], Any] | None = None

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        chosen = [i for i, document in enumerate(documents) if self._chosen(document)]
        for first in range(0, len(chosen), self.spec.texts):
            at = chosen[first : first + self.spec.texts]
            for i, text in zip(at, self._call([documents[i] for i in at]), strict=True):
                if text and text != documents[i].text:
                    documents[i].labels[LABEL] = 1.0
                    outcomes[i] = text
        return outcomes

    def _chosen(self, document: Document) -> bool:
        if document.messages is not None or not document.text:
            return False
        return xxhash.xxh3_64_intdigest(document.text.encode(), seed=self._hash_seed) < self._limit

    def _call(self, documents: list[Document]) -> list[str]:
        """One text for each document; empty where the original stays."""
        if self._function is None:
            self._function = load_function(self.spec.function, "rewrite")
        place = f"{self.spec.function} (from {documents[0].place}, {len(documents)} texts)"
        try:
            found = self._function([document.text for document in documents])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"rewrite: {place} failed: {why}; correct it, or return None to keep one") from error
        if not isinstance(found, (list, tuple)) or len(found) != len(documents):
            got = f"{len(found)} items" if isinstance(found, (list, tuple)) else type(found).__name__
            raise UserError(f"rewrite: {place} returned {got}: return a list with a text, or None, for each")
        for text in found:
            if text is not None and not isinstance(text, str):
                got = type(text).__name__
                raise UserError(f"rewrite: {place} returned a {got}: return texts, or None to keep one")
        return [repaired(text) if text and not text.isspace() else "" for text in found]
