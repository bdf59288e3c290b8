"""The step `perplexity`: how surprising a model of good text finds each document, in bits per byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from bessemer.data.clean.kneser_ney import load
from bessemer.data.clean.model_file import file_identity
from bessemer.data.clean.selection import Floats
from bessemer.data.clean.threshold import ScoredStep, Threshold
from bessemer.data.document import Document
from bessemer.spec.clean.score import PerplexitySpec


class Perplexity(ScoredStep):
    """The least surprising documents are the best; `head`, `middle` and `tail` label them as CCNet does."""

    judging = ("keep", "per", "head", "middle")

    def __init__(self, spec: PerplexitySpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        parts = [("head", spec.head), ("middle", spec.middle)]
        self.threshold = Threshold("perplexity", spec.keep, spec.per, seed, lower_is_better=True, parts=parts)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def scores(self, documents: Sequence[Document]) -> Floats:
        return self.model.bits_per_byte([document.text for document in documents])
