"""The steps `score` and `rewrite`, which call the user's code: a function named `module:name` or
`path/to/file.py:name`, or an HTTP service. Only what a spec names is run. A file must be self-contained or import
installed packages: only its own content is in its identity.

`rewrite` is for back-translation, paraphrase or other augmentation. It runs once per document while data is prepared,
never during training, so the tokens of a training step stay a pure function of the stream.
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

from bessemer.data.curate.scores.service import Service
from bessemer.data.curate.scores.threshold import Floats, ScoredStep, Threshold
from bessemer.data.curate.step import Outcome, file_identity
from bessemer.data.read.entry import Document
from bessemer.data.read.rows import repair_surrogates
from bessemer.errors import UserError
from bessemer.spec.curate.scores import RewriteSpec, ScoreSpec


def function_identity(reference: str, key: str = "score") -> str:
    """A hash of the file that holds the function, without its imports. Runs none of it except the packages around a
    `module:name`. `key` is the step that messages name."""
    return file_identity(_file_of(reference, key))


def load_function(reference: str, key: str = "score") -> Callable[..., Any]:
    """The function, imported once per process and content of its file."""
    file, (where, _, name) = _file_of(reference, key), reference.rpartition(":")
    try:
        if _is_file(where):
            module = _run_file(file, Path(file).read_bytes())
        else:
            module = importlib.import_module(where)
    except Exception as error:
        raise _failed(reference, key, error) from error
    attribute = getattr(module, name, None)
    if not callable(attribute):
        names = [public for public, value in vars(module).items() if callable(value) and not public.startswith("_")]
        problem = f"{key}.function {reference}: {file} has no function {name!r}"
        raise UserError(f"{problem}; it has {', '.join(names) or 'none'}")
    function: Callable[..., Any] = attribute
    return function


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _file_of(reference: str, key: str) -> str:
    where, prefix = reference.rpartition(":")[0], f"{key}.function {reference}"
    if _is_file(where):
        path = Path(os.path.abspath(os.path.expanduser(where)))
        if not os.path.isfile(path):
            raise UserError(f"{prefix}: no file {path}; correct the path")
        return str(path)
    try:
        module_spec = importlib.util.find_spec(where)
    except Exception as error:  # user code may raise anything
        raise _failed(reference, key, error) from error
    if module_spec is None:
        raise UserError(f"{prefix}: no module {where!r} is installed; for a file write path/to/{where}.py:...")
    if not module_spec.origin or not Path(module_spec.origin).is_file():
        raise UserError(f"{prefix}: {where!r} has no file; name a module that has one")
    return module_spec.origin


@lru_cache(maxsize=16)
def _run_file(path: str, source: bytes) -> types.ModuleType:
    """The module of a file; a changed file is run again. Unlike an import, writes nothing beside it."""
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
    """`step_identity` covers the function's file. Of a service only the settings are known: change its setting
    `version` when it changes."""

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
            scores = self.service.scores(texts, [document.place for document in documents])
            return np.array(scores, dtype=np.float64)
        if self.spec.takes == "text":
            return self._numbers([self._call(document.text, document.place) for document in documents], documents)
        return self._numbers(self._call(texts, documents[0].place) if documents else [], documents)

    def _call(self, argument: str | list[str], place: str) -> Any:
        try:
            return self.function(argument)
        except UserError:
            raise
        except Exception as error:  # user code may raise anything
            line = line_in(error, self.function)
            of = place if isinstance(argument, str) else f"{len(argument)} documents from {place} on"
            problem = f"score.function {self.spec.function}{line} failed on {of}"
            raise UserError(f"{problem}: {type(error).__name__}: {error}") from error

    def _numbers(self, result: Any, documents: Sequence[Document]) -> Floats:
        """One finite number per document, or an error that names the first document without one."""
        name = f"score.function {self.spec.function}"
        try:
            values = list(result)
        except TypeError:
            problem = f"{name} gave {type(result).__name__}, not a list"
            raise UserError(f"{problem}; set takes: text if it takes one text") from None
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


def line_in(error: Exception, function: Callable[..., Any]) -> str:
    """The line of the user's file that failed."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return line


LABEL = "rewritten"
_SHARE_SEED = 0x72657772697465  # makes the choice independent of other hashes of the text


class Rewrite:
    """A local step. The function must treat each text independently: the batches are unspecified."""

    version = 1

    def __init__(self, spec: RewriteSpec, seed: int) -> None:
        self.spec = spec
        self._hash_seed = (seed ^ _SHARE_SEED) % 2**64
        self._limit = round(spec.share * 2**64)
        self.identity = function_identity(spec.function, "rewrite")  # an edited function is another step
        self._function: Callable[[list[str]], Any] | None = None

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        candidates = [i for i, document in enumerate(documents) if document.text and document.messages is None]
        hashes = {i: xxhash.xxh3_64_intdigest(documents[i].text.encode(), seed=self._hash_seed) for i in candidates}
        chosen = [i for i in candidates if hashes[i] < self._limit]
        for first in range(0, len(chosen), self.spec.texts):
            batch = chosen[first : first + self.spec.texts]
            for i, text in zip(batch, self._call([documents[i] for i in batch]), strict=True):
                if text and text != documents[i].text:
                    documents[i].labels[LABEL] = 1.0
                    outcomes[i] = text
        return outcomes

    def _call(self, documents: list[Document]) -> list[str]:
        """One text per document; empty where the original stays."""
        if self._function is None:
            self._function = load_function(self.spec.function, "rewrite")
        place = f"{self.spec.function} (from {documents[0].place}, {len(documents)} texts)"
        try:
            texts = self._function([document.text for document in documents])
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"rewrite: {place} failed: {why}; correct it, or return None to keep one") from error
        if not isinstance(texts, (list, tuple)) or len(texts) != len(documents):
            got = f"{len(texts)} items" if isinstance(texts, (list, tuple)) else type(texts).__name__
            raise UserError(f"rewrite: {place} returned {got}: return a list with a text, or None, for each")
        for text in texts:
            if text is not None and not isinstance(text, str):
                got = type(text).__name__
                raise UserError(f"rewrite: {place} returned a {got}: return texts, or None to keep one")
        return [repair_surrogates(text) if text and not text.isspace() else "" for text in texts]
