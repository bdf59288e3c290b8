"""Steps that measure a document, or each of its lines, and hold the numbers against bounds that the user sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bessemer.data.clean.shares import ShareBounds
from bessemer.data.clean.words import chunk_count
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.spec.clean.text import LengthSpec, LinesSpec, RatiosSpec


class Length:
    """Only what has a bound is measured, the cheapest first."""

    version = 1

    def __init__(self, spec: LengthSpec, seed: int) -> None:
        measures: tuple[tuple[str, Callable[[str], int], int, int | None], ...] = (
            ("characters", len, spec.min_chars, spec.max_chars),
            ("bytes", _utf8_bytes, spec.min_bytes, spec.max_bytes),
            ("lines", _lines, spec.min_lines, spec.max_lines),
            ("words", chunk_count, spec.min_words, spec.max_words),
        )
        self._bounds = [bound for bound in measures if bound[2] or bound[3] is not None]

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self._outcome(document.text) for document in documents]

    def _outcome(self, text: str) -> Outcome:
        for name, measure, least, most in self._bounds:
            found = measure(text)
            if found < least:
                return Drop(f"fewer than {least} {name}", found)
            if most is not None and found > most:
                return Drop(f"more than {most} {name}", found)
        return None


class Ratios:
    """The first share out of its bounds is the reason; the number of stop words comes last."""

    version = 1

    def __init__(self, spec: RatiosSpec, seed: int) -> None:
        self._bounds = ShareBounds(spec)
        self._min_stop_words = spec.min_stop_word_count

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        broken = self._bounds.broken([document.text for document in documents])
        return [
            Drop(*found) if found else self._stop_words(document.text)
            for document, found in zip(documents, broken, strict=True)
        ]

    def _stop_words(self, text: str) -> Outcome:
        least = self._min_stop_words
        if not least or (found := self._bounds.stop_word_count(text)) >= least:
            return None
        return Drop(f"fewer than {least} stop words", found)


class Lines:
    """Empty lines stay: what is measured is text."""

    version = 1

    def __init__(self, spec: LinesSpec, seed: int) -> None:
        self._spec = spec
        self._bounds = ShareBounds(spec)

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self._outcome(document.text) for document in documents]

    def _outcome(self, text: str) -> Outcome:
        lines = text.split("\n")
        broken = self._bounds.broken(lines)
        kept = [
            line
            for line, found in zip(lines, broken, strict=True)
            if not line or line.isspace() or not (found or self._wrong_length(line))
        ]
        if len(kept) == len(lines):
            return None
        left = sum(map(len, kept)) / max(sum(map(len, lines)), 1)
        if left < self._spec.min_kept:
            return Drop(f"less than {self._spec.min_kept:g} left", left)
        cleaned = "\n".join(kept)
        return cleaned if cleaned and not cleaned.isspace() else Drop("no line left", left)

    def _wrong_length(self, line: str) -> bool:
        spec = self._spec
        return bool(
            (spec.min_chars and len(line) < spec.min_chars)
            or (spec.max_chars and len(line) > spec.max_chars)
            or (spec.min_words and chunk_count(line) < spec.min_words)
        )


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _lines(text: str) -> int:
    return sum(bool(line) and not line.isspace() for line in text.split("\n"))
