"""Near-duplicates by SimHash: 64 bits for each document, of which similar documents differ in few. Each n-gram votes
on every bit, as often as it occurs; the chance that a bit differs is the angle between two documents' n-gram counts
over pi. Two words that differ in at most k bits agree in all bits of some m - k of m blocks, so looking through all
choices of blocks finds every such pair (pigeonhole), whatever m is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup import shuffle
from bessemer.data.dedup.clusters import OneOfEach, Resolved, flatten, settle, unite
from bessemer.data.dedup.links import CHECKED, Linking, about, link_equal, scatter_keys
from bessemer.data.dedup.shingles import shingles
from bessemer.data.dedup.shuffle import BucketTask, begins, for_buckets, for_parts, numbering
from bessemer.data.document import Document
from bessemer.data.order import mix
from bessemer.data.step import Arrays, Collected, Each, Ints
from bessemer.spec.clean.dedup import DedupSimhashSpec

Words = npt.NDArray[np.uint64]
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

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: Each) -> Resolved:
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
