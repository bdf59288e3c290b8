"""Cuts passages that occurred before in the corpus, byte for byte, wherever they begin and end.

The definition is that of deduplication by suffix array: a window of `min_bytes` bytes is a repeat if the same bytes
begin earlier and end before it, and all bytes of all repeats are cut. A suffix array would take nine times the corpus
in memory. Here windows are compared on disk, and only where their anchors agree.

Anchors: every window of `length` bytes has one anchor, the smallest hash among its k-byte windows (winnowing). Equal
windows have equal anchors at the same offset. An anchor serves all consecutive windows that have it: about one anchor
per length / 4 bytes.

Resolving takes four rounds over the parts: group anchors by hash; add the bytes around repeated anchors and group
again; find windows with equal bytes in each bucket; return the ranges to their parts. This takes about 0.4 bytes of
disk per byte of text, and 1.6 L per repeated anchor. `collect` stores the documents' bytes, because hashes of all
windows would be eight times larger; with the anchors that is 1.3 bytes per byte of text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.dedup import shuffle
from bessemer.data.curate.dedup.clusters import Resolved, find_ranges, keep_or_drop
from bessemer.data.curate.dedup.exact import PieceIndex, find_repeats, read_repeats, write_pieces
from bessemer.data.curate.dedup.near import powers
from bessemer.data.curate.dedup.shuffle import BucketTask, PartTask, Records, begins, for_buckets, for_parts, position
from bessemer.data.curate.step import Arrays, Collected, Ints, Outcome, RunTasks
from bessemer.data.read.entry import Document
from bessemer.data.stream.order import mix
from bessemer.spec.curate.dedup import DedupSubstringsSpec

Words = npt.NDArray[np.uint64]

BYTE_VALUES = mix(np.arange(256) + (2 << 32))
BASE = 0xC2B2AE3D27D4EB4F  # odd, so that it has an inverse modulo 2^64
_FINISH = np.uint64(0x9E6C63D0876A9A47)
_BLOCK_BYTES = 1 << 17  # hashed at once: 1 MB per 64-bit array
_PLACE_BITS = 21
_PLACE = np.uint64((1 << _PLACE_BITS) - 1)


@dataclass(frozen=True)
class Anchors:
    """Anchor i is at byte `offset[i]` of document `document[i]`. It serves the `span[i]` windows that begin from
    `lead[i]` bytes before it on. Windows in `local` (rows of document, start, end) certainly repeat an earlier window
    of the same document and have no anchor."""

    key: Words
    document: Ints
    offset: Ints
    lead: Ints
    span: Ints
    local: Ints


def gram_length(length: int) -> int:
    """k: half the window. If shorter, more passages would agree by chance; if longer, there would be more anchors."""
    return max(1, length // 2)


def find_anchors(texts: Sequence[bytes], length: int) -> Anchors:
    """The anchors of all windows of `length` bytes inside each text. About 30 MB/s on one core."""
    blocks = [_block_anchors(block, length) for block in _blocks(texts, length)]
    if not blocks:
        none = np.empty(0, np.int64)
        return Anchors(np.empty(0, np.uint64), none, none, none, none, np.empty((0, 3), np.int64))
    names = ("key", "document", "offset", "lead", "span", "local")
    return Anchors(*(np.concatenate([getattr(block, name) for block in blocks]) for name in names))


@dataclass(frozen=True)
class _Block:
    """Some texts, or a piece of a long one: text `first + i` takes the bytes up to `ends[i]`."""

    data: npt.NDArray[np.uint8]
    first: int
    ends: Ints
    offset: int  # of the data's first byte in its text


def _blocks(texts: Sequence[bytes], length: int) -> Iterator[_Block]:
    """Cut by the texts alone, so that a text has the same anchors in any batch."""
    limit = max(_BLOCK_BYTES, 8 * length)
    batch: list[bytes] = []
    size = 0
    for i, text in enumerate(texts):
        if batch and size + len(text) > limit:
            yield _join_texts(batch, i - len(batch))
            batch, size = [], 0
        if len(text) <= limit:
            batch.append(text)
            size += len(text)
            continue
        for start in range(0, len(text) - length + 1, limit - length + 1):  # each window is in one piece
            piece = np.frombuffer(text, np.uint8, min(limit, len(text) - start), start)
            yield _Block(piece, i, np.array([piece.size]), start)
    if batch:
        yield _join_texts(batch, len(texts) - len(batch))


def _join_texts(texts: Sequence[bytes], first: int) -> _Block:
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return _Block(np.frombuffer(b"".join(texts), np.uint8), first, ends, 0)


def _block_anchors(block: _Block, length: int) -> Anchors:
    k = gram_length(length)
    count = max(block.data.size - length + 1, 0)  # windows, including those across two texts
    hashes = _gram_hashes(block.data, k)
    later_first = _PLACE - np.arange(hashes.size, dtype=np.uint64)  # of equal hashes, the last is the anchor
    ordered = (hashes & ~_PLACE) | later_first
    smallest = _sliding_minimum(ordered, length - k + 1)[:count]
    origins = np.concatenate([[0], block.ends[:-1]])
    text = np.repeat(np.arange(block.ends.size), block.ends - origins)[:count]
    inside = np.flatnonzero(np.arange(count) + length <= block.ends[text])
    place = (_PLACE - (smallest[inside] & _PLACE)).astype(np.int64)
    starts = np.flatnonzero(begins(place))
    place, low, text = place[starts], inside[starts], text[inside[starts]]
    span = np.diff(starts, append=inside.size)
    needed, local = _skip_periods(hashes[place], text, place, low, span, length)
    shift = block.offset - origins
    local[:, 1:] += shift[local[:, :1]]
    local[:, 0] += block.first
    place, low, text, span = place[needed], low[needed], text[needed], span[needed]
    return Anchors(hashes[place], text + block.first, place + shift[text], place - low, span, local)


def _gram_hashes(data: npt.NDArray[np.uint8], k: int) -> Words:
    """The polynomial hash of every k consecutive bytes, by differences of its running sum."""
    if data.size < k:
        return np.empty(0, np.uint64)
    rising, inverses = powers(BASE, max(_BLOCK_BYTES, 1 << data.size.bit_length()))
    values = BYTE_VALUES[data]
    values *= rising[: data.size]
    sums = np.concatenate([np.zeros(1, np.uint64), np.add.accumulate(values)])
    hashes = sums[k:] - sums[:-k]
    hashes *= inverses[: hashes.size]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _FINISH
    hashes ^= hashes >> np.uint64(29)
    return hashes


def _sliding_minimum(values: Words, width: int) -> Words:
    """The minimum of every `width` consecutive values, in log2(width) doublings."""
    if values.size < width:
        return values[:0]
    reach = 1
    while 2 * reach <= width:
        values = np.minimum(values[:-reach], values[reach:])
        reach *= 2
    return np.minimum(values[: values.size - (width - reach)], values[width - reach :])


def _skip_periods(
    keys: Words, text: Ints, place: Ints, low: Ints, span: Ints, length: int
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """The needed anchors, and the rows (text, start, end) that certainly repeat. In periodic text (a megabyte of
    spaces) every byte or two would be an anchor. Equal anchors p <= k apart prove that the bytes between have period p;
    in such a zone a window repeats the one that precedes it by the first multiple of p of at least `length`, which
    begins inside the zone."""
    needed = np.ones(keys.size, bool)
    rows: list[tuple[int, int, int]] = []
    k = gram_length(length)
    apart = np.diff(place)
    linked = (keys[1:] == keys[:-1]) & (text[1:] == text[:-1]) & (apart <= k)
    if linked.any():
        edges = np.append(np.flatnonzero(begins(linked, apart)), linked.size)
        first, last = edges[:-1], edges[1:]  # a chain's links are [first, last), its anchors [first, last]
        long = linked[first] & (place[last] - place[first] >= 2 * length - k)
        for start, stop in zip(first[long].tolist(), last[long].tolist(), strict=True):
            period = int(apart[start])
            begin = int(place[start]) + -(-length // period) * period
            end = int(place[stop]) + k
            if end - begin < length:
                continue
            rows.append((int(text[start]), begin, end))
            anchors = slice(start, stop + 1)
            needed[anchors] = (low[anchors] < begin) | (low[anchors] + span[anchors] - 1 + length > end)
    return needed, np.array(rows, np.int64).reshape(-1, 3)


_VALUES = mix(np.arange(256) + (3 << 32))  # not the anchors' values, so that the two hashes are independent
_INVERSE = pow(BASE, -1, 1 << 64)
_RANGE = np.dtype([("key", "<u8"), ("end", "<i8")])  # the key is the position of the first byte
_BYTES_AT_ONCE = 1 << 20  # of contexts, copied together


@dataclass(frozen=True)
class WindowSearch:
    """What all tasks share."""

    scratch: Path
    length: int
    pieces: PieceIndex
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


def resolve_windows(collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks, length: int) -> Resolved:
    """The byte ranges to cut, by part, and a summary."""
    anchors = shuffle.count_records(collected, "key")
    at = scratch / "anchors"
    pieces = PieceIndex(at, len(collected), anchors, least=2, first_too=True, checked=False)
    pieces.repeats.mkdir(parents=True)
    search = WindowSearch(scratch, length, pieces)
    for folder in ("contexts", "ranges", "rulings"):
        (scratch / folder).mkdir()
    run_tasks(scatter_anchors, for_parts("passages", search, collected))
    buckets = run_tasks(find_repeats, for_buckets("repeats", pieces, pieces.buckets))
    candidates = sum(bucket.positions for bucket in buckets)
    search = WindowSearch(scratch, length, pieces, shuffle.bucket_count(candidates, search.context))
    tasks = for_parts("passages", search, collected)
    run_tasks(scatter_contexts, tasks)
    run_tasks(compare_windows, for_buckets("passages", search, search.buckets))
    counts = np.array(run_tasks(merge_ranges, tasks)).reshape(-1, 4).sum(axis=0).tolist()
    names = ("documents", "bytes", "repeats", "repeated_bytes", "anchors", "candidates")
    summary = dict(zip(names, [*counts, anchors, candidates], strict=True))
    return (_part_decisions(scratch, part) for part in collected), summary


def scatter_anchors(task: PartTask[WindowSearch]) -> None:
    arrays = shuffle.load_columns(task.part, ("key", "offset", "lead", "span"))
    write_pieces(task.shared.pieces, task.part.part, arrays.get("key", np.empty(0, np.uint64)), None)


def scatter_contexts(task: PartTask[WindowSearch]) -> None:
    """Writes the bytes around each repeated anchor of a part."""
    search, part = task.shared, task.part.part
    chosen = read_repeats(search.pieces, part)
    folder, bounds = search.scratch / "contexts", shuffle.hash_bounds(search.buckets)
    if not chosen.size:
        shuffle.write_sorted(folder, part, np.empty(0, np.uint64), [], bounds)
        return
    arrays = shuffle.load(task.part, ("bytes", "anchors", "key", "offset", "lead", "span", "text"))
    chosen = chosen[np.argsort(arrays["key"][chosen])]
    shuffle.write_sorted(folder, part, arrays["key"][chosen], _contexts(search, part, arrays, chosen), bounds)


def _contexts(search: WindowSearch, part: int, arrays: Arrays, chosen: Ints) -> Iterator[Records]:
    text = arrays["text"]
    begins = np.cumsum(arrays["bytes"]) - arrays["bytes"]
    ends = np.cumsum(arrays["anchors"])
    at_once = max(1, _BYTES_AT_ONCE // search.width)
    for at in range(0, chosen.size, at_once):
        batch = chosen[at : at + at_once]
        document = np.searchsorted(ends, batch, side="right")
        place = begins[document] + arrays["offset"][batch]
        records = np.empty(batch.size, search.context)
        records["key"] = arrays["key"][batch]
        records["position"] = place + position(part)
        records["lead"], records["span"] = arrays["lead"][batch], arrays["span"][batch]
        # Bytes outside the served windows, even of other documents, are never compared.
        columns = place[:, None] + np.arange(-search.back, search.length)
        records["bytes"] = text[np.clip(columns, 0, text.size - 1)]
        yield records


def compare_windows(task: BucketTask[WindowSearch]) -> None:
    """Writes the repeated ranges of a bucket's windows. Holds about 60 bytes per anchor; many contexts go to a file."""
    search = task.shared
    with tempfile.TemporaryDirectory(dir=search.scratch) as folder:
        anchors, columns = _columns(search, task.bucket, Path(folder))
        starts, ends = repeated_windows(anchors, columns, search.length)
    records = np.empty(starts.size, _RANGE)
    records["key"], records["end"] = starts, ends
    bounds = shuffle.part_bounds(search.pieces.parts)
    shuffle.write_run(search.scratch / "ranges", task.bucket, records, bounds)


