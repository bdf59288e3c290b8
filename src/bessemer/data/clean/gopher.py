"""Gopher's rules for quality, with the published limits, decided as in the reference pipeline of FineWeb."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.data.clean.repetition import GopherRepetition
from bessemer.data.clean.splitter import split
from bessemer.data.clean.words import WordCounts, shared_words
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.spec.clean.text import GopherQualitySpec

__all__ = ["GopherQuality", "GopherRepetition"]


class GopherQuality:
    """Drops documents that do not look like prose: by words, marks, lines, letters and stop words, in that order."""

    version = 1

    def __init__(self, spec: GopherQualitySpec, seed: int) -> None:
        self._spec = spec
        self._words = shared_words()
        self._stop_words = frozenset(spec.stop_words)
        # A stop word that stands between spaces is one of the words, unless the splitter has other ideas of it.
        self._between_spaces = [
            f" {word} " for word in spec.stop_words if word.split() == [word] and split(word) == (word,)
        ]

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self._outcome(document.text) for document in documents]

    def _outcome(self, text: str) -> Outcome:
        counts = self._words.counts(text)
        return (
            self._length(counts)
            or self._marks(text, counts.words)
            or self._lines(text)
            or self._letters(counts)
            or self._stops(text)
        )

    def _length(self, counts: WordCounts) -> Drop | None:
        spec = self._spec
        if spec.min_words and counts.plain < spec.min_words:
            return Drop(f"fewer than {spec.min_words} words", counts.plain)
        if spec.max_words and counts.plain > spec.max_words:
            return Drop(f"more than {spec.max_words} words", counts.plain)
        if not counts.plain:
            return None  # no word has no mean length
        mean = counts.plain_chars / counts.plain
        if spec.min_word_length and mean < spec.min_word_length:
            return Drop(f"mean word length below {spec.min_word_length:g}", mean)
        if spec.max_word_length and mean > spec.max_word_length:
            return Drop(f"mean word length above {spec.max_word_length:g}", mean)
        return None

    def _marks(self, text: str, words: int) -> Drop | None:
        most = self._spec.max_hashes
        if most and (share := text.count("#") / max(words, 1)) > most:
            return Drop(f"more than {most:g} # for each word", share)
        most = self._spec.max_ellipses
        if most and (share := _ellipses(text) / max(words, 1)) > most:
            return Drop(f"more than {most:g} ellipses for each word", share)
        return None

    def _lines(self, text: str) -> Drop | None:
        """Lines are looked at only if there are enough marks in the text for the rule to strike."""
        least_lines = max(text.count("\n"), 1)
        most = self._spec.max_bullet_lines
        if most and (text.count("-") + text.count("•")) / least_lines > most:
            lines = text.splitlines()
            share = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
            if share > most:
                return Drop(f"lines that start with a bullet above {most:g}", share)
        most = self._spec.max_ellipsis_lines
        if most and _ellipses(text) / least_lines > most:
            lines = text.splitlines()
            share = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
            if share > most:
                return Drop(f"lines that end with an ellipsis above {most:g}", share)
        return None

    def _letters(self, counts: WordCounts) -> Drop | None:
        least = self._spec.min_alphabetic_words
        share = counts.alphabetic / max(counts.words, 1)
        return Drop(f"words with a letter below {least:g}", share) if least and share < least else None

    def _stops(self, text: str) -> Drop | None:
        least = self._spec.min_stop_words
        if not least or sum(word in text for word in self._between_spaces) >= least:
            return None
        found = len(self._stop_words & self._words.distinct(text))
        return Drop(f"fewer than {least} different stop words", found) if found < least else None


def _ellipses(text: str) -> int:
    return text.count("...") + text.count("…")
