"""FineWeb's own rules: lines without an end mark, short lines, repeated lines, lists."""

from __future__ import annotations

from bessemer.data.clean.characters import LINE_ENDS
from bessemer.data.clean.each_document import EachDocument
from bessemer.data.clean.gopher import repeated
from bessemer.data.clean.words import chunk_count, shared_words
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.spec.clean.text import FineWebSpec


class FineWeb(EachDocument):
    """Drops documents by the shape of their lines. Words are split only where a cheap bound does not settle it."""

    def __init__(self, spec: FineWebSpec, seed: int) -> None:
        self._spec = spec
        self._words = shared_words()
        self._line_ends = frozenset(LINE_ENDS if spec.line_ends is None else spec.line_ends)

    def outcome(self, document: Document) -> Outcome:
        text = document.text
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return Drop("empty")
        return self._line_shapes(lines) or self._repeated(text, lines) or self._list(text)

    def _line_shapes(self, lines: list[str]) -> Drop | None:
        spec, ends = self._spec, self._line_ends
        least = spec.min_ended_lines
        if least:
            share = sum([line[-1] in ends for line in lines]) / len(lines)
            if share < least and not (share == 0 and spec.allow_no_ended_lines):
                return Drop(f"lines that end in punctuation below {least:g}", share)
        most = spec.max_short_lines
        if most:
            share = sum([len(line) <= spec.short_line_chars for line in lines]) / len(lines)
            if share > most:
                return Drop(f"lines of at most {spec.short_line_chars} characters above {most:g}", share)
        return None

    def _repeated(self, text: str, lines: list[str]) -> Drop | None:
        most = self._spec.max_repeated_line_chars
        if not most:
            return None
        chars = repeated(lines)[1]
        share = chars / (len(text) - text.count("\n")) if chars else 0.0
        return Drop(f"characters in repeated lines above {most:g}", share) if share > most else None

    def _list(self, text: str) -> Drop | None:
        most = self._spec.max_newlines
        newlines = text.count("\n")
        # There are at least as many words as pieces between spaces, and those are quickly counted.
        if not most or newlines / chunk_count(text) <= most:
            return None
        share = newlines / self._words.count(text)
        return Drop(f"newlines for each word above {most:g}", share) if share > most else None
