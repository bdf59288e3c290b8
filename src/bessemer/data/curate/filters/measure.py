"""Steps that measure a document, or each of its lines, and hold the numbers against bounds that the user sets."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.filters.words import Ints, Words, chunk_count, shared_words
from bessemer.data.curate.ledger import byte_length
from bessemer.data.curate.step import Drop, EachDocument, Outcome
from bessemer.data.document import Document
from bessemer.spec.curate.text import LengthSpec, LinesSpec, RatiosSpec, ShareSpec

Shares = npt.NDArray[np.float64]

_URL = re.compile(r"(?:https?://|ftp://|www\.)\S+", re.IGNORECASE)
_BLOCK_CHARS = 1 << 20  # characters looked at in one go: 12 MB of numbers

_OTHER, _SPACE, _UPPER, _LETTER, _DIGIT, _PUNCTUATION, _SYMBOL = range(7)
_KINDS = 7
_LAST = 0x20000  # from here on there are ideographs, hence letters


@functools.cache
def _kind_table() -> npt.NDArray[np.uint8]:
    """The kind of each code point up to the ideographs outside the basic plane."""
    kinds = {"P": _PUNCTUATION, "S": _SYMBOL, "L": _LETTER}
    table = np.full(_LAST + 1, _LETTER, np.uint8)
    for code in range(_LAST):
        mark = chr(code)
        category = unicodedata.category(mark)
        kind = _DIGIT if category == "Nd" else kinds.get(category[0], _OTHER)
        table[code] = _SPACE if mark.isspace() else _UPPER if category in ("Lu", "Lt") else kind
    return table


def _kind_counts(texts: Sequence[str]) -> Ints:
    """For each text the number of characters of each kind. A long text is taken in blocks."""
    counts = np.zeros((len(texts), _KINDS), np.int64)
    for first, block, lengths in _blocks(texts):
        codes = np.frombuffer(block.encode("utf-32-le"), np.uint32)
        kinds = _kind_table()[np.minimum(codes, _LAST)].astype(np.int64)
        kinds += _KINDS * np.repeat(np.arange(len(lengths)), lengths)
        found = np.bincount(kinds, minlength=_KINDS * len(lengths)).reshape(-1, _KINDS)
        counts[first : first + len(lengths)] += found
    return counts


def _blocks(texts: Sequence[str]) -> Iterator[tuple[int, str, list[int]]]:
    """(first text, characters, how many of them belong to each text from there on), of bounded size."""
    first, parts, size = 0, list[str](), 0
    for i, text in enumerate(texts):
        for start in range(0, max(len(text), 1), _BLOCK_CHARS):
            part = text[start : start + _BLOCK_CHARS]
            if parts and (start or size + len(part) > _BLOCK_CHARS):
                yield first, "".join(parts), list(map(len, parts))
                parts, size = [], 0
            first = first if parts else i
            parts.append(part)
            size += len(part)
    if parts:
        yield first, "".join(parts), list(map(len, parts))


class ShareBounds:
    """The bounds that a spec sets, and what to measure for them: nothing is measured that has no bound."""

    def __init__(self, spec: ShareSpec) -> None:
        self._words: Words = shared_words()
        self._stop_words = frozenset(spec.stop_words)
        measures: dict[str, tuple[str, Callable[[Sequence[str], Ints], Shares]]] = {
            "symbols": ("symbols", lambda _, kinds: _part(kinds[:, _SYMBOL], _visible(kinds))),
            "digits": ("digits", lambda _, kinds: _part(kinds[:, _DIGIT], _visible(kinds))),
            "upper_case": ("capitals", lambda _, kinds: _part(kinds[:, _UPPER], kinds[:, _UPPER] + kinds[:, _LETTER])),
            "punctuation": ("punctuation", lambda _, kinds: _part(kinds[:, _PUNCTUATION], _visible(kinds))),
            "urls": ("characters in URLs", lambda texts, kinds: _part(self._url_chars(texts), _visible(kinds))),
            "alphabetic_words": ("words with a letter", lambda texts, _: self._alphabetic(texts)),
            "stop_words": ("stop words", lambda texts, _: self._stops(texts)),
        }  # fmt: skip
        self.bounds = [
            (name, measure, getattr(spec, f"min_{key}"), getattr(spec, f"max_{key}"))
            for key, (name, measure) in measures.items()
            if getattr(spec, f"min_{key}") is not None or getattr(spec, f"max_{key}") is not None
        ]

    def broken(self, texts: Sequence[str]) -> list[tuple[str, float] | None]:
        """For each text the first bound that it breaks, in words, and the share; None if it keeps to all."""
        found: list[tuple[str, float] | None] = [None] * len(texts)
        if not self.bounds or not texts:
            return found
        kinds = _kind_counts(texts)
        for name, measure, least, most in self.bounds:
            for i, share in enumerate(measure(texts, kinds).tolist()):
                if found[i] is None and least is not None and share < least:
                    found[i] = (f"share of {name} below {least:g}", share)
                elif found[i] is None and most is not None and share > most:
                    found[i] = (f"share of {name} above {most:g}", share)
        return found

    @staticmethod
    def _url_chars(texts: Sequence[str]) -> Ints:
        return np.array([sum(len(url) for url in _URL.findall(text)) for text in texts], np.int64)

    def stop_word_count(self, text: str) -> int:
        return self._words.count_of(self._stop_words, text)

    def _alphabetic(self, texts: Sequence[str]) -> Shares:
        counts = [self._words.counts(text) for text in texts]
        return np.array([count.alphabetic / max(count.words, 1) for count in counts], np.float64)

    def _stops(self, texts: Sequence[str]) -> Shares:
        found = [self.stop_word_count(text) / max(self._words.count(text), 1) for text in texts]
        return np.array(found, np.float64)


def _visible(kinds: Ints) -> Ints:
    return np.asarray(kinds.sum(axis=1) - kinds[:, _SPACE])


def _part(some: Ints, whole: Ints) -> Shares:
    """The share, 0 of nothing."""
    return np.asarray(some / np.maximum(whole, 1))


class Length(EachDocument):
    """Only what has a bound is measured, the cheapest first."""

    def __init__(self, spec: LengthSpec, seed: int) -> None:
        measures: tuple[tuple[str, Callable[[str], int], int, int | None], ...] = (
            ("characters", len, spec.min_chars, spec.max_chars),
            ("bytes", byte_length, spec.min_bytes, spec.max_bytes),
            ("lines", _lines, spec.min_lines, spec.max_lines),
            ("words", chunk_count, spec.min_words, spec.max_words),
        )
        self._bounds = [bound for bound in measures if bound[2] or bound[3] is not None]

    def outcome(self, document: Document) -> Outcome:
        for name, measure, least, most in self._bounds:
            found = measure(document.text)
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
        pairs = zip(documents, broken, strict=True)
        return [Drop(*found) if found else self._stop_words(document.text) for document, found in pairs]

    def _stop_words(self, text: str) -> Outcome:
        least = self._min_stop_words
        if not least or (found := self._bounds.stop_word_count(text)) >= least:
            return None
        return Drop(f"fewer than {least} stop words", found)


class Lines(EachDocument):
    """Empty lines stay: what is measured is text."""

    def __init__(self, spec: LinesSpec, seed: int) -> None:
        self._spec = spec
        self._bounds = ShareBounds(spec)

    def outcome(self, document: Document) -> Outcome:
        lines = document.text.split("\n")
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


def _lines(text: str) -> int:
    return sum(bool(line) and not line.isspace() for line in text.split("\n"))