def _columns(search: WindowSearch, bucket: int, folder: Path) -> tuple[Arrays, npt.NDArray[np.uint8]]:
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
    """Start and end positions of repeats: for each anchor, runs of consecutive windows that repeat windows around the
    same earlier anchor. Every such pair is finally compared byte by byte."""
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

    for before, hashes in enumerate(_rolling_hashes(columns, length)):  # bytes of the window before the anchor
        now = np.full(place.size, -1)
        rows = np.flatnonzero((before <= lead) & (before > lead - span))
        if rows.size > 1:
            now[rows] = _find_earlier(hashes[rows], place[rows], rows, length)
        changed = np.flatnonzero(now != partner)
        close(changed, before)
        partner[changed], opened[changed] = now[changed], before
    close(np.flatnonzero(partner >= 0), back + 1)
    confirmed = _confirm_bytes(np.concatenate(runs), columns)
    shift = place[confirmed[:, 0]] - back
    return shift + confirmed[:, 2], shift + confirmed[:, 3]


def _rolling_hashes(columns: npt.NDArray[np.uint8], length: int) -> Iterator[Words]:
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


def _find_earlier(hashes: Words, place: Ints, rows: Ints, length: int) -> Ints:
    """For each window, the row of the first one with its hash; -1 where that is itself or overlaps it."""
    order = np.argsort(hashes)
    ordered, at = hashes[order], place[order]
    new = begins(ordered)
    group = np.cumsum(new) - 1
    first = np.minimum.reduceat(at, np.flatnonzero(new))[group]
    first_row = rows[order[at == first]][group]  # one per group, since no two anchors share a position
    earlier = np.empty(order.size, np.int64)
    earlier[order] = np.where(at - first >= length, first_row, -1)
    return earlier


