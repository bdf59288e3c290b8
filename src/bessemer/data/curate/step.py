"""The interface of curation steps, and the table of their classes. A `LocalStep` decides about each document alone. A
`GlobalStep` first collects data from every part of the corpus, resolves it once, and then applies its decisions part by
part. Both are pure: the same documents give the same outcomes, whatever the batches or the number of workers."""

from __future__ import annotations

import hashlib
import os
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
import xxhash

from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.text_steps import StepSpec

Arrays = Mapping[str, npt.NDArray[Any]]
# Runs a module-level function on every task, on all workers, and returns the results in order.
RunTasks = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drop:
    """The document is removed. `reason` is the same text for every document with that reason: the report counts
    by it."""

    reason: str
    value: float | str | None = None  # the measured value, or the document that it duplicates


Outcome = Drop | str | None  # dropped; a new text; unchanged


class LocalStep(Protocol):
    """`version` is part of the cache key: increase it whenever the same settings would give other outcomes."""

    version: int

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        """One outcome per document. May add to a document's labels; changes nothing else of it."""
        ...


@dataclass(frozen=True)
class Collected:
    """What `collect` wrote for one part: an .npz file."""

    part: int  # its index in the corpus
    path: Path
    source: str
    documents: int  # in the part as read; ordinals are below it

    def load(self) -> Arrays:
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
            raise UserError(f"{self.path}: damaged ({error}); delete it and run again") from error


class GlobalStep(Protocol):
    """`ordinals` number a part's documents as they were read; gaps are documents that earlier steps dropped.

    A class may list in `judging` the settings that `collect` does not use: changing those collects nothing again. A
    class that sets `bulky` collects about as much data as the corpus holds; it is deleted once the decisions are
    stored.
    """

    version: int

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        """Arrays about some documents of one part. The arrays of a part's batches are concatenated by name along their
        first axis."""
        ...

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks
    ) -> tuple[Iterable[Arrays], dict[str, Any]]:
        """The decisions for each part in order, and a JSON summary for the report. `scratch` is an empty folder on the
        cache's disk. Memory must not grow with the corpus beyond the decisions themselves."""
        ...

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        """The outcomes of some documents of a part, given the part's decisions."""
        ...


def is_global(step: LocalStep | GlobalStep) -> TypeGuard[GlobalStep]:
    return hasattr(step, "resolve")


def step_identity(step: LocalStep | GlobalStep) -> list[Any]:
    """What a step's outcomes depend on besides its settings: its version, and the content of the files or functions it
    uses."""
    return [step.version, getattr(step, "identity", "")]


# The class of each step, by the step's name in a spec.
_STEP_CLASSES = {
    "extract": "filters.repair:Extract",
    "rewrite": "scores.user_function:Rewrite",
    "unicode": "filters.repair:Unicode",
    "whitespace": "filters.repair:Whitespace",
    "boilerplate": "filters.repair:Boilerplate",
    "length": "filters.content:Length",
    "ratios": "filters.content:Ratios",
    "lines": "filters.content:Lines",
    "gopher_quality": "filters.heuristics:GopherQuality",
    "gopher_repetition": "filters.heuristics:GopherRepetition",
    "c4": "filters.heuristics:C4",
    "fineweb": "filters.heuristics:FineWeb",
    "language": "filters.content:Language",
    "toxicity": "filters.content:Toxicity",
    "pii": "filters.pii:Pii",
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
    "dedup_paragraphs": "dedup.exact:DedupParagraphs",
    "dedup_substrings": "dedup.substrings:DedupSubstrings",
    "decontaminate": "dedup.decontaminate:Decontaminate",
}


def make_step(spec: StepSpec, seed: int) -> LocalStep | GlobalStep:
    """The step that a spec's entry describes. Every such class takes (spec, seed)."""
    module, _, name = _STEP_CLASSES[spec.step].partition(":")
    step: LocalStep | GlobalStep = getattr(import_module(f"bessemer.data.curate.{module}"), name)(spec, seed)
    return step


class PerDocumentStep(ABC):
    """A local step that decides one document at a time."""

    version = 1

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self.outcome(document) for document in documents]

    @abstractmethod
    def outcome(self, document: Document) -> Outcome: ...


def file_identity(path: str | Path) -> str:
    """A hash of a file's content, for the keys of results that depend on it. Reads 2 GB/s and more from memory."""
    if not os.path.isfile(path) and os.path.exists(path):  # opening a pipe blocks forever
        raise UserError(f"{path}: no regular file; correct the path")
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); correct the path") from error
