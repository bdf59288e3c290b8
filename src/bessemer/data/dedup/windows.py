"""Which windows of bytes repeat earlier ones: the resolving of `dedup_substrings`, out of core. Four rounds over the
parts: anchors are brought together by hash; those that occur twice or more get the bytes around them, and are brought
together again; in each bucket, windows with equal bytes are found; and what repeats goes back to its part. On disk
this takes some 0.4 bytes for each byte of text, and 1.6 L for each anchor that occurs twice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup import shuffle
from bessemer.data.dedup.anchors import BASE, gram_length
from bessemer.data.dedup.clusters import Resolved
from bessemer.data.dedup.repeats import Pieces, bring_together, find_repeats, repeats_of, write_pieces
from bessemer.data.dedup.shuffle import BucketTask, PartTask, Records, begins, for_buckets, for_parts, position
from bessemer.data.order import mix
from bessemer.data.step import Arrays, Collected, Each, Ints

Words = npt.NDArray[np.uint64]

_VALUES = mix(np.arange(256) + (3 << 32))  # others than the anchors', so that the two hashes are independent
_INVERSE = pow(BASE, -1, 1 << 64)
_RANGE = np.dtype([("key", "<u8"), ("end", "<i8")])  # the key is the position of the first byte
_BYTES_AT_ONCE = 1 << 20  # of contexts, copied together


@dataclass(frozen=True)
class Search:
    """What all tasks share."""

    scratch: Path
    length: int
    pieces: Pieces
    buckets: int = 1  # of the second grouping

    @property
    def back(self) -> int:
        """Most bytes of a window before its anchor."""
        return self.length - gram_length(self.length)

    @property
    def context(self) -> np.dtype[Any]:
        """An anchor and all bytes of the windows it may serve."""
        numbers = [("key", "<u8"), ("position", "<i8"), ("lead", "<u2"), ("span", "<u2")]
        return np.dtype([*numbers, ("bytes", "u1", (self.width,))])

    @property
    def width(self) -> int:
        return self.back + self.length


def resolve_windows(collected: Sequence[Collected], scratch: Path, each: Each, length: int) -> Resolved:
    """The byte ranges that go, for each part, and a summary."""
    anchors = shuffle.count_records(collected, "key")
    at = scratch / "anchors"
    pieces = bring_together(at, len(collected), anchors, least=2, first_too=True, checked=False)
    search = Search(scratch, length, pieces)
    for folder in ("contexts", "ranges", "rulings"):
        (scratch / folder).mkdir()
    each(scatter_anchors, for_parts("passages", search, collected))
    found = each(find_repeats, for_buckets("repeats", pieces, pieces.buckets))
    candidates = sum(one.positions for one in found)
    search = Search(scratch, length, pieces, shuffle.bucket_count(candidates, search.context))
    tasks = for_parts("passages", search, collected)
    each(scatter_contexts, tasks)
    each(compare_windows, for_buckets("passages", search, search.buckets))
    counts = np.array(each(merge_ranges, tasks)).reshape(-1, 4).sum(axis=0).tolist()
    names = ("documents", "bytes", "repeats", "repeated_bytes", "anchors", "candidates")
    summary = dict(zip(names, [*counts, anchors, candidates], strict=True))
    return (_ruling(scratch, part) for part in collected), summary


def scatter_anchors(task: PartTask[Search]) -> None:
    arrays = shuffle.load_columns(task.part, ("key", "offset", "lead", "span"))
    write_pieces(task.shared.pieces, task.part.part, arrays.get("key", np.empty(0, np.uint64)), None)


def scatter_contexts(task: PartTask[Search]) -> None:
    """The bytes around each anchor of a part that occurs again somewhere."""
    search, part = task.shared, task.part.part
    chosen = repeats_of(search.pieces, part)
    folder, bounds = search.scratch / "contexts", shuffle.hash_bounds(search.buckets)
    if not chosen.size:
        shuffle.write_sorted(folder, part, np.empty(0, np.uint64), [], bounds)
        return
    arrays = shuffle.load(task.part, ("bytes", "anchors", "key", "offset", "lead", "span", "text"))
    chosen = chosen[np.argsort(arrays["key"][chosen])]
    shuffle.write_sorted(folder, part, arrays["key"][chosen], _contexts(search, part, arrays, chosen), bounds)


def _contexts(search: Search, part: int, arrays: Arrays, chosen: Ints) -> Iterator[Records]:
    text = arrays["text"]
    begins = np.cumsum(arrays["bytes"]) - arrays["bytes"]
    ends = np.cumsum(arrays["anchors"])
    at_once = max(1, _BYTES_AT_ONCE // search.width)
    for at in range(0, chosen.size, at_once):
        some = chosen[at : at + at_once]
        document = np.searchsorted(ends, some, side="right")
        place = begins[document] + arrays["offset"][some]
        records = np.empty(some.size, search.context)
        records["key"] = arrays["key"][some]
        records["position"] = place + position(part)
        records["lead"], records["span"] = arrays["lead"][some], arrays["span"][some]
        # Bytes beyond the windows served, even of other documents, are never looked at.
        columns = place[:, None] + np.arange(-search.back, search.length)
        records["bytes"] = text[np.clip(columns, 0, text.size - 1)]
        yield records


def compare_windows(task: BucketTask[Search]) -> None:
    """Writes the ranges of a bucket's windows that repeat. What is held is some 60 bytes for each anchor; the bytes
    around them lie in a file where they are many."""
    search = task.shared
    with tempfile.TemporaryDirectory(dir=search.scratch) as folder:
        anchors, columns = _columns(search, task.bucket, Path(folder))
        starts, ends = repeated_windows(anchors, columns, search.length)
    records = np.empty(starts.size, _RANGE)
    records["key"], records["end"] = starts, ends
    bounds = shuffle.part_bounds(search.pieces.parts)
    shuffle.write_run(search.scratch / "ranges", task.bucket, records, bounds)


def _columns(search: Search, bucket: int, folder: Path) -> tuple[Arrays, npt.NDArray[np.uint8]]:
    """A bucket's anchors, and their contexts by column, so that one step of the rolling hash reads two rows."""
    runs = search.pieces.parts
    count = shuffle.bucket_size(search.scratch / "contexts", runs, bucket)
    shape = (search.width, count)
    if search.width * count <= 2 * shuffle.BUCKET_BYTES:
        columns = np.empty(shape, np.uint8)
    else:
        columns = np.memmap(folder / "columns", np.uint8, "w+", shape=shape).view(np.ndarray)
    names = ("position", "lead", "span")
    anchors = {name: np.empty(count, np.int64) for name in names}
    at = 0
    for records in shuffle.read_bucket(search.scratch / "contexts", runs, bucket, search.context):
        for name in names:
            anchors[name][at : at + records.size] = records[name]
        columns[:, at : at + records.size] = records["bytes"].T
        at += records.size
    return anchors, columns


