"""Best-fit packing: which documents share a row, so that none is cut that fits in one and little is padded.

Documents longer than T are cut into pieces of T and a rest; all pieces are then packed into rows of T by best-fit
decreasing. The result is an index, computed once and kept beside the store, over which the usual order runs:

    .pieces   for each piece, row after row: int64 place of its first token; uint64 document * 2^24 + length, and 2^23
              more where it goes on with a document. The space left at the end of a row is of document 2^40 - 1
    .rows     int64 number of each row's first piece, and the end
    .chunks   digests of the two, compared when they are read (see chunk_digests.py)
    .json     counts, fingerprints and digests. Written last: it is the commit

Rows of whole documents, packed by best fit: the row source over a `PackIndex`.
"""

from __future__ import annotations

import json
import os
import time
import uuid
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

from bessemer.data.store.arrays import Arrays
from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import CheckedFile, DigestWriter, GroupDigests, content_digest
from bessemer.data.store.token_store import Origin, TokenSource, map_file, run_indices
from bessemer.data.stream.rows import PADDING, RowBlock, Spans
from bessemer.errors import UserError
from bessemer.storage import sync_file, write_atomic

Ints = npt.NDArray[np.int64]

_VERSION = 1  # raise it when the same documents would be packed otherwise
_PIECE = np.dtype([("place", "<i8"), ("owner", "<u8")])
_LENGTH_BITS = 24
_GOES_ON = 1 << (_LENGTH_BITS - 1)
# Pieces that are packed together: 350 MB of memory. Neighbouring documents then share rows, so a row's shards are
# few, and millions of pieces leave no more padding than all of them would.
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
    """Of each row how many pieces it has; then of every piece what follows. Together they fill the rows."""

    counts: Ints
    place: Ints  # of its first token in the store
    length: Ints
    document: Ints  # PADDING where nothing was left to put
    goes_on: npt.NDArray[np.bool_]  # it is not the beginning of its document


class PackIndex:
    """A packing, opened: memory-mapped, so it costs no memory of its own."""

    def __init__(self, prefix: str, about: PackInfo) -> None:
        self.about, self.rows, self.length = about, about.rows, about.length
        self._pieces = map_file(f"{prefix}.pieces", about.pieces * _PIECE.itemsize, _PIECE)
        self._starts: Ints = map_file(f"{prefix}.rows", (about.rows + 1) * 8, np.dtype("<i8"))
        self._checked: list[CheckedFile] = []
        if about.chunks:
            digests = GroupDigests(Path(f"{prefix}.{CHUNKS}").read_bytes(), _sizes(about))
            files = (("rows", self._starts), ("pieces", self._pieces))
            self._checked = [digests.checked(suffix, data, partial(_damaged, prefix)) for suffix, data in files]

    @property
    def padding_share(self) -> float:
        """How much of all columns is padding."""
        return self.about.padding / max(1, self.rows * self.length)

    def pieces(self, rows: Ints) -> DocumentPieces:
        """What the rows are made of, row after row."""
        if self._checked:
            self._checked[0].check_runs(rows, 2)
        first = self._starts[rows]
        counts = self._starts[rows + 1] - first
        if self._checked:
            self._checked[1].check_runs(first, counts)
        found = self._pieces[run_indices(first, counts)]
        owner = np.ascontiguousarray(found["owner"]).view(np.int64)
        return DocumentPieces(
            counts,
            place=np.ascontiguousarray(found["place"]),
            length=owner & (_GOES_ON - 1),
            document=owner >> _LENGTH_BITS,  # of padding, all bits set: -1
            goes_on=(owner & _GOES_ON) > 0,
        )

    def verify(self) -> Iterator[int]:
        """Compares everything with its digests; yields the bytes compared, some at a time."""
        for checked in self._checked:
            yield from checked.progress()


def pack(store: TokenSource, length: int, prefix: str | Path) -> PackIndex:
    """The packing of a store into rows of `length`, from the files with this prefix where they are of this store.

    Else it is computed: about 1 µs per document (10 million in some 10 s), in memory that does not grow with the store.
    """
    prefix = str(prefix)
    if not 0 < length < _GOES_ON:
        raise UserError(f"data.context {length:,}: best_fit packs rows of up to {_GOES_ON - 1:,} tokens")
    about = read_index(prefix)
    if about is None or (about.version, about.store, about.length) != (_VERSION, store.fingerprint, length):
        about = _write(store, length, prefix)
    return PackIndex(prefix, about)


