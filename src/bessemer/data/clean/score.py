"""The step `score`: numbers from a Python function of the user's, or from an HTTP service."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from bessemer.data.clean.selection import Floats
from bessemer.data.clean.service import Service
from bessemer.data.clean.threshold import ScoredStep, Threshold
from bessemer.data.clean.user_function import function_identity, load_function
from bessemer.data.document import Document
from bessemer.errors import UserError
from bessemer.spec.clean.score import ScoreSpec


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
