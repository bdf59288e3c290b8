"""Near-duplicates by SimHash: 64 bits for each document, of which similar documents differ in few.

Each n-gram votes on every bit, as often as it occurs; the chance that a bit differs is the angle between two documents'
n-gram counts over pi. Two words that differ in at most k bits agree in all bits of some m - k of m blocks, so looking
through all choices of blocks finds every such pair (pigeonhole), whatever m is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.clusters import REASONS, Rulings, drop_duplicates, flatten, settle, unite
from bessemer.data.dedup.links import about, group
from bessemer.data.dedup.shingles import shingles
from bessemer.data.dedup.shuffle import (
    bucket_count,
    hash_bounds,
    load_columns,
    numbering,
    read_bucket,
    write_run,
    write_whole,
)
from bessemer.data.document import Document
from bessemer.data.order import mix
from bessemer.data.step import Arrays, Collected, Each, Ints, Outcome
from bessemer.spec.clean.dedup import DedupSimhashSpec

Words = npt.NDArray[np.uint64]
BITS = 64
_HASHED = np.dtype(
    [("key", "<u8"), ("document", "<i8")]
)  # the key is the mixed fingerprint: as good, and even
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
        for start in range(0, block.hashes.size, _VOTES_AT_ONCE):
            some = block.hashes[start : start + _VOTES_AT_ONCE]
            first = int(np.searchsorted(block.starts, start, side="right")) - 1
            last = int(np.searchsorted(block.starts, start + some.size))
            bounds = np.maximum(block.starts[first:last] - start, 0)
            texts_here = block.documents[first:last]
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
    """Masks such that any two words within `distance` bits agree under one of them.

    More blocks give longer keys, so fewer pairs to compare by chance, but more tables: the cheapest is taken.
    """

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
    """What the tasks of both stages have in common."""

    scratch: Path
    parts: int
    buckets: int
    distance: int
    masks: tuple[int, ...]
    table_buckets: int

    @property
    def hashed(self) -> Path:
        return self.scratch / "fingerprints"

    @property
    def tabled(self) -> Path:
        return self.scratch / "tables"


@dataclass(frozen=True)
class _Task:
    stage: _Stage
    bucket: int = 0
    part: Collected | None = None
    first: int = 0

    @property
    def name(self) -> str:
        return f"SimHash of part {self.part.part}" if self.part else f"SimHash bucket {self.bucket}"


class DedupSimhash:
    """Of documents linked by small distances one stays. Those without a single word take no part."""

    version = 1

    def __init__(self, spec: DedupSimhashSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        bits, there = simhash([document.text for document in documents], self.spec.unit, self.spec.ngram)
        having = [documents[i] for i in there.tolist()]
        return {**about(having, ordinals[there], self.spec.keep), "bits": bits[there]}

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Rulings, dict[str, Any]]:
        """First equal fingerprints are linked, so that a text with a million copies is compared once; then those
        that differ are looked up in the tables."""
        numbers = numbering(collected)
        total = int(numbers[-1])
        masks = tables(self.spec.distance, total)
        buckets = bucket_count(total, _HASHED)
        table_buckets = bucket_count(total * len(masks), _TABLED)
        stage = _Stage(
            scratch,
            len(collected),
            buckets,
            self.spec.distance,
            tuple(int(mask) for mask in masks),
            table_buckets,
        )
        stage.hashed.mkdir()
        stage.tabled.mkdir()
        tasks = [_Task(stage, part=part, first=int(numbers[part.part])) for part in collected]
        documents = sum(each(scatter_bits, tasks))
        each(link_equal, [_Task(stage, bucket) for bucket in range(buckets)])
        each(link_near, [_Task(stage, bucket) for bucket in range(table_buckets)])
        links = [stage.hashed / f"{bucket}.links" for bucket in range(buckets)]
        links += [stage.tabled / f"{bucket}.links" for bucket in range(table_buckets)]
        return settle(collected, scratch, links, documents, self.spec.keep)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        return drop_duplicates(ordinals, ruling, REASONS[self.spec.keep])


def scatter_bits(task: _Task) -> int:
    assert task.part is not None, "one task for each part"
    arrays = load_columns(task.part, ("ordinal", "bits"))
    count = int(arrays["ordinal"].size) if arrays else 0
    records = np.empty(count, _HASHED)
    if arrays:
        records["key"] = mix(arrays["bits"])
        records["document"] = arrays["ordinal"] + task.first
    write_run(task.stage.hashed, task.part.part, records, hash_bounds(task.stage.buckets))
    return count


def link_equal(task: _Task) -> None:
    """Links documents with one fingerprint, and puts the first of each into the tables."""
    stage = task.stage
    heads = np.empty(0, _HASHED)
    links = []
    for records in read_bucket(stage.hashed, stage.parts, task.bucket, _HASHED):
        heads, found = group(np.concatenate([heads, records]) if heads.size else records)
        links.append(found)
    write_whole(stage.hashed / f"{task.bucket}.links", links)
    bits = unmix(heads["key"])
    records = np.empty(bits.size, _TABLED)
    records["document"], records["bits"] = heads["document"], bits
    for i, mask in enumerate(stage.masks):
        records["key"] = mix(mix(bits & np.uint64(mask)) + np.uint64(i))
        run = task.bucket * len(stage.masks) + i
        write_run(stage.tabled, run, records, hash_bounds(stage.table_buckets))


def link_near(task: _Task) -> None:
    """Compares all pairs that agree in some table's bits. Clusters are formed at once, so that a thousand documents
    near each other give a thousand links and not half a million."""
    stage = task.stage
    runs = stage.buckets * len(stage.masks)
    records = np.concatenate([np.empty(0, _TABLED), *read_bucket(stage.tabled, runs, task.bucket, _TABLED)])
    records = records[np.argsort(records["key"])]
    parents = np.arange(records.size)
    for left, right in _pairs(records["key"]):
        near = np.bitwise_count(records["bits"][left] ^ records["bits"][right]) <= stage.distance
        unite(parents, left[near], right[near])
    flatten(parents)
    linked = np.flatnonzero(parents != np.arange(records.size))
    links = np.stack([records["document"][parents[linked]], records["document"][linked]], axis=1)
    write_whole(stage.tabled / f"{task.bucket}.links", [links])


def _pairs(keys: Words) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of places in sorted keys that hold equal ones, in blocks: each place with the next, the next but one,
    and so on, as long as any group reaches so far."""
    if not keys.size:
        return
    new = np.ones(keys.size, bool)
    new[1:] = keys[1:] != keys[:-1]
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


def unmix(words: Words) -> Words:
    """The inverse of `mix`."""
    word = words.astype(np.uint64)
    word ^= (word >> np.uint64(31)) ^ (word >> np.uint64(62))
    word *= np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    word ^= (word >> np.uint64(27)) ^ (word >> np.uint64(54))
    word *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    word ^= (word >> np.uint64(30)) ^ (word >> np.uint64(60))
    word -= np.uint64(0x9E3779B97F4A7C15)
    return word