def _confirm_bytes(runs: Ints, columns: npt.NDArray[np.uint8]) -> Ints:
    """The runs whose bytes equal those of their partner. Two hashes already agreed, so none should fail."""
    equal = np.ones(len(runs), bool)
    for i, column in enumerate(columns):
        inside = np.flatnonzero((runs[:, 2] <= i) & (i < runs[:, 3]))
        equal[inside] &= column[runs[inside, 0]] == column[runs[inside, 1]]
    return runs[equal]


def merge_ranges(task: PartTask[WindowSearch]) -> tuple[int, int, int, int]:
    """Writes a part's decisions: the ranges to cut of each document, merged. Returns the numbers of documents, bytes,
    ranges, and bytes to cut."""
    search, part = task.shared, task.part.part
    arrays = shuffle.load(task.part, ("ordinal", "bytes", "local_ordinal", "local_start", "local_end"))
    path = search.scratch / "rulings" / f"{part:06d}.npy"
    if not arrays:
        np.save(path, np.empty((3, 0), np.int64))
        return 0, 0, 0, 0
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
    np.save(path, np.stack([arrays["ordinal"][document], start, end]))
    documents, size_bytes = int(arrays["ordinal"].size), int(arrays["bytes"].sum())
    return documents, size_bytes, int(start.size), int((end - start).sum())


