"""The step `perplexity`: how surprising a model of good text finds each document, in bits per byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bessemer.data.clean.kneser_ney import load
from bessemer.data.clean.model_file import file_identity
from bessemer.data.clean.selection import Ints
from bessemer.data.clean.threshold import Threshold
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Each, Outcome
from bessemer.spec.clean.score import PerplexitySpec


class Perplexity:
    """The least surprising documents are the best; `head`, `middle` and `tail` label them as CCNet does."""

    version = 1
    judging = ("keep", "per", "head", "middle")

    def __init__(self, spec: PerplexitySpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        parts = [("head", spec.head), ("middle", spec.middle)]
        self.threshold = Threshold("perplexity", spec.keep, spec.per, seed, lower_is_better=True, parts=parts)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        bits = self.model.bits_per_byte([document.text for document in documents])
        return self.threshold.collected(bits, ordinals)

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Iterator[Arrays], dict[str, Any]]:
        return self.threshold.resolve(collected, each)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        return self.threshold.apply(documents, ordinals, ruling)
