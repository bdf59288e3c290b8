"""Near-duplicates by MinHash and SimHash, over hashes of n-grams (shingles).

Shingles: a word's hash is a polynomial over its letters, an n-gram's a polynomial over its words, both modulo 2^64 and
mixed at the end. numpy does all the work per word and shingle, in blocks, so memory does not grow with a document.

MinHash: each document's shingles become a short signature. The probability that one hash of two signatures agrees is
the share of n-grams that the documents have in common (Jaccard). `rows` hashes form a band; documents with an equal
band are candidates (locality-sensitive hashing).

SimHash: each document gets 64 bits, and similar documents differ in few. Each n-gram votes on every bit, as often as it
occurs; the probability that a bit differs is the angle between the n-gram counts over pi. Two words that differ in at
most k bits agree in all bits of some m - k of m blocks, so searching all choices of blocks finds every pair
(pigeonhole).
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

from bessemer.data.curate.dedup import clusters, shuffle
from bessemer.data.curate.dedup.clusters import CHECKED, ClusterDedupStep, LinkJob, Resolved, describe_documents
from bessemer.data.curate.dedup.exact import LETTERS, fold_bytes
from bessemer.data.curate.dedup.shuffle import BucketTask, begins, for_buckets, for_parts, numbering
from bessemer.data.curate.step import Arrays, Collected, Ints, RunTasks
from bessemer.data.read.entry import Document
from bessemer.data.stream.order import chain, mix
from bessemer.spec.curate.dedup import DedupMinhashSpec, DedupSimhashSpec

Words = npt.NDArray[np.uint64]
Letters = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

BLOCK_BYTES = 1 << 17  # of text per block: its 64-bit arrays of 1 MB stay in the CPU cache
_VALUES = mix(np.arange(256) + (1 << 32))  # a random word for each letter
_LETTER_BASE = 0x9FB21C651E98DF25  # odd, so its powers have inverses modulo 2^64
_UNIT_BASE = 0xD6E8FEB86659FD93
_SHORT_MARK = 0xA0761D6478BD642F  # marks the one shingle of a document shorter than an n-gram
_DIGIT, _SPACE = ord("0"), ord(" ")


@dataclass(frozen=True)
class Shingles:
    """A block of shingles. Segment i, from `starts[i]` to the next start, belongs to text `documents[i]` and holds its
    shingles from number `first[i]` on. A text without words or characters has no segment."""

    hashes: Words
    starts: Ints
    documents: Ints
    first: Ints

    def pieces(self, max_hashes: int) -> Iterator[tuple[Words, Ints, Ints]]:
        """At most `most` hashes at a time, the start of each text's hashes among them, and the texts."""
        for start in range(0, self.hashes.size, max_hashes):
            piece = self.hashes[start : start + max_hashes]
            first = int(np.searchsorted(self.starts, start, side="right")) - 1
            last = int(np.searchsorted(self.starts, start + piece.size))
            yield piece, np.maximum(self.starts[first:last] - start, 0), self.documents[first:last]


def shingles(texts: Sequence[str], unit: str, n: int, brief: bool = True) -> Iterator[Shingles]:
    """All n-grams of words (`unit` "word") or characters ("char") of the folded texts, in blocks. A text shorter than n
    units is one shingle, or none without `brief`. A long text takes several blocks."""
    batch: list[bytes] = []
    indices: list[int] = []
    size = 0
    for i, text in enumerate(texts):
        raw = fold_bytes(text)
        if len(raw) > BLOCK_BYTES:
            yield from _long_document(raw, i, unit, n, brief)
            continue
        if size + len(raw) > BLOCK_BYTES:
            yield _short_documents(batch, indices, unit, n, brief)
            batch, indices, size = [], [], 0
        batch.append(raw)
        indices.append(i)
        size += len(raw) + 1
    if batch:
        yield _short_documents(batch, indices, unit, n, brief)


def _short_documents(raws: Sequence[bytes], indices: Sequence[int], unit: str, n: int, brief: bool) -> Shingles:
    """Many whole documents at a time."""
    units, ends = _units(raws, unit)
    counts = np.diff(ends, prepend=0)
    begins = ends - counts
    grams = _ngram_hashes(units, n)
    valid = np.ones(grams.size, bool)
    for back in range(1, n):  # windows that reach into the next document
        late = ends - back
        valid[late[(counts >= back) & (late < grams.size)]] = False
    amounts = np.maximum(counts - n + 1, 0)
    short = np.flatnonzero((counts > 0) & (counts < n))
    if brief and short.size:
        grams = np.concatenate([grams, np.zeros(n, np.uint64)])  # the last texts start where no window fits
        valid = np.concatenate([valid, np.zeros(n, bool)])
        grams[begins[short]] = _short_document_shingle(units, begins[short], counts[short], n)
        valid[begins[short]] = True
        amounts[short] = 1
    nonempty = np.flatnonzero(amounts)
    starts = np.cumsum(amounts[nonempty]) - amounts[nonempty]
    first = np.zeros(nonempty.size, np.int64)
    return Shingles(mix(grams[valid]), starts, np.asarray(indices, np.int64)[nonempty], first)


