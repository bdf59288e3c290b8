"""Best-fit packing: no document is cut that fits in a row, and little is padded.

Documents longer than T are cut into pieces of T and a rest; all pieces are then packed into rows of T by best-fit
decreasing. The result is an index, computed once and stored with the data:

    .pieces   for each piece, row after row: int64 position of its first token; uint64 document * 2^24 + length, and
              2^23 more if it continues a document. The space left at the end of a row has document 2^40 - 1
    .rows     int64 index of each row's first piece, and the end
    .chunks   digests of the two, compared when they are read (see store/digests.py)
    .json     counts, fingerprints and digests. Written last: it is the commit
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import CheckedFile, GroupDigests, GroupWriter, content_digest
from bessemer.data.store.shard import map_file, run_indices
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.rows import PADDING, RowBlock, Spans, StoreRows
from bessemer.errors import UserError
from bessemer.storage import write_atomic

Ints = npt.NDArray[np.int64]

_VERSION = 1  # raise it when the same documents would be packed differently
_PIECE = np.dtype([("place", "<i8"), ("owner", "<u8")])
_LENGTH_BITS = 24
_CONTINUES = 1 << (_LENGTH_BITS - 1)
# Pieces that are packed together: 350 MB of memory. Neighbouring documents share rows, so a row reads few shards, and
# millions of pieces leave no more padding than all of them would.
_BLOCK_PIECES = 1 << 23
_READ_DOCUMENTS = 1 << 20


@dataclass(frozen=True)
class PackInfo:
    version: int
    store: str  # its fingerprint
    length: int  # T
    rows: int
    pieces: int
    padding: int  # columns that hold no token
    fingerprint: str  # of the two files
    chunks: str = ""  # digest of the .chunks; empty in an index of an earlier version

    @property
    def digest(self) -> str:
        return content_digest(json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class DocumentPieces:
    """The pieces of some rows, row after row. Together they fill the rows."""

    counts: Ints  # pieces of each row
    place: Ints  # position of each piece's first token in the store
    length: Ints
    document: Ints  # PADDING for the space left
    continues: npt.NDArray[np.bool_]  # not the beginning of its document


class PackIndex:
    """A packing, memory-mapped."""

    def __init__(self, prefix: str, info: PackInfo) -> None:
        self.info, self.rows, self.length = info, info.rows, info.length
        self._pieces = map_file(f"{prefix}.pieces", info.pieces * _PIECE.itemsize, _PIECE)
        self._starts: Ints = map_file(f"{prefix}.rows", (info.rows + 1) * 8, np.dtype("<i8"))
        self._checked: list[CheckedFile] = []
        if info.chunks:
            digests = GroupDigests(Path(f"{prefix}.{CHUNKS}").read_bytes(), _sizes(info))
            files = (("rows", self._starts), ("pieces", self._pieces))
            self._checked = [digests.checked(suffix, data, partial(_damaged, prefix)) for suffix, data in files]

    @property
    def padding_share(self) -> float:
        """The share of all columns that is padding."""
        return self.info.padding / max(1, self.rows * self.length)

    def pieces(self, rows: Ints) -> DocumentPieces:
        """The pieces of the rows, row after row."""
        if self._checked:
            self._checked[0].check_runs(rows, 2)
        first = self._starts[rows]
        counts = self._starts[rows + 1] - first
        if self._checked:
            self._checked[1].check_runs(first, counts)
        pieces = self._pieces[run_indices(first, counts)]
        owner = np.ascontiguousarray(pieces["owner"]).view(np.int64)
        return DocumentPieces(
            counts,
            place=np.ascontiguousarray(pieces["place"]),
            length=owner & (_CONTINUES - 1),
            document=owner >> _LENGTH_BITS,  # of padding, all bits set: -1
            continues=(owner & _CONTINUES) > 0,
        )

    def verify(self) -> Iterator[int]:
        """Verifies both files; yields the bytes compared, some at a time."""
        for checked in self._checked:
            yield from checked.progress()


def pack(store: TokenStore, length: int, prefix: str | Path) -> PackIndex:
    """The packing of a store into rows of `length`, read from the files with this prefix if they belong to this store.

    Otherwise it is computed: about 1 µs per document (10 million in 10 s), in constant memory.
    """
    prefix = str(prefix)
    if not 0 < length < _CONTINUES:
        raise UserError(f"data.context {length:,}: best_fit packs rows of up to {_CONTINUES - 1:,} tokens")
    info = read_pack_info(prefix)
    if info is None or (info.version, info.store, info.length) != (_VERSION, store.fingerprint, length):
        info = _write(store, length, prefix)
    return PackIndex(prefix, info)


def best_fit(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """(the items in the order of placement, the bin of each): longest first, each into the bin where it leaves the
    least space; among equal bins into the oldest; into a new bin if it fits in none.

    Items of equal length, and bins of equal free space, are processed together: the loop runs a few times per length
    and not per item, O(n + T log T) in all.
    """
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity), "an item fits in an empty bin"
    key = (capacity - lengths).astype(np.uint16 if capacity < 1 << 16 else np.uint32)
    order = np.argsort(key, kind="stable")  # of two-byte keys: radix sort
    counts = np.bincount(lengths, minlength=1)
    bins = np.empty(lengths.size, np.int64)
    waiting: dict[int, deque[Ints]] = {}  # bins by free space, oldest first
    spaces: list[int] = []  # the keys of `waiting`, sorted
    placed = opened = 0

    def put(free: int, which: Ints) -> None:
        if free and which.size:
            if free not in waiting:
                waiting[free] = deque()
                insort(spaces, free)
            waiting[free].append(which)

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            at = bisect_left(spaces, size)
            free = spaces[at] if at < len(spaces) else capacity
            each = free // size  # after its first item a bin is again the best fit for the next
            wanted = -(-left // each)
            if at < len(spaces):
                which = _take(waiting[free], wanted)
                if not waiting[free]:
                    del waiting[free], spaces[at]
            else:
                which = np.arange(opened, opened + wanted)
                opened += wanted
            items = min(left, which.size * each)
            bins[placed : placed + items] = np.repeat(which, each)[:items]
            in_last = items - (which.size - 1) * each
            put(free - each * size, which[:-1])
            put(free - in_last * size, which[-1:])
            placed, left = placed + items, left - items
    return order, bins


def _take(queue: deque[Ints], most: int) -> Ints:
    """Removes and returns the first bins of a queue, at most `most`."""
    taken = []
    while queue and most:
        first = queue.popleft()
        taken.append(first[:most])
        if first.size > most:
            queue.appendleft(first[most:])
        most -= taken[-1].size
    return np.concatenate(taken)


def _blocks(store: TokenStore, length: int) -> Iterator[tuple[int, Ints]]:
    """(first document, edges) of neighbouring documents with info _BLOCK_PIECES pieces."""
    first, parts, pieces = 0, list[Ints](), 0
    for begin in range(0, store.documents, _READ_DOCUMENTS):
        stop = min(begin + _READ_DOCUMENTS, store.documents)
        edges = np.asarray(store.edges(begin, stop))
        parts.append(edges[:-1])
        pieces += int((-(-np.diff(edges) // length)).sum())
        if pieces >= _BLOCK_PIECES or stop == store.documents:
            yield first, np.concatenate([*parts, edges[-1:]])
            first, parts, pieces = stop, [], 0


def _pack_block(first: int, edges: Ints, length: int) -> tuple[npt.NDArray[np.void], Ints]:
    """(the pieces, row after row, and the number of pieces of each row) for some documents."""
    sizes = np.diff(edges)
    per_document = -(-sizes // length)
    document = np.repeat(np.arange(sizes.size), per_document)
    offset = run_indices(np.zeros_like(per_document), per_document) * length
    place, lengths = edges[document] + offset, np.minimum(sizes[document] - offset, length)
    continues = (offset > 0).astype(np.int64) * _CONTINUES
    del offset
    order, bins = best_fit(lengths, length)
    space = length - np.bincount(bins, weights=lengths[order]).astype(np.int64)
    padded = np.flatnonzero(space)
    pieces = np.empty(order.size + padded.size, _PIECE)
    pieces["place"][: order.size], pieces["place"][order.size :] = place[order], 0
    pieces["owner"][: order.size] = _owner(first + document, lengths | continues)[order]
    pieces["owner"][order.size :] = _owner(np.full_like(padded, PADDING), space[padded])
    bins = np.concatenate([bins, padded])  # padding comes after all pieces of its row
    return pieces[np.argsort(bins, kind="stable")], np.bincount(bins)


def _owner(documents: Ints, lengths: Ints) -> npt.NDArray[np.uint64]:
    return ((documents << _LENGTH_BITS) | lengths).astype(np.uint64)


def _write(store: TokenStore, length: int, prefix: str) -> PackInfo:
    """Computes and writes the index. Several processes may do so at once."""
    _sweep(prefix)
    rows = pieces = 0
    content = xxhash.xxh3_128()
    files = GroupWriter(prefix)
    try:
        pieces_file, rows_file = files.open("pieces"), files.open("rows")
        for first, edges in _blocks(store, length):
            packed, counts = _pack_block(first, edges, length)
            starts = pieces + np.cumsum(counts) - counts
            for file, data in ((pieces_file, packed.data), (rows_file, starts.astype("<i8").data)):
                file.write(data)
                content.update(data)
            rows, pieces = rows + counts.size, pieces + packed.size
        rows_file.write(np.array([pieces], "<i8").data)
        _, chunks = files.finish()
    except BaseException:
        files.discard()
        raise
    padding = rows * length - store.tokens
    info = PackInfo(_VERSION, store.fingerprint, length, rows, pieces, padding, content.hexdigest(), chunks)
    write_atomic(f"{prefix}.json", json.dumps(asdict(info) | {"digest": info.digest}, indent=1))
    return info


def _sweep(prefix: str) -> None:
    """Deletes what killed processes left: temporary files that were not written to for an hour."""
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


def read_pack_info(prefix: str) -> PackInfo | None:
    """The `.json` of an index, or None if a file is missing or damaged; the large files are verified when read."""
    try:
        with open(f"{prefix}.json", encoding="utf-8") as file:
            content = json.load(file)
        digest = content.pop("digest", None)
        info = PackInfo(**content)
        if digest is not None and digest != info.digest:
            return None
        if info.chunks and content_digest(Path(f"{prefix}.{CHUNKS}").read_bytes()) != info.chunks:
            return None
        sizes = {suffix: os.path.getsize(f"{prefix}.{suffix}") for suffix in ("pieces", "rows")}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return info if sizes == _sizes(info) else None


def _sizes(info: PackInfo) -> dict[str, int]:
    return {"pieces": info.pieces * _PIECE.itemsize, "rows": (info.rows + 1) * 8}


def _damaged(prefix: str, suffix: str, what: str) -> UserError:
    return UserError(f"{prefix}.{suffix}: {what}; delete {prefix}.json and run again: the packing is computed again")


def open_best_fit(store: TokenStore, length: int, prefix: str | Path) -> BestFitRows:
    """The store's packed rows of `length`; the packing is read from the files with this prefix, or computed."""
    return BestFitRows(store, pack(store, length, prefix))