def _part_decisions(scratch: Path, part: Collected) -> Arrays:
    ordinal, start, end = np.load(scratch / "rulings" / f"{part.part:06d}.npy")
    return {"ordinal": ordinal, "start": start, "end": end}


class DedupSubstrings:
    """Cuts repeated passages; drops a document where too little is left."""

    version = 1
    bulky = True  # 1.3 times the text

    def __init__(self, spec: DedupSubstringsSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        encoded = [document.text.encode() for document in documents]
        long_enough = [i for i, text in enumerate(encoded) if len(text) >= self.spec.min_bytes]
        texts = [encoded[i] for i in long_enough]
        anchors = find_anchors(texts, self.spec.min_bytes)
        sizes = np.array([len(text) for text in texts], np.int64)
        return {
            "ordinal": ordinals[long_enough], "bytes": sizes, "text": np.frombuffer(b"".join(texts), np.uint8),
            "anchors": np.bincount(anchors.document, minlength=len(texts)), "key": anchors.key,
            "offset": anchors.offset.astype(np.uint32 if sizes.max(initial=0) < 1 << 32 else np.int64),
            "lead": anchors.lead.astype(np.uint16), "span": anchors.span.astype(np.uint16),
            "local_ordinal": ordinals[long_enough][anchors.local[:, 0]], "local_start": anchors.local[:, 1],
            "local_end": anchors.local[:, 2],
        }  # fmt: skip

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        return resolve_windows(collected, scratch, run_tasks, self.spec.min_bytes)

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, records in find_ranges(decisions, ordinals):
            starts, ends = decisions["start"][records].tolist(), decisions["end"][records].tolist()
            text = cut_bytes(documents[i].text, starts, ends)
            outcomes[i] = keep_or_drop(text, self.spec.min_left_chars, "repeated passages")
        return outcomes


def cut_bytes(text: str, starts: Sequence[int], ends: Sequence[int]) -> str:
    """The text without some ordered ranges of its UTF-8 bytes; characters only partly in a range stay."""
    raw = text.encode()
    pieces, at = [], 0
    for start, end in zip(starts, ends, strict=True):
        while start < end and _inside_character(raw, start):
            start += 1
        while end > start and end < len(raw) and _inside_character(raw, end):
            end -= 1
        pieces.append(raw[at:start])
        at = end
    return b"".join([*pieces, raw[at:]]).decode()


def _inside_character(raw: bytes, at: int) -> bool:
    return raw[at] & 0xC0 == 0x80
