"""Documents that are the same: by their address, or by their text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.data.dedup.clusters import REASONS, Rulings, drop_duplicates
from bessemer.data.dedup.links import about, resolve_by_keys
from bessemer.data.dedup.same_text import hash_128, simplify
from bessemer.data.dedup.url import normal_url
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Each, Ints, Outcome
from bessemer.spec.clean.dedup import DedupExactSpec, DedupUrlSpec


class DedupUrl:
    """One document for each address stays. Those without a URL take no part."""

    version = 1

    def __init__(self, spec: DedupUrlSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        there = [i for i, document in enumerate(documents) if document.url.strip()]
        having = [documents[i] for i in there]
        spec = self.spec
        key, check = hash_128([normal_url(one.url, spec.tracking, spec.ignore_query) for one in having])
        return {**about(having, ordinals[there], spec.keep), "key": key, "check": check}

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Rulings, dict[str, Any]]:
        return resolve_by_keys(collected, scratch, each, keys=1, keep=self.spec.keep, checked=True)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        return drop_duplicates(ordinals, ruling, REASONS[self.spec.keep])


class DedupExact:
    """One document for each text stays, up to the differences that are ignored."""

    version = 1

    def __init__(self, spec: DedupExactSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        spec = self.spec
        key, check = hash_128(
            [
                simplify(one.text, spec.ignore_case, spec.ignore_whitespace, spec.ignore_punctuation)
                for one in documents
            ]
        )
        return {**about(documents, ordinals, spec.keep), "key": key, "check": check}

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Rulings, dict[str, Any]]:
        return resolve_by_keys(collected, scratch, each, keys=1, keep=self.spec.keep, checked=True)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        return drop_duplicates(ordinals, ruling, REASONS[self.spec.keep])
