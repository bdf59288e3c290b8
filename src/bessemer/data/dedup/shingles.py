"""Hashes of the n-grams of many documents at once, in numpy: what MinHash, SimHash and decontamination compare. A
word's hash is a polynomial over its letters, an n-gram's a polynomial over its words, both modulo 2^64 and mixed at
the end. No Python runs per word or per shingle; what is held at once does not grow with a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.folding import LETTERS, fold_bytes
from bessemer.data.order import mix
from bessemer.data.step import Ints

Words = npt.NDArray[np.uint64]
Letters = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

BLOCK_BYTES = 1 << 17  # of text at once: its 64-bit arrays are 1 MB each and stay in the cache
_VALUES = mix(np.arange(256) + (1 << 32))  # a random word for each letter
_LETTER_BASE = 0x9FB21C651E98DF25  # odd, so that its powers have inverses modulo 2^64
_UNIT_BASE = 0xD6E8FEB86659FD93
_WHOLE = 0xA0761D6478BD642F  # marks the one shingle of a document shorter than an n-gram
_DIGIT, _SPACE = ord("0"), ord(" ")


@dataclass(frozen=True)
class Shingles:
    """Some shingles. Segment i, from `starts[i]` to the next start, belongs to text `documents[i]`, of which it is
    the shingles from `first[i]` on. A text without a word or character has no segment."""

    hashes: Words
    starts: Ints
    documents: Ints
    first: Ints

    def pieces(self, most: int) -> Iterator[tuple[Words, Ints, Ints]]:
        """At most so many hashes at a time: where each text's begin among them, and the texts."""
        for start in range(0, self.hashes.size, most):
            some = self.hashes[start : start + most]
            first = int(np.searchsorted(self.starts, start, side="right")) - 1
            last = int(np.searchsorted(self.starts, start + some.size))
            yield some, np.maximum(self.starts[first:last] - start, 0), self.documents[first:last]


def shingles(texts: Sequence[str], unit: str, n: int, brief: bool = True) -> Iterator[Shingles]:
    """All n-grams of words (`unit` "word") or of characters ("char") of the folded texts, in blocks. A text shorter
    than n units is one shingle, the whole of it, or none without `brief`. A long text comes in several blocks."""
    held: list[bytes] = []
    indices: list[int] = []
    size = 0
    for i, text in enumerate(texts):
        raw = fold_bytes(text)
        if len(raw) > BLOCK_BYTES:
            yield from _long(raw, i, unit, n, brief)
            continue
        if size + len(raw) > BLOCK_BYTES:
            yield _short(held, indices, unit, n, brief)
            held, indices, size = [], [], 0
        held.append(raw)
        indices.append(i)
        size += len(raw) + 1
    if held:
        yield _short(held, indices, unit, n, brief)


def _short(raws: Sequence[bytes], indices: Sequence[int], unit: str, n: int, brief: bool) -> Shingles:
    """Whole documents, many at a time."""
    units, ends = _units(raws, unit)
    counts = np.diff(ends, prepend=0)
    begins = ends - counts
    grams = _horner(units, n)
    valid = np.ones(grams.size, bool)
    for back in range(1, n):  # windows that reach into the next document
        late = ends - back
        valid[late[(counts >= back) & (late < grams.size)]] = False
    amounts = np.maximum(counts - n + 1, 0)
    short = np.flatnonzero((counts > 0) & (counts < n))
    if brief and short.size:
        grams = np.concatenate([grams, np.zeros(n, np.uint64)])  # the last texts begin where no window fits
        valid = np.concatenate([valid, np.zeros(n, bool)])
        grams[begins[short]] = _whole(units, begins[short], counts[short], n)
        valid[begins[short]] = True
        amounts[short] = 1
    some = np.flatnonzero(amounts)
    starts = np.cumsum(amounts[some]) - amounts[some]
    first = np.zeros(some.size, np.int64)
    return Shingles(mix(grams[valid]), starts, np.asarray(indices, np.int64)[some], first)