def repeated_windows(anchors: Arrays, columns: npt.NDArray[np.uint8], length: int) -> tuple[Ints, Ints]:
    """Start and end positions of what repeats: for each anchor, runs of windows that begin one byte apart and repeat
    windows around one and the same earlier anchor. Every such pair is compared byte by byte in the end."""
    place, lead, span = anchors["position"], anchors["lead"], anchors["span"]
    back = columns.shape[0] - length
    partner = np.full(place.size, -1)  # row of the earlier anchor that the open run repeats
    opened = np.zeros(place.size, np.int64)
    runs: list[Ints] = []

    def close(rows: Ints, before: int) -> None:
        """Ends the runs of some rows; columns: row, its partner, first and last column of the bytes."""
        rows = rows[partner[rows] >= 0]
        ends = back - opened[rows] + length
        runs.append(np.stack([rows, partner[rows], np.full(rows.size, back - before + 1), ends], axis=1))

    for before, hashes in enumerate(_rolling(columns, length)):  # bytes of the window before the anchor
        now = np.full(place.size, -1)
        rows = np.flatnonzero((before <= lead) & (before > lead - span))
        if rows.size > 1:
            now[rows] = _earlier(hashes[rows], place[rows], rows, length)
        changed = np.flatnonzero(now != partner)
        close(changed, before)
        partner[changed], opened[changed] = now[changed], before
    close(np.flatnonzero(partner >= 0), back + 1)
    found = _confirmed(np.concatenate(runs), columns)
    shift = place[found[:, 0]] - back
    return shift + found[:, 2], shift + found[:, 3]


