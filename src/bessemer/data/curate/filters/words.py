"""The words of a text, and numbers about them, at the cost of one dictionary lookup for each piece between spaces.
Splitting a piece takes microseconds, so it is done once and remembered. What is remembered is bounded, and nothing
that a caller gets depends on it: two processes that saw other documents before give the same numbers."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.filters.word_splitter import PUNCTUATION, SENTENCE_ENDS, split

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

MOST_CHUNKS = 1 << 18  # remembered; about 50 MB with their words
MOST_CHARS = 1 << 25  # in the remembered chunks: encoded images can be one chunk of megabytes
MOST_RECENT_WORDS = 1 << 21  # in the texts seen last: 16 MB of numbers
PIECE_CHARS = 1 << 20  # a long text is taken in such pieces: a list of its words would take 20 times its size

# Words are hashed so that the hash of two joined words follows from theirs: a polynomial in an odd number modulo
# 2**64, where every odd number has an inverse.
BASE = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64

_SPACE = re.compile(r"\s")
_TOKENS = re.compile(r"\S+|\s\s+|[^\S ]")


class WordCounts(NamedTuple):
    words: int
    plain: int  # words that are not made of punctuation alone
    plain_chars: int
    alphabetic: int  # words with at least one letter


class WordSpans(NamedTuple):
    """One entry for each word, in order."""

    lengths: Ints
    hashes: Hashes


class Words:
    """Remembers how chunks split. One for each process is enough: see `shared_words`."""

    def __init__(self, most_chunks: int = MOST_CHUNKS, most_chars: int = MOST_CHARS) -> None:
        self._most_chunks, self._most_chars = most_chunks, most_chars
        self._begin(_Chunks())

    def _begin(self, chunks: _Chunks) -> None:
        self._chunks = chunks
        self._counted = _Table(_counted, np.bool_, np.int64, np.bool_)
        self._hashed = _Table(_hashed, np.int64, np.uint64)
        self._recent: dict[str, Ints] = {}
        self._recent_words = 0

    def count(self, text: str) -> int:
        return sum(len(ids) for ids in self._ids(text))

    def counts(self, text: str) -> WordCounts:
        words = plain = plain_chars = alphabetic = 0
        for ids in self._ids(text):
            is_plain, chars, has_letter = self._counted.filled(self._chunks.words())
            words += len(ids)
            plain += int(np.count_nonzero(is_plain[ids]))
            plain_chars += int(chars[ids].sum())
            alphabetic += int(np.count_nonzero(has_letter[ids]))
        return WordCounts(words, plain, plain_chars, alphabetic)

    def spans(self, text: str) -> WordSpans:
        """Lengths and hashes of the words: equal hashes of joined words mean equal text (to 64 bits)."""
        found = []
        for ids in self._ids(text):
            found.append([column[ids] for column in self._hashed.filled(self._chunks.words())])
        return WordSpans(*(found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))))

    def distinct(self, text: str) -> set[str]:
        """The different words of a text."""
        found: set[str] = set()
        for ids in self._ids(text):
            found.update(map(self._chunks.words().__getitem__, set(ids.tolist())))
        return found

    def count_of(self, chosen: frozenset[str], text: str) -> int:
        """How many words of the text are among the chosen, which are in lower case."""
        counted = 0
        for ids in self._ids(text):
            words = self._chunks.words()
            counted += sum(times for i, times in Counter(ids.tolist()).items() if words[i].lower() in chosen)
        return counted

    def _ids(self, text: str) -> Iterator[Ints]:
        """Numbers of the words, piece by piece; they hold until the next piece is asked for."""
        recent = self._recent.get(text)
        if recent is not None:
            yield recent
            return
        for piece in pieces(text):
            if len(self._chunks) > self._most_chunks or self._chunks.chars > self._most_chars:
                # What came first is what comes often; the many that came once go.
                kept = self._chunks.first(self._most_chunks // 4)
                self._begin(kept if kept.chars <= self._most_chars // 2 else _Chunks())
            found = chain.from_iterable(map(self._chunks.__getitem__, piece.split()))
            ids = np.fromiter(found, np.int64)
            if piece is text:
                self._remember(text, ids)
            yield ids

    def _remember(self, text: str, ids: Ints) -> None:
        """Steps that follow one another look at the same texts, a batch at a time."""
        self._recent_words += len(ids)
        if self._recent_words > MOST_RECENT_WORDS:
            self._recent.clear()
            self._recent_words = len(ids)
        self._recent[text] = ids


class _Chunks(dict[str, tuple[int, ...]]):
    """The numbers of a chunk's words, in the order in which words turn up; splits it when it is new."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.chars = 0
        self._words: list[str] = []

    def __missing__(self, chunk: str) -> tuple[int, ...]:
        words, numbers = split(chunk), self.numbers
        if len(words) == 1:
            ids: tuple[int, ...] = (numbers.setdefault(chunk, len(numbers)),)
        else:
            ids = tuple([numbers.setdefault(word, len(numbers)) for word in words])
        self[chunk] = ids
        self.chars += len(chunk)
        return ids

    def first(self, number: int) -> _Chunks:
        """A memory of the first chunks only. Their words have the lowest numbers, and keep them."""
        kept = _Chunks()
        kept.update(islice(self.items(), number))
        known = max(map(max, kept.values()), default=-1) + 1
        kept.numbers = dict(islice(self.numbers.items(), known))
        kept.chars = sum(map(len, kept))
        return kept

    def words(self) -> list[str]:
        """All known words by number. New ones are read from the end of `numbers`: the others are many."""
        new = len(self.numbers) - len(self._words)
        if new:
            self._words += list(islice(reversed(self.numbers), new))[::-1]
        return self._words


