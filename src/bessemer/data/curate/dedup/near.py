"""Hashes of the n-grams of many documents at once, in numpy: what MinHash, SimHash and decontamination compare. A
word's hash is a polynomial over its letters, an n-gram's a polynomial over its words, both modulo 2^64 and mixed at
the end. No Python runs per word or per shingle; what is held at once does not grow with a document.

Near-duplicates by MinHash: each document's n-grams become a short signature, and similar documents share buckets.
The share of n-grams that two documents have in common (Jaccard) is the probability that one hash of their signatures
agrees. `rows` hashes make a band; documents with an equal band are candidates (locality-sensitive hashing).

Near-duplicates by SimHash: 64 bits for each document, of which similar documents differ in few. Each n-gram votes
on every bit, as often as it occurs; the chance that a bit differs is the angle between two documents' n-gram counts
over pi. Two words that differ in at most k bits agree in all bits of some m - k of m blocks, so looking through all
choices of blocks finds every such pair (pigeonhole), whatever m is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.dedup import shuffle
from bessemer.data.curate.dedup.clusters import (
    CHECKED,
    Linking,
    OneOfEach,
    Resolved,
    about,
    flatten,
    link_equal,
    resolve_by_keys,
    scatter_keys,
    settle,
    unite,
)
from bessemer.data.curate.dedup.exact import LETTERS, fold_bytes
from bessemer.data.curate.dedup.shuffle import BucketTask, begins, for_buckets, for_parts, numbering
from bessemer.data.curate.step import Arrays, Collected, Ints, PerDocumentStep
from bessemer.data.document import Document
from bessemer.data.stream.order import chain, mix
from bessemer.spec.curate.dedup import DedupMinhashSpec, DedupSimhashSpec

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


_EMPTY = np.uint64(2**64 - 1)
_AT_ONCE = 1 << 16  # shingles permuted together: 512 KB, which stays in the second-level cache


class Signer:
    """Signatures of `hashes` 64-bit minima, the same on every machine for the same seed. On one core some 12,000
    documents of 600 shingles a second with 112 hashes, once the shingles are there."""

    def __init__(self, unit: str, ngram: int, hashes: int, seed: int) -> None:
        self.unit, self.ngram, self.hashes = unit, ngram, hashes
        keys = chain(seed, np.arange(2 * hashes))
        # x -> a * x + b modulo 2^64 permutes the words for odd a. The shingles are mixed already, so their order
        # under such a permutation is as good as random; measured in the tests, for every hash.
        self._multiply, self._add = keys[:hashes] | np.uint64(1), keys[hashes:]

    def sign(self, texts: Sequence[str]) -> tuple[Words, Ints]:
        """(a row of minima for each text, numbers of the texts that have one): texts without words have none."""
        minima = np.full((len(texts), self.hashes), _EMPTY, np.uint64)
        seen = np.zeros(len(texts), bool)
        scratch = np.empty(_AT_ONCE, np.uint64)
        for block in shingles(texts, self.unit, self.ngram):
            seen[block.documents] = True
            for some, bounds, rows in block.pieces(_AT_ONCE):
                found = np.empty((self.hashes, rows.size), np.uint64)
                held = scratch[: some.size]
                for i in range(self.hashes):
                    np.multiply(some, self._multiply[i], out=held)
                    np.add(held, self._add[i], out=held)
                    np.minimum.reduceat(held, bounds, out=found[i])
                minima[rows] = np.minimum(minima[rows], found.T)
        return minima, np.flatnonzero(seen)


def band_keys(minima: Words, bands: int, rows: int) -> Words:
    """One key for each band of each signature; bands never share keys with each other, but for chance."""
    grouped = minima.reshape(-1, bands, rows)
    keys = np.broadcast_to(mix(np.arange(bands)), grouped.shape[:2])
    for row in range(rows):
        keys = mix(keys ^ grouped[:, :, row])
    return keys


class DedupMinhash(OneOfEach):
    """Of each cluster of near-duplicates one document stays. Those without a single word take no part."""

    def __init__(self, spec: DedupMinhashSpec, seed: int) -> None:
        self.spec = spec
        unit, ngram, self.bands, self.rows = spec.numbers
        self.signer = Signer(unit, ngram, self.bands * self.rows, spec.seed)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        minima, there = self.signer.sign([document.text for document in documents])
        minima = minima[there]
        arrays = about([documents[i] for i in there.tolist()], ordinals[there], self.spec.keep)
        if self.spec.verify is not None:
            arrays["signature"] = minima
        return {**arrays, "key": band_keys(minima, self.bands, self.rows)}

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: PerDocumentStep) -> Resolved:
        keep, least = self.spec.keep, self.spec.verify or 0.0
        size = self.signer.hashes if least else 0
        return resolve_by_keys(collected, scratch, each, self.bands, keep, signature=size, least=least)


BITS = 64
_TABLED = np.dtype([("key", "<u8"), ("document", "<i8"), ("bits", "<u8")])
_PAIRS_AT_ONCE = 1 << 20
_VOTES_AT_ONCE = 1 << 15  # fit in a quarter of a word
# For each value of four bits, these bits as the quarters of a word.
_SPREAD = np.array([sum((four >> i & 1) << 16 * i for i in range(4)) for four in range(16)], np.uint64)
_RECORD_COST = 50  # of a record sorted twice, measured against the comparison of a pair


def simhash(texts: Sequence[str], unit: str, ngram: int) -> tuple[Words, Ints]:
    """(the 64 bits of each text, numbers of the texts that have any words or characters)."""
    ones = np.zeros((len(texts), BITS), np.int64)
    votes = np.zeros(len(texts), np.int64)
    for block in shingles(texts, unit, ngram):
        for some, bounds, texts_here in block.pieces(_VOTES_AT_ONCE):
            ones[texts_here] += _count_ones(some, bounds)
            votes[texts_here] += np.diff(bounds, append=some.size)
    bits = np.packbits(2 * ones > votes[:, None], axis=1, bitorder="little").view("<u8").ravel()
    return bits.astype(np.uint64), np.flatnonzero(votes)


def _count_ones(hashes: Words, bounds: Ints) -> Ints:
    """How often each bit is set from each bound to the next. Four bits are counted at once, in the quarters of a word:
    80 ns a shingle, against 235 with a byte for each bit."""
    nibbles = hashes.astype("<u8").view(np.uint8).reshape(-1, 8)
    counts = np.empty((bounds.size, BITS), np.int64)
    for column in range(8):
        values = nibbles[:, column]
        for half in range(2):
            sums = np.add.reduceat(_SPREAD[(values >> (4 * half)) & 15], bounds)
            at = 8 * column + 4 * half
            counts[:, at : at + 4] = sums.astype("<u8").view("<u2").reshape(-1, 4)
    return counts


def tables(distance: int, documents: int) -> list[np.uint64]:
    """Masks such that any two words within `distance` bits agree under one of them. More blocks give longer keys, so
    fewer pairs to compare by chance, but more tables: the cheapest is taken."""

    def cost(blocks: int) -> float:
        made = math.comb(blocks, distance)
        by_chance = documents / 2 ** (BITS * (blocks - distance) / blocks)
        return made * (_RECORD_COST + by_chance)

    blocks = min(range(distance + 1, distance + 5), key=cost)
    edges = [BITS * i // blocks for i in range(blocks + 1)]
    whole = [((1 << (stop - start)) - 1) << start for start, stop in pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in combinations(whole, blocks - distance)]


@dataclass(frozen=True)
class _Stage:
    """What the tasks of the second stage have in common; `equal` is the first."""

    equal: Linking
    tabled: Path
    distance: int
    masks: tuple[np.uint64, ...]
    table_buckets: int

    def edges(self, bucket: int) -> Path:
        return self.tabled / f"{bucket:06d}.links"


class DedupSimhash(OneOfEach):
    """Of documents linked by small distances one stays. Those without a single word take no part."""

    version = 2

    def __init__(self, spec: DedupSimhashSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        bits, there = simhash([document.text for document in documents], self.spec.unit, self.spec.ngram)
        having = [documents[i] for i in there.tolist()]
        bits = bits[there]
        # The mixed fingerprint is as good a key, and even.
        return {**about(having, ordinals[there], self.spec.keep), "key": mix(bits), "check": bits}

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: PerDocumentStep) -> Resolved:
        """First equal fingerprints are linked, so that a text with a million copies is compared once; then those
        that differ are looked up in the tables."""
        total = int(numbering(collected)[-1])
        masks = tables(self.spec.distance, total)
        table_buckets = shuffle.bucket_count(total * len(masks), _TABLED)
        buckets = shuffle.bucket_count(total, CHECKED)
        equal = Linking(scratch / "fingerprints", len(collected), buckets, checked=True)
        stage = _Stage(equal, scratch / "tables", self.spec.distance, tuple(masks), table_buckets)
        equal.scratch.mkdir()
        stage.tabled.mkdir()
        documents = sum(each(scatter_keys, for_parts("SimHash", equal, collected)))
        each(fill_tables, for_buckets("SimHash", stage, buckets))
        each(link_near, for_buckets("SimHash tables", stage, table_buckets))
        links = [*map(equal.edges, range(buckets)), *map(stage.edges, range(table_buckets))]
        return settle(collected, scratch, links, documents, self.spec.keep)


def fill_tables(task: BucketTask[_Stage]) -> None:
    """Links documents with one fingerprint, and puts the first of each into the tables."""
    stage = task.shared
    heads = link_equal(stage.equal, task.bucket)
    bits = heads["check"]
    records = np.empty(bits.size, _TABLED)
    records["document"], records["bits"] = heads["document"], bits
    for i, mask in enumerate(stage.masks):
        records["key"] = mix(mix(bits & mask) + np.uint64(i))
        run = task.bucket * len(stage.masks) + i
        shuffle.write_run(stage.tabled, run, records, shuffle.hash_bounds(stage.table_buckets))


def link_near(task: BucketTask[_Stage]) -> None:
    """Compares all pairs that agree in some table's bits. Clusters are formed at once, so that a thousand documents
    near each other give a thousand links and not half a million."""
    stage = task.shared
    runs = stage.equal.buckets * len(stage.masks)
    held = shuffle.read_bucket(stage.tabled, runs, task.bucket, _TABLED)
    records = np.concatenate([np.empty(0, _TABLED), *held])
    records = records[np.argsort(records["key"])]
    parents = np.arange(records.size)
    for left, right in _pairs(records["key"]):
        near = np.bitwise_count(records["bits"][left] ^ records["bits"][right]) <= stage.distance
        unite(parents, left[near], right[near])
    flatten(parents)
    linked = np.flatnonzero(parents != np.arange(records.size))
    links = np.stack([records["document"][parents[linked]], records["document"][linked]], axis=1)
    shuffle.write_whole(stage.edges(task.bucket), [links])


def _pairs(keys: Words) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of places in sorted keys that hold equal ones, in blocks: each place with the next, the next but one,
    and so on, as long as any group reaches so far."""
    if not keys.size:
        return
    new = begins(keys)
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], keys.size)
    last = ends[np.cumsum(new) - 1] - 1  # of the group of each place
    at = np.flatnonzero(last > np.arange(keys.size))
    step = 1
    while at.size:
        for start in range(0, at.size, _PAIRS_AT_ONCE):
            some = at[start : start + _PAIRS_AT_ONCE]
            yield some, some + step
        step += 1
        at = at[last[at] >= at + step]