def _rolling(columns: npt.NDArray[np.uint8], length: int) -> Iterator[Words]:
    """The hashes of all rows' windows that begin at their anchor, then one byte earlier, and so on."""
    back = columns.shape[0] - length
    hashes = np.zeros(columns.shape[1], np.uint64)
    for column in columns[back:]:
        hashes *= np.uint64(BASE)
        hashes += _VALUES[column]
    top = np.uint64(pow(BASE, length - 1, 1 << 64))
    yield hashes
    for before in range(1, back + 1):
        hashes -= _VALUES[columns[back - before + length]]
        hashes *= np.uint64(_INVERSE)
        hashes += _VALUES[columns[back - before]] * top
        yield hashes


def _earlier(hashes: Words, place: Ints, rows: Ints, length: int) -> Ints:
    """For each window, the row of the first with its hash; -1 where that is itself, or overlaps it."""
    order = np.argsort(hashes)
    ordered, at = hashes[order], place[order]
    new = begins(ordered)
    group = np.cumsum(new) - 1
    first = np.minimum.reduceat(at, np.flatnonzero(new))[group]
    first_row = rows[order[at == first]][group]  # one in each group, as no two anchors share a place
    found = np.empty(order.size, np.int64)
    found[order] = np.where(at - first >= length, first_row, -1)
    return found


def _confirmed(runs: Ints, columns: npt.NDArray[np.uint8]) -> Ints:
    """The runs whose bytes are those of their partner. Two hashes agreed already, so that none should fall out."""
    equal = np.ones(len(runs), bool)
    for i, column in enumerate(columns):
        inside = np.flatnonzero((runs[:, 2] <= i) & (i < runs[:, 3]))
        equal[inside] &= column[runs[inside, 0]] == column[runs[inside, 1]]
    return runs[equal]


def merge_ranges(task: PartTask[Search]) -> tuple[int, int, int, int]:
    """Writes a part's ruling: what goes of each document, overlaps merged. Says how many documents and bytes there
    are, and how many ranges and bytes go."""
    search, part = task.shared, task.part.part
    arrays = shuffle.load(task.part, ("ordinal", "bytes", "local_ordinal", "local_start", "local_end"))
    none = np.empty(0, np.int64)
    if not arrays:
        return _write_ruling(search.scratch, part, none, none, none, (0, 0))
    begins = np.cumsum(arrays["bytes"]) - arrays["bytes"]
    base = begins[np.searchsorted(arrays["ordinal"], arrays["local_ordinal"])]
    starts, ends = [base + arrays["local_start"]], [base + arrays["local_end"]]
    for records in shuffle.read_bucket(search.scratch / "ranges", search.buckets, part, _RANGE):
        starts.append(records["key"].astype(np.int64) - position(part))
        ends.append(records["end"] - position(part))
    start, end = np.concatenate(starts), np.concatenate(ends)
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    document = np.searchsorted(begins, start, side="right") - 1
    new = np.ones(start.size, bool)
    new[1:] = (start[1:] > end[:-1]) | (document[1:] != document[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], start.size)[: first.size] - 1
    document = document[first]
    start, end = start[first] - begins[document], end[last] - begins[document]
    totals = int(arrays["ordinal"].size), int(arrays["bytes"].sum())
    return _write_ruling(search.scratch, part, arrays["ordinal"][document], start, end, totals)


def _write_ruling(
    scratch: Path, part: int, ordinal: Ints, start: Ints, end: Ints, totals: tuple[int, int]
) -> tuple[int, int, int, int]:
    np.save(scratch / "rulings" / f"{part:06d}.npy", np.stack([ordinal, start, end]))
    return *totals, int(ordinal.size), int((end - start).sum())


def _ruling(scratch: Path, part: Collected) -> Arrays:
    ordinal, start, end = np.load(scratch / "rulings" / f"{part.part:06d}.npy")
    return {"ordinal": ordinal, "start": start, "end": end}
