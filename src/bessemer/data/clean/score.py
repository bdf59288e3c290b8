"""The step `score`: numbers from a Python function of the user's, or from an HTTP service."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.clean.selection import Floats, Ints
from bessemer.data.clean.service import Service
from bessemer.data.clean.threshold import Threshold
from bessemer.data.clean.user_function import function_identity, load_function
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Each, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.score import ScoreSpec


class Score:
    """`identity` covers the function's file. Of a service only its settings are known: when it has changed, `version`
    says so."""

    version = 1
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

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        if self.service:
            texts, places = (
                [document.text for document in documents],
                [document.place for document in documents],
            )
            scores = np.array(self.service.scores(texts, places), dtype=np.float64)
        elif self.spec.takes == "text":
            found = [self._call(document.text, document.place) for document in documents]
            scores = self._numbers(found, documents)
        else:
            found = (
                self._call([document.text for document in documents], documents[0].place) if documents else []
            )
            scores = self._numbers(found, documents)
        return self.threshold.collected(scores, ordinals)

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Iterator[Arrays], dict[str, Any]]:
        return self.threshold.resolve(collected, each)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        return self.threshold.apply(documents, ordinals, ruling)

    def _call(self, argument: str | list[str], place: str) -> Any:
        try:
            return self.function(argument)
        except UserError:
            raise
        except Exception as error:  # it is the user's code, which may raise anything
            line = _line_in(error, self.function)
            of = place if isinstance(argument, str) else f"{len(argument)} documents from {place} on"
            raise UserError(
                f"score.function {self.spec.function}{line} failed on {of}: {type(error).__name__}: {error}"
            ) from error

    def _numbers(self, found: Any, documents: Sequence[Document]) -> Floats:
        """One finite number for each document, or an error that names the first which has none."""
        name = f"score.function {self.spec.function}"
        try:
            values = list(found)
        except TypeError:
            raise UserError(
                f"{name} gave {type(found).__name__}, not a list; set takes: text if it takes one text"
            ) from None
        if len(values) != len(documents):
            raise UserError(f"{name} gave {len(values)} scores for {len(documents)} texts; give one for each")
        scores = np.empty(len(values), dtype=np.float64)
        for i, value in enumerate(values):
            try:
                number = math.nan if isinstance(value, (str, bytes)) else float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                raise UserError(f"{name} gave {value!r:.60} for {documents[i].place}; give a finite number")
            scores[i] = number
        return scores


def _line_in(error: Exception, function: Callable[..., Any]) -> str:
    """Where in the user's file it failed."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return line