class BestFitRows(StoreRows):
    """Every token of the store is a target exactly once, in a row with its document, and inputs never cross documents.

    As in `ConcatRows`, the input before a document's first token is the end-of-document token. The input before a later
    piece of a cut document is its true predecessor. Space left at the end of a row is padding.
    """

    packing = "best_fit"

    def __init__(self, store: TokenStore, index: PackIndex) -> None:
        super().__init__(store, index.length)
        self.index, self.count = index, index.rows
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{store.fingerprint} {index.info.fingerprint}".encode())

    @property
    def full(self) -> bool:
        return not self.store.masked and not self.index.info.padding

    def spans(self, sequences: Ints) -> Spans:
        """Reads only the index."""
        pieces = self.index.pieces(sequences)
        spans = self._spans(pieces)
        if not self.store.masked:
            return spans
        place, n = pieces.place, pieces.place.size
        targets = self.store.targets_before(np.concatenate([place, place + spans.weight]))
        return replace(spans, weight=targets[n:] - targets[:n])

    def assemble(self, sequences: Ints) -> RowBlock:
        pieces = self.index.pieces(sequences)
        spans = self._spans(pieces)
        cells = spans.row * self.length + spans.column
        real = pieces.document != PADDING
        empty = run_indices(cells[~real], pieces.length[~real])
        runs = pieces.place[real], pieces.length[real]
        tokens, targets = self._arrays.take((sequences.size, self.length), np.int64, np.int64)
        flat_tokens, flat_targets = tokens.reshape(-1), targets.reshape(-1)
        self.store.copy_runs(*runs, flat_targets, cells[real], True)
        tokens[:, 1:] = targets[:, :-1]
        flat_tokens[cells] = self._end_of_document
        continues = np.flatnonzero(pieces.continues)
        flat_tokens[cells[continues]] = self.store.gather(pieces.place[continues] - 1, 1)[:, 0]
        flat_tokens[empty] = flat_targets[empty] = 0
        weights = None
        if self.store.masked:
            (weights,) = self._arrays.take(targets.shape, np.float32)
            self.store.copy_weights(*runs, weights.reshape(-1), cells[real], True)
            weights.reshape(-1)[empty] = 0
        return RowBlock(tokens, targets, weights, spans)

    def _token_runs(self, sequences: Ints) -> tuple[Ints, Ints]:
        pieces = self.index.pieces(sequences)
        real = pieces.document != PADDING
        return pieces.place[real], pieces.length[real]

    def _spans(self, pieces: DocumentPieces) -> Spans:
        """As if every target had weight 1."""
        row = np.repeat(np.arange(pieces.counts.size), pieces.counts)
        column = np.cumsum(pieces.length) - pieces.length - row * self.length
        weight = pieces.length * (pieces.document != PADDING) if self.index.info.padding else pieces.length
        return Spans(row, column, pieces.length, pieces.document, weight, pieces.place)

    @cached_property
    def _end_of_document(self) -> int:
        return int(self.store.gather(np.array([self.store.tokens - 1]), 1)[0, 0])
