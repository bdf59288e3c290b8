"""What a curation step is: a class made from its settings, which tells of each document whether it stays.

A `LocalStep` looks at documents alone. A `GlobalStep` has to see all of them first: it collects what it needs from
every part of the corpus, resolves that once, and then applies the rulings part by part. Parts are fixed by the files,
never by the number of workers, and both kinds are pure: same documents, same outcomes, whatever the batches.

What the local steps have in common that look at one document after another.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeGuard
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from bessemer.data.document import Document
from bessemer.errors import UserError
from bessemer.spec.curate.step import StepSpec

Arrays = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drop:
    """The document goes. `reason` is the same words for every document dropped for it: the report counts by it."""

    reason: str
    value: float | str | None = None  # what was measured, or the document that it repeats


Outcome = Drop | str | None  # dropped; another text; kept as it is


class LocalStep(Protocol):
    """`version` is raised whenever the same settings would give other outcomes: it is part of the cache's key."""

    version: int

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        """One outcome for each document. May add to a document's labels; changes nothing else of it."""
        ...


@dataclass(frozen=True)
class Collected:
    """What `collect` wrote of one part: an .npz that `load` opens."""

    part: int  # its place in the corpus, from 0
    path: Path
    source: str
    documents: int  # in the part as it was read; ordinals lie below it

    def load(self) -> Arrays:
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise UserError(f"{self.path}: damaged ({error}); delete it and run again") from error


class PerDocumentStep(Protocol):
    """Runs a module-level function on every task, on all workers, and returns the results in order."""

    def __call__(self, function: Callable[[Any], Any], tasks: Sequence[Any], /) -> list[Any]: ...


class GlobalStep(Protocol):
    """`ordinals` number a part's documents as they were read; gaps are documents that earlier steps dropped.

    A class may name in `judging` the settings that `collect` does not read: changing those collects nothing anew. One
    that sets `bulky` collects about as much as the corpus has: it is not kept once the ruling stands.
    """

    version: int

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        """What has to be known of some documents of one part. The arrays of a part's batches are concatenated by
        name, so their first axis counts records."""
        ...

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: PerDocumentStep
    ) -> tuple[Iterable[Arrays], dict[str, Any]]:
        """The ruling for each part in order, and a summary for the report that JSON can hold. `scratch` is an empty
        folder on the disk of the cache. Memory must not grow with the corpus beyond the rulings themselves."""
        ...

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        """The outcomes for some documents of a part, given the part's ruling."""
        ...


def is_global(step: LocalStep | GlobalStep) -> TypeGuard[GlobalStep]:
    return hasattr(step, "resolve")


def identity(step: LocalStep | GlobalStep) -> list[Any]:
    """What a step's outcomes depend on beside its settings: its rules, and the content of files or functions it
    uses."""
    return [step.version, getattr(step, "identity", "")]


# The class that does each step, by the step's name in a spec.
_MADE_BY = {
    "extract": "filters.repair:Extract",
    "rewrite": "scores.user_function:Rewrite",
    "unicode": "filters.repair:Unicode",
    "whitespace": "filters.repair:Whitespace",
    "boilerplate": "filters.repair:Boilerplate",
    "length": "filters.measure:Length",
    "ratios": "filters.measure:Ratios",
    "lines": "filters.measure:Lines",
    "gopher_quality": "filters.heuristics:GopherQuality",
    "gopher_repetition": "filters.heuristics:GopherRepetition",
    "c4": "filters.heuristics:C4",
    "fineweb": "filters.heuristics:FineWeb",
    "language": "filters.content:Language",
    "toxicity": "filters.content:Toxicity",
    "pii": "pii.step:Pii",
    "block_urls": "filters.urls:BlockUrls",
    "opt_out": "filters.urls:OptOut",
    "quality": "scores.classifier:Quality",
    "domain": "scores.classifier:Domain",
    "perplexity": "scores.perplexity:Perplexity",
    "score": "scores.user_function:Score",
    "dedup_url": "dedup.exact:DedupUrl",
    "dedup_exact": "dedup.exact:DedupExact",
    "dedup_minhash": "dedup.near:DedupMinhash",
    "dedup_simhash": "dedup.near:DedupSimhash",
    "dedup_paragraphs": "dedup.paragraphs:DedupParagraphs",
    "dedup_substrings": "dedup.substrings:DedupSubstrings",
    "decontaminate": "dedup.decontaminate:Decontaminate",
}


def make_step(spec: StepSpec, seed: int) -> LocalStep | GlobalStep:
    """The step that a spec's entry asks for. Every such class takes (spec, seed)."""
    module, _, name = _MADE_BY[spec.step].partition(":")
    made: LocalStep | GlobalStep = getattr(import_module(f"bessemer.data.curate.{module}"), name)(spec, seed)
    return made


class EachDocument(ABC):
    version = 1

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self.outcome(document) for document in documents]

    @abstractmethod
    def outcome(self, document: Document) -> Outcome: ...