def best_fit(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """(the items in the order they are placed, the bin of each): longest first, each into the bin where it leaves the
    least space; among equal bins into the one that has waited longest; into a new bin when it fits in none.

    Items of one length are placed together, and so are bins of one free space: the loop runs a few times per length
    and not per item, O(n + T log T) in all.
    """
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity), "an item fits in an empty bin"
    key = (capacity - lengths).astype(np.uint16 if capacity < 1 << 16 else np.uint32)
    order = np.argsort(key, kind="stable")  # of two-byte keys: radix sort
    counts = np.bincount(lengths, minlength=1)
    bins = np.empty(lengths.size, np.int64)
    waiting: dict[int, deque[Ints]] = {}  # bins by free space, in the order they got there
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
            each = free // size  # after its first item a bin is again the fullest that can take the next
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
    """The first bins of a queue, at most so many."""
    taken = []
    while queue and most:
        first = queue.popleft()
        taken.append(first[:most])
        if first.size > most:
            queue.appendleft(first[most:])
        most -= taken[-1].size
    return np.concatenate(taken)


def _blocks(store: TokenSource, length: int) -> Iterator[tuple[int, Ints]]:
    """(first document, edges) of neighbouring documents that make about so many pieces."""
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
    """(the pieces, row after row, and how many each row has) for some documents."""
    sizes = np.diff(edges)
    per_document = -(-sizes // length)
    document = np.repeat(np.arange(sizes.size), per_document)
    offset = run_indices(np.zeros_like(per_document), per_document) * length
    place, lengths = edges[document] + offset, np.minimum(sizes[document] - offset, length)
    goes_on = (offset > 0).astype(np.int64) * _GOES_ON
    del offset
    order, bins = best_fit(lengths, length)
    space = length - np.bincount(bins, weights=lengths[order]).astype(np.int64)
    padded = np.flatnonzero(space)
    pieces = np.empty(order.size + padded.size, _PIECE)
    pieces["place"][: order.size], pieces["place"][order.size :] = place[order], 0
    pieces["owner"][: order.size] = _owner(first + document, lengths | goes_on)[order]
    pieces["owner"][order.size :] = _owner(np.full_like(padded, PADDING), space[padded])
    bins = np.concatenate([bins, padded])  # behind all pieces of their rows
    return pieces[np.argsort(bins, kind="stable")], np.bincount(bins)


def _owner(documents: Ints, lengths: Ints) -> npt.NDArray[np.uint64]:
    return ((documents << _LENGTH_BITS) | lengths).astype(np.uint64)


def _write(store: TokenSource, length: int, prefix: str) -> PackInfo:
    """Several processes may write at once: each writes files of its own, and all write the same."""
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    _sweep(prefix)
    own = f"{prefix}.partial-{uuid.uuid4().hex[:8]}"
    rows = pieces = 0
    content = xxhash.xxh3_128()
    try:
        digests = DigestWriter()
        with digests.open("pieces", f"{own}.pieces") as pieces_file, digests.open("rows", f"{own}.rows") as rows_file:
            for first, edges in _blocks(store, length):
                packed, counts = _pack_block(first, edges, length)
                starts = pieces + np.cumsum(counts) - counts
                for file, data in ((pieces_file, packed.data), (rows_file, starts.astype("<i8").data)):
                    file.write(data)
                    content.update(data)
                rows, pieces = rows + counts.size, pieces + packed.size
            rows_file.write(np.array([pieces], "<i8").data)
            for written in (pieces_file, rows_file):
                sync_file(written)
        padding = rows * length - store.tokens
        chunks = digests.content()
        with open(f"{own}.{CHUNKS}", "wb") as chunks_file:
            chunks_file.write(chunks)
            sync_file(chunks_file)
        about = PackInfo(
            _VERSION, store.fingerprint, length, rows, pieces, padding, content.hexdigest(), content_digest(chunks)
        )
        Path(f"{prefix}.json").unlink(missing_ok=True)
        for suffix in ("pieces", "rows", CHUNKS):
            os.replace(f"{own}.{suffix}", f"{prefix}.{suffix}")
        write_atomic(f"{prefix}.json", json.dumps(asdict(about) | {"digest": about.digest}, indent=1))
    finally:
        for suffix in ("pieces", "rows", CHUNKS):
            Path(f"{own}.{suffix}").unlink(missing_ok=True)
    return about


def _sweep(prefix: str) -> None:
    """Deletes what killed processes left: files that nobody has written to for an hour."""
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.partial-*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


def read_index(prefix: str) -> PackInfo | None:
    """The index that the files hold, if they hold one that is whole. Its two large files are verified when read."""
    try:
        with open(f"{prefix}.json", encoding="utf-8") as file:
            found = json.load(file)
        digest = found.pop("digest", None)
        about = PackInfo(**found)
        if digest is not None and digest != about.digest:
            return None
        if about.chunks and content_digest(Path(f"{prefix}.{CHUNKS}").read_bytes()) != about.chunks:
            return None
        sizes = {suffix: os.path.getsize(f"{prefix}.{suffix}") for suffix in ("pieces", "rows")}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return about if sizes == _sizes(about) else None


def _sizes(about: PackInfo) -> dict[str, int]:
    return {"pieces": about.pieces * _PIECE.itemsize, "rows": (about.rows + 1) * 8}


def _damaged(prefix: str, suffix: str, what: str) -> UserError:
    return UserError(f"{prefix}.{suffix}: {what}; delete {prefix}.json and run again: the packing is computed again")


def best_fit_rows(store: TokenSource, length: int, prefix: str | Path) -> BestFitRows:
    """The store's rows of `length`; the packing is read from the files with this prefix, or computed into them."""
    return BestFitRows(store, pack(store, length, prefix))


class BestFitRows:
    """Every token of the store is a target exactly once, in the row of its document, and inputs never cross documents.

    As when rows are cut from the store as it lies, the input before a document's first token is the end-of-document
    token (which stands before it in the store, and at the store's end). The input before a later piece of a document
    that was cut is its true predecessor. Space left at the end of a row is padding.
    """

    packing = "best_fit"

    def __init__(self, store: TokenSource, index: PackIndex) -> None:
        self.store, self.index = store, index
        self.length, self.count = index.length, index.rows
        self._arrays = Arrays()
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{store.fingerprint} {index.about.fingerprint}".encode())

    @property
    def full(self) -> bool:
        return not self.store.masked and not self.index.about.padding

    @property
    def far(self) -> bool:
        return bool(getattr(self.store, "far", False))

    def spans(self, sequences: Ints) -> Spans:
        """Reads the index only."""
        pieces = self.index.pieces(sequences)
        spans = self._spans(pieces)
        if not self.store.masked:
            return spans
        place, n = pieces.place, pieces.place.size
        kept = self.store.kept_before(np.concatenate([place, place + spans.weight]))
        return replace(spans, weight=kept[n:] - kept[:n])

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
        goes_on = np.flatnonzero(pieces.goes_on)
        flat_tokens[cells[goes_on]] = self.store.gather(pieces.place[goes_on] - 1, 1)[:, 0]
        flat_tokens[empty] = flat_targets[empty] = 0
        weights = None
        if self.store.masked:
            (weights,) = self._arrays.take(targets.shape, np.float32)
            self.store.copy_weights(*runs, weights.reshape(-1), cells[real], True)
            weights.reshape(-1)[empty] = 0
        return RowBlock(tokens, targets, weights, spans)

    def origin_of_document(self, document: int) -> Origin:
        return self.store.origin_of_document(document)

    def expect(self, sequences: Ints) -> None:
        """Tells a store whose shards lie afar what will be read soon."""
        if self.far:
            pieces = self.index.pieces(sequences)
            real = pieces.document != PADDING
            self.store.expect(pieces.place[real], pieces.length[real])  # type: ignore[attr-defined]

    def _spans(self, pieces: DocumentPieces) -> Spans:
        """As if every target had weight 1."""
        row = np.repeat(np.arange(pieces.counts.size), pieces.counts)
        column = np.cumsum(pieces.length) - pieces.length - row * self.length
        weight = pieces.length * (pieces.document != PADDING) if self.index.about.padding else pieces.length
        return Spans(row, column, pieces.length, pieces.document, weight)

    @cached_property
    def _end_of_document(self) -> int:
        return int(self.store.gather(np.array([self.store.tokens - 1]), 1)[0, 0])