def _long_document(raw: bytes, index: int, unit: str, n: int, brief: bool) -> Iterator[Shingles]:
    """One long document piece by piece; the last n - 1 units of a piece continue in the next."""
    tail = np.empty(0, np.uint64)
    done = 0
    at = np.array([0], np.int64)
    which = np.array([index], np.int64)
    started = False
    for piece in _pieces(raw):
        new = _units([piece], unit, continues=started)[0]
        started = started or new.size > 0
        units = np.concatenate([tail, new])
        if units.size >= n:
            yield Shingles(mix(_ngram_hashes(units, n)), at, which, np.array([done], np.int64))
            done += units.size - n + 1
        tail = units[max(units.size - n + 1, 0) :]
    if brief and not done and tail.size:
        yield Shingles(mix(_short_document_shingle(tail, at, np.array([tail.size]), n)), at, which, at)


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Cut at spaces, or anywhere in a run of letters without one."""
    start = 0
    while start < len(raw):
        end = start + BLOCK_BYTES
        if end < len(raw):
            space = raw.rfind(b" ", start, end)
            end = space if space > start else end
        yield raw[start:end]
        start = end


def _units(raws: Sequence[bytes], unit: str, continues: bool = False) -> tuple[Words, Ints]:
    """The hash of each word or character of some documents (or of a piece that continues one), and the end of each
    document's units."""
    sizes = np.fromiter((len(raw) + 1 for raw in raws), np.int64, len(raws))
    letters = np.frombuffer((b"\n".join(raws) + b"\n").translate(LETTERS), np.uint8)
    used = letters != 0
    opens = used.copy()
    opens[1:] &= ~used[:-1]  # the first letter of every word
    digit = letters == _DIGIT
    used[1:] &= ~(digit[1:] & digit[:-1])  # one digit per number
    if unit == "char":
        return _characters(letters, used, opens, sizes, continues)
    starts = np.flatnonzero(opens[used])
    return _hash_runs(letters[used], starts), np.searchsorted(np.flatnonzero(opens), np.cumsum(sizes))


def _characters(letters: Letters, used: Flags, opens: Flags, sizes: Ints, continues: bool) -> tuple[Words, Ints]:
    """Words with one space between two of them; a multi-byte character is one unit."""
    ends = np.cumsum(sizes)
    gap = np.zeros(letters.size, bool)
    gap[:-1] = opens[1:] & (letters[:-1] == 0)
    if not continues:  # no space before a document's first word
        openings = np.flatnonzero(opens)
        first = np.searchsorted(openings, ends - sizes)
        leading = openings[first[first < openings.size]] - 1
        gap[leading[leading >= 0]] = False
    letters = np.where(gap, np.uint8(_SPACE), letters)
    used |= gap
    begins = used & ((letters & 0xC0) != 0x80)  # first byte of a character
    used_letters = letters[used]
    heads = np.flatnonzero(begins[used])
    several = heads.size < used_letters.size  # some characters are multi-byte
    units = _hash_runs(used_letters, heads) if several else mix(_VALUES[used_letters] + np.uint64(1))
    return units, np.searchsorted(np.flatnonzero(begins), ends)


def _hash_runs(letters: Letters, starts: Ints) -> Words:
    """One hash per run of letters, from its start to the next."""
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
    """base^i and base^-i modulo 2^64, for an odd base."""
    tables = []
    for factor in (base, pow(base, -1, 1 << 64)):
        steps = np.full(size, factor, np.uint64)
        steps[0] = 1
        tables.append(np.multiply.accumulate(steps))
    return tables[0], tables[1]


def _ngram_hashes(units: Words, n: int) -> Words:
    """The polynomial of every n consecutive units."""
    size = max(units.size - n + 1, 0)
    grams = units[:size].copy()
    for i in range(1, n):
        grams *= np.uint64(_UNIT_BASE)
        grams += units[i : i + size]
    return grams


def _short_document_shingle(units: Words, begins: Ints, counts: Ints, n: int) -> Words:
    """The single shingle of each document with fewer than n units."""
    grams = np.full(begins.size, _SHORT_MARK, np.uint64)
    for i in range(n - 1):
        at = np.minimum(begins + i, units.size - 1)
        grams *= np.uint64(_UNIT_BASE)
        grams += np.where(i < counts, units[at], np.uint64(0))
    return grams


