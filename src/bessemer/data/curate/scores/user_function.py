"""A scoring function of the user's, found by its name: `module:name` or `path/to/file.py:name`. Only what a spec
names is ever run. A file has to stand alone, or import what is installed: only its own content is in its identity.

The step `score`: numbers from a Python function of the user's, or from an HTTP service.

The step `rewrite`: back-translation, paraphrase or any other augmentation by a function of the user's. It runs
while data is prepared, once per document, never while a model trains: the tokens of a step then stay a pure function
of the stream.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bessemer.data.curate.scores.model_file import file_identity
from bessemer.data.curate.scores.service import Service
from bessemer.data.curate.scores.threshold import Floats, ScoredStep, Threshold
from bessemer.data.curate.step import Outcome
from bessemer.data.document import Document
from bessemer.data.read.rows import repaired
from bessemer.errors import UserError
from bessemer.spec.curate.scores import RewriteSpec, ScoreSpec


def function_identity(reference: str, key: str = "score") -> str:
    """A hash of the file that holds the function; what that file imports is not in it. Runs nothing of it, but the
    packages around a `module:name`. `key` is the step that a message speaks of."""
    return file_identity(_file_of(reference, key))


def load_function(reference: str, key: str = "score") -> Callable[..., Any]:
    """The function, imported once for each process and content of its file."""
    file, (where, _, name) = _file_of(reference, key), reference.rpartition(":")
    try:
        if _is_file(where):
            module = _run_file(file, Path(file).read_bytes())
        else:
            module = importlib.import_module(where)
    except Exception as error:
        raise _failed(reference, key, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        what = f"{key}.function {reference}: {file} has no function {name!r}"
        raise UserError(f"{what}; it has {', '.join(names) or 'none'}")
    function: Callable[..., Any] = found
    return function


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _file_of(reference: str, key: str) -> str:
    where, named = reference.rpartition(":")[0], f"{key}.function {reference}"
    if _is_file(where):
        path = Path(os.path.abspath(os.path.expanduser(where)))
        if not os.path.isfile(path):
            raise UserError(f"{named}: no file {path}; correct the path")
        return str(path)
    try:
        found = importlib.util.find_spec(where)
    except Exception as error:  # the packages around it are the user's code, which may raise anything
        raise _failed(reference, key, error) from error
    if found is None:
        raise UserError(f"{named}: no module {where!r} is installed; for a file write path/to/{where}.py:...")
    if not found.origin or not Path(found.origin).is_file():
        raise UserError(f"{named}: {where!r} has no file; name a module that has one")
    return found.origin


@lru_cache(maxsize=16)
def _run_file(path: str, source: bytes) -> types.ModuleType:
    """The module that a file makes; a changed file is run anew. Nothing is written beside it, as importing it would."""
    module = types.ModuleType(f"bessemer_score_{xxhash.xxh3_128_hexdigest(source)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except Exception:
        del sys.modules[module.__name__]
        raise
    return module


def _failed(reference: str, key: str, error: Exception) -> UserError:
    why = f"{type(error).__name__}: {error}"
    return UserError(f"{key}.function {reference}: cannot be imported ({why}); correct it")


class Score(ScoredStep):
    """`identity` covers the function's file. Of a service only its settings are known: when it has changed, `version`
    says so."""

    judging = ("keep", "per", "better")

    def __init__(self, spec: ScoreSpec, seed: int) -> None:
        self.spec = spec
        self.threshold = Threshold(spec.name, spec.keep, spec.per, seed, spec.better == "lower")
        self.service = Service(spec.service, spec.version) if spec.service else None

    @cached_property
    def identity(self) -> str:
        return function_identity(self.spec.function) if self.spec.function else ""

    @cached_property
    def function(self) -> Callable[..., Any]:
        assert self.spec.function is not None
        return load_function(self.spec.function)

    def scores(self, documents: Sequence[Document]) -> Floats:
        texts = [document.text for document in documents]
        if self.service:
            found = self.service.scores(texts, [document.place for document in documents])
            return np.array(found, dtype=np.float64)
        if self.spec.takes == "text":
            return self._numbers([self._call(one.text, one.place) for one in documents], documents)
        return self._numbers(self._call(texts, documents[0].place) if documents else [], documents)

    def _call(self, argument: str | list[str], place: str) -> Any:
        try:
            return self.function(argument)
        except UserError:
            raise
        except Exception as error:  # it is the user's code, which may raise anything
            line = _line_in(error, self.function)
            of = place if isinstance(argument, str) else f"{len(argument)} documents from {place} on"
            what = f"score.function {self.spec.function}{line} failed on {of}"
            raise UserError(f"{what}: {type(error).__name__}: {error}") from error

    def _numbers(self, found: Any, documents: Sequence[Document]) -> Floats:
        """One finite number for each document, or an error that names the first which has none."""
        name = f"score.function {self.spec.function}"
        try:
            values = list(found)
        except TypeError:
            what = f"{name} gave {type(found).__name__}, not a list"
            raise UserError(f"{what}; set takes: text if it takes one text") from None
        if len(values) != len(documents):
            raise UserError(f"{name} gave {len(values)} scores for {len(documents)} texts; give one for each")
        scores = np.array([_number(value) for value in values], dtype=np.float64)
        for i in np.flatnonzero(~np.isfinite(scores)).tolist():
            raise UserError(f"{name} gave {values[i]!r:.60} for {documents[i].place}; give a finite number")
        return scores


def _number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _line_in(error: Exception, function: Callable[..., Any]) -> str:
    """Where in the user's file it failed."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return line


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