def _long(raw: bytes, index: int, unit: str, n: int, brief: bool) -> Iterator[Shingles]:
    """One long document piece by piece; the last n - 1 units of a piece go on into the next."""
    tail = np.empty(0, np.uint64)
    done = 0
    at = np.array([0], np.int64)
    which = np.array([index], np.int64)
    begun = False
    for piece in _pieces(raw):
        new = _units([piece], unit, goes_on=begun)[0]
        begun = begun or new.size > 0
        units = np.concatenate([tail, new])
        if units.size >= n:
            yield Shingles(mix(_horner(units, n)), at, which, np.array([done], np.int64))
            done += units.size - n + 1
        tail = units[max(units.size - n + 1, 0) :]
    if brief and not done and tail.size:
        yield Shingles(mix(_whole(tail, at, np.array([tail.size]), n)), at, which, at)


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Cut at spaces, or anywhere in a run of letters that has none."""
    start = 0
    while start < len(raw):
        end = start + BLOCK_BYTES
        if end < len(raw):
            space = raw.rfind(b" ", start, end)
            end = space if space > start else end
        yield raw[start:end]
        start = end


def _units(raws: Sequence[bytes], unit: str, goes_on: bool = False) -> tuple[Words, Ints]:
    """The hash of each word or character of some documents (or of a piece that goes on with one), and where each
    document's units end."""
    sizes = np.fromiter((len(raw) + 1 for raw in raws), np.int64, len(raws))
    letters = np.frombuffer((b"\n".join(raws) + b"\n").translate(LETTERS), np.uint8)
    used = letters != 0
    opens = used.copy()
    opens[1:] &= ~used[:-1]  # the first letter of every word
    digit = letters == _DIGIT
    used[1:] &= ~(digit[1:] & digit[:-1])  # of a number, one digit
    if unit == "char":
        return _characters(letters, used, opens, sizes, goes_on)
    starts = np.flatnonzero(opens[used])
    return _hashed(letters[used], starts), np.searchsorted(np.flatnonzero(opens), np.cumsum(sizes))


def _characters(letters: Letters, used: Flags, opens: Flags, sizes: Ints, goes_on: bool) -> tuple[Words, Ints]:
    """Words with one space between two of them; a character of several bytes is one unit."""
    ends = np.cumsum(sizes)
    gap = np.zeros(letters.size, bool)
    gap[:-1] = opens[1:] & (letters[:-1] == 0)
    if not goes_on:  # no space before a document's first word
        openings = np.flatnonzero(opens)
        first = np.searchsorted(openings, ends - sizes)
        leading = openings[first[first < openings.size]] - 1
        gap[leading[leading >= 0]] = False
    letters = np.where(gap, np.uint8(_SPACE), letters)
    used |= gap
    begins = used & ((letters & 0xC0) != 0x80)  # not inside a character
    kept = letters[used]
    heads = np.flatnonzero(begins[used])
    several = heads.size < kept.size  # some character takes more than one byte
    units = _hashed(kept, heads) if several else mix(_VALUES[kept] + np.uint64(1))
    return units, np.searchsorted(np.flatnonzero(begins), ends)


def _hashed(letters: Letters, starts: Ints) -> Words:
    """One hash for each run of letters, from its start to the next."""
    if not starts.size:
        return np.empty(0, np.uint64)
    rising, inverses = powers(_LETTER_BASE, 2 * BLOCK_BYTES)
    values = _VALUES[letters]
    values *= rising[: letters.size]
    sums = np.add.reduceat(values, starts)
    sums *= inverses[starts]
    lengths = np.diff(starts, append=letters.size).astype(np.uint64)
    return mix(sums + lengths)


@lru_cache(maxsize=4)
def powers(base: int, size: int) -> tuple[Words, Words]:
    """base^i and base^-i modulo 2^64; the base is odd, so that it has an inverse."""
    made = []
    for factor in (base, pow(base, -1, 1 << 64)):
        steps = np.full(size, factor, np.uint64)
        steps[0] = 1
        made.append(np.multiply.accumulate(steps))
    return made[0], made[1]


def _horner(units: Words, n: int) -> Words:
    """The polynomial of every n units in a row."""
    size = max(units.size - n + 1, 0)
    grams = units[:size].copy()
    for i in range(1, n):
        grams *= np.uint64(_UNIT_BASE)
        grams += units[i : i + size]
    return grams


def _whole(units: Words, begins: Ints, counts: Ints, n: int) -> Words:
    """The one shingle of each document with fewer than n units."""
    grams = np.full(begins.size, _WHOLE, np.uint64)
    for i in range(n - 1):
        at = np.minimum(begins + i, units.size - 1)
        grams *= np.uint64(_UNIT_BASE)
        grams += np.where(i < counts, units[at], np.uint64(0))
    return grams