_EMPTY = np.uint64(2**64 - 1)
_AT_ONCE = 1 << 16  # shingles permuted together: 512 KB fit in the L2 cache


class Signer:
    """Signatures of `hashes` 64-bit minima, the same on every machine for the same seed. One core signs about 12,000
    documents of 600 shingles per second with 112 hashes."""

    def __init__(self, unit: str, ngram: int, hashes: int, seed: int) -> None:
        self.unit, self.ngram, self.hashes = unit, ngram, hashes
        keys = chain(seed, np.arange(2 * hashes))
        # x -> a * x + b modulo 2^64 permutes the words for odd a. Shingles are already mixed, so their order under such
        # a permutation is as good as random (the tests measure it for every hash).
        self._multiply, self._add = keys[:hashes] | np.uint64(1), keys[hashes:]

    def sign(self, texts: Sequence[str]) -> tuple[Words, Ints]:
        """(one row of minima per text, the numbers of the texts with words)."""
        minima = np.full((len(texts), self.hashes), _EMPTY, np.uint64)
        seen = np.zeros(len(texts), bool)
        scratch = np.empty(_AT_ONCE, np.uint64)
        for block in shingles(texts, self.unit, self.ngram):
            seen[block.documents] = True
            for piece, bounds, rows in block.pieces(_AT_ONCE):
                piece_minima = np.empty((self.hashes, rows.size), np.uint64)
                permuted = scratch[: piece.size]
                for i in range(self.hashes):
                    np.multiply(piece, self._multiply[i], out=permuted)
                    np.add(permuted, self._add[i], out=permuted)
                    np.minimum.reduceat(permuted, bounds, out=piece_minima[i])
                minima[rows] = np.minimum(minima[rows], piece_minima.T)
        return minima, np.flatnonzero(seen)


def band_keys(minima: Words, bands: int, rows: int) -> Words:
    """One key per band of each signature; different bands share keys only by chance."""
    grouped = minima.reshape(-1, bands, rows)
    keys = np.broadcast_to(mix(np.arange(bands)), grouped.shape[:2])
    for row in range(rows):
        keys = mix(keys ^ grouped[:, :, row])
    return keys


class DedupMinhash(ClusterDedupStep):
    """Keeps one document of each cluster of near-duplicates. Documents without a word do not take part."""

    def __init__(self, spec: DedupMinhashSpec, seed: int) -> None:
        self.spec = spec
        unit, ngram, self.bands, self.rows = spec.numbers
        self.signer = Signer(unit, ngram, self.bands * self.rows, spec.seed)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        minima, has_words = self.signer.sign([document.text for document in documents])
        minima = minima[has_words]
        arrays = describe_documents([documents[i] for i in has_words.tolist()], ordinals[has_words], self.spec.keep)
        if self.spec.verify is not None:
            arrays["signature"] = minima
        return {**arrays, "key": band_keys(minima, self.bands, self.rows)}

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        keep, least = self.spec.keep, self.spec.verify or 0.0
        size = self.signer.hashes if least else 0
        return clusters.resolve_by_keys(collected, scratch, run_tasks, self.bands, keep, signature=size, least=least)


BITS = 64
_TABLED = np.dtype([("key", "<u8"), ("document", "<i8"), ("bits", "<u8")])
_PAIRS_AT_ONCE = 1 << 20
_VOTES_AT_ONCE = 1 << 15  # fits in a quarter of a word
# Spreads the four bits of each value over the quarters of a word.
_SPREAD = np.array([sum((four >> i & 1) << 16 * i for i in range(4)) for four in range(16)], np.uint64)
_RECORD_COST = 50  # of sorting a record twice, in comparisons of a pair (measured)


def simhash(texts: Sequence[str], unit: str, ngram: int) -> tuple[Words, Ints]:
    """(the 64 bits of each text, the numbers of the texts with words or characters)."""
    ones = np.zeros((len(texts), BITS), np.int64)
    votes = np.zeros(len(texts), np.int64)
    for block in shingles(texts, unit, ngram):
        for piece, bounds, piece_texts in block.pieces(_VOTES_AT_ONCE):
            ones[piece_texts] += _count_ones(piece, bounds)
            votes[piece_texts] += np.diff(bounds, append=piece.size)
    bits = np.packbits(2 * ones > votes[:, None], axis=1, bitorder="little").view("<u8").ravel()
    return bits.astype(np.uint64), np.flatnonzero(votes)


