"""The words of a text, and numbers about them, at the cost of one dictionary lookup per chunk between spaces. Splitting
a chunk takes microseconds, so splits are cached. The cache is bounded and never affects results."""

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

MAX_CHUNKS = 1 << 18  # cached; about 50 MB with their words
MAX_CHARS = 1 << 25  # in cached chunks: encoded images can be one chunk of megabytes
MAX_RECENT_WORDS = 1 << 21  # in the most recent texts: 16 MB of ids
PIECE_CHARS = 1 << 20  # per piece of a long text: a list of all its words would take 20 times its size

# The hash of joined words follows from the hashes of the words: a polynomial modulo 2**64 in an odd number, which has
# an inverse.
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
    """One entry per word, in order."""

    lengths: Ints
    hashes: Hashes


class Words:
    """Caches how chunks split. One per process is enough: see `shared_words`."""

    def __init__(self, max_chunks: int = MAX_CHUNKS, max_chars: int = MAX_CHARS) -> None:
        self._max_chunks, self._max_chars = max_chunks, max_chars
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
        """Lengths and hashes of the words; equal hashes of joined words mean equal text (to 64 bits)."""
        pieces = [[column[ids] for column in self._hashed.filled(self._chunks.words())] for ids in self._ids(text)]
        return WordSpans(*(pieces[0] if len(pieces) == 1 else map(np.concatenate, zip(*pieces, strict=True))))

    def distinct(self, text: str) -> set[str]:
        """The distinct words of a text."""
        words: set[str] = set()
        for ids in self._ids(text):
            words.update(map(self._chunks.words().__getitem__, set(ids.tolist())))
        return words

    def count_of(self, chosen: frozenset[str], text: str) -> int:
        """How many words of the text are among the lower-case `chosen` ones."""
        counted = 0
        for ids in self._ids(text):
            words = self._chunks.words()
            counted += sum(times for i, times in Counter(ids.tolist()).items() if words[i].lower() in chosen)
        return counted

    def _ids(self, text: str) -> Iterator[Ints]:
        """Ids of the words, piece by piece; valid until the next piece is requested."""
        recent = self._recent.get(text)
        if recent is not None:
            yield recent
            return
        for piece in pieces(text):
            if len(self._chunks) > self._max_chunks or self._chunks.chars > self._max_chars:
                # Early chunks are frequent ones; the many that occurred once are evicted.
                frequent = self._chunks.first(self._max_chunks // 4)
                self._begin(frequent if frequent.chars <= self._max_chars // 2 else _Chunks())
            chunk_ids = chain.from_iterable(map(self._chunks.__getitem__, piece.split()))
            ids = np.fromiter(chunk_ids, np.int64)
            if piece is text:
                self._remember(text, ids)
            yield ids

    def _remember(self, text: str, ids: Ints) -> None:
        """Caches the text's ids, because consecutive steps process the same batch of texts."""
        self._recent_words += len(ids)
        if self._recent_words > MAX_RECENT_WORDS:
            self._recent.clear()
            self._recent_words = len(ids)
        self._recent[text] = ids


class _Chunks(dict[str, tuple[int, ...]]):
    """The ids of a chunk's words, numbered by first occurrence; splits a new chunk."""

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
        """A cache of the first chunks only. Their words have the lowest ids, and keep them."""
        first_chunks = _Chunks()
        first_chunks.update(islice(self.items(), number))
        word_count = max(map(max, first_chunks.values()), default=-1) + 1
        first_chunks.numbers = dict(islice(self.numbers.items(), word_count))
        first_chunks.chars = sum(map(len, first_chunks))
        return first_chunks

    def words(self) -> list[str]:
        """All words by id. New ones are read from the end of `numbers`, because the others are many."""
        new = len(self.numbers) - len(self._words)
        if new:
            self._words += list(islice(reversed(self.numbers), new))[::-1]
        return self._words


class _Table:
    """Columns of numbers about each word, computed for new words on request."""

    def __init__(self, rule: Callable[[list[str]], Any], *dtypes: Any) -> None:
        self._rule = rule
        self._columns: list[npt.NDArray[Any]] = [np.zeros(1 << 12, dtype) for dtype in dtypes]
        self._filled = 0

    def filled(self, words: list[str]) -> list[npt.NDArray[Any]]:
        start, self._filled = self._filled, len(words)
        if start < self._filled:
            for i, values in enumerate(self._rule(words[start:])):
                if self._filled > len(self._columns[i]):
                    self._columns[i] = np.resize(self._columns[i], 2 * self._filled)
                self._columns[i][start : self._filled] = values
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
    codes += np.uint64(1)  # so that no character equals a gap
    starts = np.cumsum(lengths) - lengths
    codes *= powers(np.arange(len(codes)) - np.repeat(starts, lengths))
    return np.add.reduceat(codes, starts) if len(words) else codes


def pieces(text: str) -> Iterator[str]:
    """The text cut at white space, about every PIECE_CHARS characters."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        space = _SPACE.search(text, start + PIECE_CHARS)
        if not space:
            break
        yield text[start : space.start()]
        start = space.end()
    yield text[start:] if start else text


def chunk_count(text: str) -> int:
    """The number of chunks between spaces: a text has at least as many words."""
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
    size = 1 << far.bit_length()  # a few table sizes for all texts
    return _table(base, _FAR)[exponents % _FAR] * _table(pow(base, _FAR, _MODULUS), size)[exponents // _FAR]


@functools.cache
def shared_words() -> Words:
    """The cache of this process, shared by consecutive steps."""
    return Words()


def count_sentences(line: str, most: int) -> int:
    """The sentences of a line, counted up to `most`: 1, plus one for every word that follows an end mark. Only words
    count: `3.14` holds no end mark, `Dr.` is one word, a lone `.` ends a sentence."""
    count, ended = 1, False
    for token in _TOKENS.findall(line):
        for word in split(token) if not token.isspace() else (token,):
            if word in SENTENCE_ENDS:
                ended = True
            elif ended and not all(unicodedata.category(mark)[0] == "P" for mark in word):
                count, ended = count + 1, False
                if count >= most:
                    return count
    return count