class _Table:
    """Numbers about each known word, one row of columns, worked out for new words when they are asked for."""

    def __init__(self, rule: Callable[[list[str]], Any], *dtypes: Any) -> None:
        self._rule = rule
        self._columns: list[npt.NDArray[Any]] = [np.zeros(1 << 12, dtype) for dtype in dtypes]
        self._filled = 0

    def filled(self, words: list[str]) -> list[npt.NDArray[Any]]:
        known, self._filled = self._filled, len(words)
        if known < self._filled:
            for i, values in enumerate(self._rule(words[known:])):
                if self._filled > len(self._columns[i]):
                    self._columns[i] = np.resize(self._columns[i], 2 * self._filled)
                self._columns[i][known : self._filled] = values
        return self._columns


def _counted(words: list[str]) -> tuple[list[bool], list[int], list[bool]]:
    """Whether each word is plain, its length if so, and whether it has a letter."""
    plain = [not PUNCTUATION.issuperset(word) for word in words]
    chars = [len(word) if is_plain else 0 for word, is_plain in zip(words, plain, strict=True)]
    return plain, chars, list(map(_has_letter, words))


def _has_letter(word: str) -> bool:
    if word.isascii():
        return word.isalpha() or word.lower() != word.upper()
    return any(map(str.isalpha, word))


def _hashed(words: list[str]) -> tuple[list[int], Hashes]:
    return list(map(len, words)), hash_words(words)


def hash_words(words: list[str]) -> Hashes:
    """For each word the sum of its characters' code points + 1, the i-th times BASE**i, modulo 2**64."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    codes = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32).astype(np.uint64)
    codes += np.uint64(1)  # so that no character is like a gap
    starts = np.cumsum(lengths) - lengths
    codes *= powers(np.arange(len(codes)) - np.repeat(starts, lengths))
    return np.add.reduceat(codes, starts) if len(words) else codes


def pieces(text: str) -> Iterator[str]:
    """The text cut at white space, every PIECE_CHARS characters or so."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        space = _SPACE.search(text, start + PIECE_CHARS)
        if not space:
            break
        yield text[start : space.start()]
        start = space.end()
    yield text[start:] if start else text


def chunk_count(text: str) -> int:
    """The pieces between spaces: a text has at least as many words."""
    return sum(len(piece.split()) for piece in pieces(text))


@functools.cache
def _table(base: int, size: int) -> Hashes:
    steps = np.full(size, base, np.uint64)
    steps[:1] = 1
    return np.multiply.accumulate(steps)


_INVERSE = pow(BASE, -1, _MODULUS)
_FAR = 1 << 16


def powers(exponents: Ints, inverse: bool = False) -> Hashes:
    """BASE (or its inverse) to each exponent, modulo 2**64."""
    base = _INVERSE if inverse else BASE
    far = int(exponents.max(initial=0)) // _FAR
    if not far:
        return _table(base, _FAR)[exponents]
    size = 1 << far.bit_length()  # few different tables, whatever the texts
    return _table(base, _FAR)[exponents % _FAR] * _table(pow(base, _FAR, _MODULUS), size)[exponents // _FAR]


@functools.cache
def shared_words() -> Words:
    """The process's memory of chunks, so that several steps in a row do not each keep one."""
    return Words()


def sentences(line: str, most: int) -> int:
    """How many sentences a line has: 1 and one more for every word that follows an end mark. Stops at `most`. Words
    are all that is looked at: `3.14` has no end mark in it, `Dr.` is one word, a lone `.` ends a sentence."""
    found, ended = 1, False
    for token in _TOKENS.findall(line):
        for word in split(token) if not token.isspace() else (token,):
            if word in SENTENCE_ENDS:
                ended = True
            elif ended and not all(unicodedata.category(mark)[0] == "P" for mark in word):
                found, ended = found + 1, False
                if found >= most:
                    return found
    return found