def _count_ones(hashes: Words, bounds: Ints) -> Ints:
    """How often each bit is set between bounds. Counts four bits at once in the quarters of a word: 80 ns per shingle
    instead of 235 with a byte per bit."""
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
    """Masks such that any two words within `distance` bits agree under one of them. More blocks give longer keys and
    fewer chance pairs, but more tables; the cheapest choice is taken."""

    def cost(blocks: int) -> float:
        table_count = math.comb(blocks, distance)
        by_chance = documents / 2 ** (BITS * (blocks - distance) / blocks)
        return table_count * (_RECORD_COST + by_chance)

    blocks = min(range(distance + 1, distance + 5), key=cost)
    edges = [BITS * i // blocks for i in range(blocks + 1)]
    block_masks = [((1 << (stop - start)) - 1) << start for start, stop in pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in combinations(block_masks, blocks - distance)]


@dataclass(frozen=True)
class _TableJob:
    """What the tasks of the second stage share; `equal` is the first stage."""

    equal: LinkJob
    tabled: Path
    distance: int
    masks: tuple[np.uint64, ...]
    table_buckets: int

    def edges(self, bucket: int) -> Path:
        return self.tabled / f"{bucket:06d}.links"


class DedupSimhash(ClusterDedupStep):
    """Keeps one of the documents linked by small distances. Documents without a word do not take part."""

    version = 2

    def __init__(self, spec: DedupSimhashSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        bits, has_words = simhash([document.text for document in documents], self.spec.unit, self.spec.ngram)
        signed = [documents[i] for i in has_words.tolist()]
        bits = bits[has_words]
        # The mixed fingerprint is an even key.
        return {**describe_documents(signed, ordinals[has_words], self.spec.keep), "key": mix(bits), "check": bits}

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        """Links equal fingerprints first, so that a text with a million copies is compared once, then looks up
        different ones in the tables."""
        total = int(numbering(collected)[-1])
        masks = tables(self.spec.distance, total)
        table_buckets = shuffle.bucket_count(total * len(masks), _TABLED)
        buckets = shuffle.bucket_count(total, CHECKED)
        equal = LinkJob(scratch / "fingerprints", len(collected), buckets, checked=True)
        stage = _TableJob(equal, scratch / "tables", self.spec.distance, tuple(masks), table_buckets)
        equal.scratch.mkdir()
        stage.tabled.mkdir()
        documents = sum(run_tasks(clusters.scatter_keys, for_parts("SimHash", equal, collected)))
        run_tasks(fill_tables, for_buckets("SimHash", stage, buckets))
        run_tasks(link_near, for_buckets("SimHash tables", stage, table_buckets))
        links = [*map(equal.edges, range(buckets)), *map(stage.edges, range(table_buckets))]
        return clusters.resolve_clusters(collected, scratch, links, documents, self.spec.keep)


def fill_tables(task: BucketTask[_TableJob]) -> None:
    """Links documents with equal fingerprints, and puts the first of each into the tables."""
    stage = task.shared
    heads = clusters.link_equal_keys(stage.equal, task.bucket)
    bits = heads["check"]
    records = np.empty(bits.size, _TABLED)
    records["document"], records["bits"] = heads["document"], bits
    for i, mask in enumerate(stage.masks):
        records["key"] = mix(mix(bits & mask) + np.uint64(i))
        run = task.bucket * len(stage.masks) + i
        shuffle.write_run(stage.tabled, run, records, shuffle.hash_bounds(stage.table_buckets))


def link_near(task: BucketTask[_TableJob]) -> None:
    """Compares all pairs that agree in a table's bits. Clusters are formed immediately, so a thousand similar documents
    give a thousand links instead of half a million."""
    stage = task.shared
    runs = stage.equal.buckets * len(stage.masks)
    pieces = shuffle.read_bucket(stage.tabled, runs, task.bucket, _TABLED)
    records = np.concatenate([np.empty(0, _TABLED), *pieces])
    records = records[np.argsort(records["key"])]
    parents = np.arange(records.size)
    for left, right in _pairs(records["key"]):
        near = np.bitwise_count(records["bits"][left] ^ records["bits"][right]) <= stage.distance
        clusters.unite(parents, left[near], right[near])
    clusters.flatten(parents)
    linked = np.flatnonzero(parents != np.arange(records.size))
    links = np.stack([records["document"][parents[linked]], records["document"][linked]], axis=1)
    shuffle.write_blocks(stage.edges(task.bucket), [links])


def _pairs(keys: Words) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of equal keys in sorted keys, in blocks: each position with the next, the next but one, and so on, as
    far as any group reaches."""
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
            block = at[start : start + _PAIRS_AT_ONCE]
            yield block, block + step
        step += 1
        at = at[last[at] >= at + step]
