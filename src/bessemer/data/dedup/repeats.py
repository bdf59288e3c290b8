"""Which pieces of documents occur more than once: paragraphs by the hash of their text, anchors by that of their
bytes. A piece's position is its place among all pieces of the corpus in order. Pieces come in by part, are grouped by
hash, and the positions of those that repeat go back out by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup import shuffle
from bessemer.data.dedup.shuffle import BucketTask, Records, begins, position
from bessemer.data.step import Ints

Words = npt.NDArray[np.uint64]
_POSITION = np.dtype([("key", "<u8")])
_SHOWN = 10


@dataclass(frozen=True)
class Pieces:
    """Where pieces are brought together. `least` occurrences make a repeat; `first_too` asks for the position of the
    first occurrence as well; `checked`: pieces have 64 bits beside the key."""

    folder: Path
    parts: int
    buckets: int
    least: int
    first_too: bool
    checked: bool

    @property
    def repeats(self) -> Path:
        return self.folder / "repeats"

    @property
    def dtype(self) -> np.dtype[Any]:
        return piece_dtype(self.checked)


def bring_together(folder: Path, parts: int, records: int, least: int, *, first_too: bool, checked: bool) -> Pieces:
    """An empty place for so many pieces."""
    buckets = shuffle.bucket_count(records, piece_dtype(checked))
    pieces = Pieces(folder, parts, buckets, least, first_too, checked)
    pieces.repeats.mkdir(parents=True)
    return pieces


def piece_dtype(checked: bool) -> np.dtype[Any]:
    return np.dtype([("key", "<u8"), *([("check", "<u8")] if checked else []), ("position", "<i8")])


@dataclass(frozen=True)
class Found:
    """What one bucket gave: how many positions, and the most frequent pieces as (count, position of the first)."""

    positions: int
    most: list[tuple[int, int]]


def write_pieces(pieces: Pieces, part: int, keys: Words, checks: Words | None) -> int:
    """One part's pieces, in order; how many they are."""
    records = np.empty(keys.size, pieces.dtype)
    records["key"] = keys
    if checks is not None:
        records["check"] = checks
    records["position"] = np.arange(keys.size) + position(part)
    shuffle.write_run(pieces.folder, part, records, shuffle.hash_bounds(pieces.buckets))
    return int(keys.size)


def find_repeats(task: BucketTask[Pieces]) -> Found:
    """Goes through a bucket twice: to count, then to write down the repeats. What is held at once is a piece of the
    bucket and one record for each different key."""
    pieces = task.shared
    heads = np.empty(0, np.dtype([*pieces.dtype.descr, ("count", "<i8")]))
    for records in shuffle.read_bucket(pieces.folder, pieces.parts, task.bucket, pieces.dtype):
        heads, _, _ = _grouped(heads, records, 1)
    heads = heads[heads["count"] >= pieces.least]
    found = [np.empty(0, np.int64)]
    for records in shuffle.read_bucket(pieces.folder, pieces.parts, task.bucket, pieces.dtype):
        merged, ordered, group = _grouped(heads, records, 0)
        often = merged["count"][group] >= pieces.least
        later = ordered["position"] != merged["position"][group]
        found.append(ordered["position"][often & later])
    if pieces.first_too:
        found.append(heads["position"])
    positions = np.concatenate(found)
    run = np.empty(positions.size, _POSITION)
    run["key"] = positions
    shuffle.write_run(pieces.repeats, task.bucket, run, shuffle.part_bounds(pieces.parts))
    top = np.lexsort((heads["position"], -heads["count"]))[:_SHOWN]
    most = [(int(heads["count"][i]), int(heads["position"][i])) for i in top]
    return Found(positions.size, most)


def repeats_of(pieces: Pieces, part: int) -> Ints:
    """The repeats among one part's pieces, by their number in the part, in order."""
    held = [np.empty(0, _POSITION), *shuffle.read_bucket(pieces.repeats, pieces.buckets, part, _POSITION)]
    return np.sort(np.concatenate(held)["key"].astype(np.int64) - position(part))


def most_frequent(found: Sequence[Found]) -> Iterator[tuple[int, int, int]]:
    """(occurrences, part and number of the first) of the most frequent pieces of all."""
    every = sorted((one for each in found for one in each.most), key=lambda one: (-one[0], one[1]))
    for count, at in every[:_SHOWN]:
        yield count, at // position(1), at % position(1)


def _grouped(heads: Records, records: Records, weight: int) -> tuple[Records, Records, Ints]:
    """One head for each key of `heads` and `records`, with its first position and summed count; then all of both in
    the order of keys, and the group of each. A head that is among the records as well counts once for each."""
    merged = np.zeros(heads.size + records.size, heads.dtype)
    merged[: heads.size] = heads
    names = [name for name in heads.dtype.names or () if name != "count"]
    for name in names:
        merged[name][heads.size :] = records[name]
    merged["count"][heads.size :] = weight
    keyed = [name for name in names if name != "position"]
    keys = [merged[name] for name in keyed]
    order = np.lexsort(keys[::-1]) if len(keys) > 1 else np.argsort(keys[0])
    merged = merged[order]
    new = begins(*(merged[name] for name in keyed))
    starts = np.flatnonzero(new)
    found = merged[starts]
    if starts.size:
        found["position"] = np.minimum.reduceat(merged["position"], starts)
        found["count"] = np.add.reduceat(merged["count"], starts)
    return found, merged, np.cumsum(new) - 1
