"""The rows of a source: T tokens each, numbered, assembled on demand.

`ConcatRows` cuts the store into windows, `PadRows` gives each document its own row, and `packing.py` packs whole
documents. The stream sees only the `Rows` protocol; `StreamOrder` decides which row comes when.
"""

from __future__ import annotations

import dataclasses
import mmap
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bessemer.data.store.shard import Origin
from bessemer.data.store.token_store import TokenStore, length_chunks

if TYPE_CHECKING:
    from bessemer.data.stream.batches import Batch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Side = Literal["right", "left"]

EMPTY_FIELD = -100  # of integers, where a row has no document; the label that torch ignores
PADDING = -1  # the document of a span that belongs to none
_DOCUMENTS = 1 << 20  # read together when rows are counted
_WINDOW_TOKENS = 1 << 15
_SMALL_BYTES = 1 << 17  # smaller arrays are allocated as usual
_SPARE_SLABS = 4
_SPREAD_CELLS = 1 << 14


@dataclass(frozen=True)
class Spans:
    """Runs of columns of one document each, ordered by row and column; together they cover every row.

    A column belongs to the document of its *target*: as an input, the EOS of one document opens the next.
    """

    row: Ints  # index into the requested rows
    column: Ints
    length: Ints
    document: Ints  # index in the source, or PADDING
    weight: npt.NDArray[Any]  # sum of the target weights: the length minus masked targets; 0 for padding
    place: Ints | None = None  # position of the first target in the store; None: that of the document's first token

    @cached_property
    def number(self) -> Ints:
        """Each span's number within its row: 0, 1, 2, ... Padding after a document shares its number, since causal
        attention never looks there: a padded row of one document needs no mask."""
        begins = (self.document != PADDING) & (self.column > 0)
        counted = np.cumsum(begins)
        firsts = np.flatnonzero(self.column == 0)
        spans_per_row = np.diff(firsts, append=self.row.size)
        return counted - np.repeat(counted[firsts], spans_per_row)


@dataclass
class RowBlock:
    """Assembled rows. Padding has token 0 and target 0."""

    tokens: Ints  # (n, T) inputs
    targets: Ints  # (n, T)
    weights: Floats | None  # (n, T) of the targets; None: 1, and 0 in padding
    spans: Spans
    fields: dict[str, npt.NDArray[Any]] = dataclasses.field(default_factory=dict)  # as in `Batch`


@runtime_checkable
class Rows(Protocol):
    """The rows of one source. Pure: the same number gives the same row, in any batch and any process."""

    @property
    def count(self) -> int:
        """Rows in an epoch: the source's length in the `StreamOrder`."""
        ...

    @property
    def length(self) -> int:
        """T, the columns of every row."""
        ...

    @property
    def packing(self) -> str:
        """concat, best_fit, pad, ... with the settings that change a row."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the rows besides `packing` and T. A resume with another one is refused."""
        ...

    @property
    def full(self) -> bool:
        """Whether every target has weight 1, so that a step's count needs no spans."""
        ...

    def spans(self, sequences: Ints, /) -> Spans:
        """The documents in the rows and their weights, without reading tokens if possible."""
        ...

    def assemble(self, sequences: Ints, /) -> RowBlock:
        """The rows, in the given order, as arrays that the caller may change."""
        ...

    def origin_of_document(self, document: int, /) -> Origin:
        """Where a document of a span came from."""
        ...


class Transform(Protocol):
    """A last change to each micro-batch, such as noise on its inputs or trimming of common padding.

    Pure: it depends only on its settings and the batch's `positions`. It keeps every row's sum of weights, because
    `step_count` is known before the batch is built, and the document numbers, because `locate` reports by them.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Entries for the stream's identity: the settings that change the tokens."""
        ...

    def __call__(self, batch: Batch, /) -> Batch: ...


class ArrayPool:
    """Memory for batches, taken from slabs that return to the pool when the last array in them is dropped.

    A batch is some megabytes of new arrays. Fresh memory from the system costs 5 to 8 ns a token for the first touch
    of its pages, more than the rest of assembling a batch. Safe for many threads.
    """

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque(maxlen=_SPARE_SLABS)  # its single operations are atomic

    def take(self, shape: tuple[int, ...], *dtypes: Any) -> list[npt.NDArray[Any]]:
        """An uninitialised array of this shape for each type, all in one slab."""
        cells = int(np.prod(shape))
        types = [np.dtype(dtype) for dtype in dtypes]
        sizes = [-(-cells * dtype.itemsize // 64) * 64 for dtype in types]
        if sum(sizes) < _SMALL_BYTES:
            return [np.empty(shape, dtype) for dtype in types]
        slab = self._slab(sum(sizes))
        # All arrays made from `owner` keep it alive; when it is collected, the slab is free.
        owner = np.frombuffer(slab, np.uint8)
        weakref.finalize(owner, self._spare.append, slab).atexit = False
        arrays, begin = [], 0
        for dtype, size in zip(types, sizes, strict=True):
            arrays.append(owner[begin : begin + cells * dtype.itemsize].view(dtype).reshape(shape))
            begin += size
        return arrays

    def _slab(self, size_bytes: int) -> mmap.mmap:
        for _ in range(len(self._spare)):
            try:
                slab = self._spare.popleft()
            except IndexError:  # another thread took the last
                break
            if size_bytes <= len(slab) <= 2 * size_bytes:
                return slab
            self._spare.append(slab)
        slab = mmap.mmap(-1, size_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        return slab


def repeat_into(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
    """np.repeat(values, lengths) into a flat array, without a large intermediate."""
    for first, stop, begin, end in length_chunks(lengths, _SPREAD_CELLS):
        out[begin:end] = np.repeat(values[first:stop], lengths[first:stop])


def sequence_count(tokens: int, sequence_length: int) -> int:
    """Sequences in a store of `tokens` tokens; the last token is only ever a target."""
    return max(0, tokens - 1) // sequence_length


class StoreRows(ABC):
    """Rows that are cut from a token store."""

    def __init__(self, store: TokenStore, length: int) -> None:
        self.store, self.length = store, length
        self.fingerprint = store.fingerprint
        self._arrays = ArrayPool()

    def origin_of_document(self, document: int) -> Origin:
        return self.store.origin_of_document(document)

    def fields(self, spans: Spans, rows: int) -> dict[str, npt.NDArray[Any]]:
        """The fields of the documents in assembled rows: (rows, D, width) in the order of the row, or (rows, T) beside
        the targets. Empty places hold NaN, or -100 in fields of integers."""
        made: dict[str, npt.NDArray[Any]] = {}
        real = np.flatnonzero(spans.document != PADDING)
        row, number, document = spans.row[real], spans.number[real], spans.document[real]
        for name, (dtype, width) in self.store.fields.items():
            shape = (rows, int(number.max(initial=0)) + 1, width) if width else (rows, self.length)
            empty = np.nan if np.dtype(dtype).kind == "f" else EMPTY_FIELD
            values = made[name] = np.full(shape, empty, np.dtype(dtype).newbyteorder("="))
            if width:
                values[row, number] = self.store.document_field(name, document)
            else:
                starts = self.store.extents(document)[0] if spans.place is None else spans.place[real]
                at = row * self.length + spans.column[real]
                self.store.copy_field(name, starts, spans.length[real], values.reshape(-1), at)
        return made

    def prefetch(self, sequences: Ints) -> None:
        """Fetches the shards of rows that will be read soon, in the background; nothing for a local store."""
        if self.store.cache:
            self.store.prefetch(*self._token_runs(sequences))

    @abstractmethod
    def _token_runs(self, sequences: Ints) -> tuple[Ints, Ints]:
        """The starts and lengths of the runs of tokens that the rows are read from."""


class ConcatRows(StoreRows):
    """Documents end to end, T tokens at a time, nothing lost and nothing padded.

    Row i covers tokens [i*T, i*T + T] of the store, both ends included: T inputs and, shifted by one, T targets.
    """

    packing = "concat"

    def __init__(self, store: TokenStore, length: int) -> None:
        super().__init__(store, length)
        self.count = sequence_count(store.tokens, length)

    @property
    def full(self) -> bool:
        return not self.store.masked

    def spans(self, sequences: Ints) -> Spans:
        """Reads the documents' starts, not their tokens."""
        spans = self._spans(sequences)
        if not self.store.masked:
            return spans
        first = sequences * self.length + 1
        begin = first[spans.row] + spans.column
        targets = self.store.targets_before(np.concatenate([begin, begin + spans.length]))
        return replace(spans, weight=targets[begin.size :] - targets[: begin.size])

    def assemble(self, sequences: Ints) -> RowBlock:
        starts = sequences * self.length
        weights = self.store.weights(starts + 1, self.length) if self.store.masked else None
        tokens, targets = self._arrays.take((sequences.size, self.length), np.int64, np.int64)
        step = max(1, _WINDOW_TOKENS // self.length)
        for row in range(0, sequences.size, step):  # windows that stay in the processor's cache
            window = self.store.gather(starts[row : row + step], self.length + 1)
            tokens[row : row + step], targets[row : row + step] = window[:, :-1], window[:, 1:]
        return RowBlock(tokens, targets, weights, self._spans(sequences))

    def _token_runs(self, sequences: Ints) -> tuple[Ints, Ints]:
        return sequences * self.length, np.full_like(sequences, self.length + 1)

    def _spans(self, sequences: Ints) -> Spans:
        """As if every target had weight 1."""
        length = self.length
        targets = sequences * length + 1
        first, more, inner = self.store.documents_in(targets, np.full_like(targets, length))
        leads = np.cumsum(more + 1) - (more + 1)  # the first span of each row
        total = inner.size + sequences.size
        row = np.repeat(np.arange(sequences.size), more + 1)
        begins = np.ones(total, np.bool_)
        begins[leads] = False
        column = np.zeros(total, np.int64)
        column[begins] = inner - np.repeat(targets, more)
        span_length = np.diff(row * length + column, append=sequences.size * length)
        document = np.arange(total) + np.repeat(first - leads, more + 1)
        return Spans(row, column, span_length, document, span_length, targets[row] + column)


def _inside(lengths: Ints, width: int, side: Side) -> Flags:
    """Which of `width` columns are not padding, for rows of these lengths."""
    columns = np.arange(width)
    return columns < lengths[:, None] if side == "right" else columns >= width - lengths[:, None]


class PadRows(StoreRows):
    """Each document in its own padded row, with the end-of-document token before it as the first input.

    A document longer than `length` is split into consecutive rows, or truncated to one. Memory grows with the number of
    long documents only. Rows have the full context; `Trim` then cuts every micro-batch to its longest row, and a
    ranking by `row_lengths` makes neighbours similar in length.
    """

    full = False

    def __init__(
        self, store: TokenStore, length: int, long: Literal["split", "truncate"] = "split", side: Side = "right"
    ) -> None:
        super().__init__(store, length)
        self.side = side
        self.packing = f"pad, {long}, {side}"
        self._split, extra = _long_documents(store, length) if long == "split" else (np.empty(0, np.int64),) * 2
        self._more = np.cumsum(extra)  # rows beyond one each, up to and including each long document
        self._first = self._split + self._more - extra  # the first row of each long document
        self.count = store.documents + int(extra.sum())

    def row_lengths(self, sequences: Ints) -> Ints:
        """Columns of each row that are not padding: length buckets are made by this."""
        _, begin, stop = self._extents(sequences)
        return stop - begin

    def spans(self, sequences: Ints) -> Spans:
        document, begin, stop = self._extents(sequences)
        lengths, n = stop - begin, sequences.size
        row, cells = np.repeat(np.arange(n), 2), np.empty((n, 2), np.int64)
        real = 0 if self.side == "right" else 1
        cells[:, real], cells[:, 1 - real] = lengths, self.length - lengths
        owner = np.full((n, 2), PADDING)
        owner[:, real] = document
        weight = np.zeros((n, 2), np.int64)
        weight[:, real] = self.store.targets_before(stop) - self.store.targets_before(begin)
        column = np.zeros((n, 2), np.int64)
        column[:, 1] = cells[:, 0]
        some = cells.ravel() > 0
        place = np.repeat(begin, 2)[some]
        cells, column, owner, weight = (array.ravel()[some] for array in (cells, column, owner, weight))
        return Spans(row[some], column, cells, owner, weight, place)

    def assemble(self, sequences: Ints) -> RowBlock:
        _, begin, stop = self._extents(sequences)
        lengths, n = stop - begin, sequences.size
        first = np.zeros_like(begin) if self.side == "right" else self.length - lengths
        cells = np.arange(n) * self.length + first
        tokens, targets = np.empty((n, self.length), np.int64), np.zeros((n, self.length), np.int64)
        self.store.copy_runs(begin, lengths, targets.reshape(-1), cells)
        # An input is the target before it; the first is the token before the row in the store.
        tokens[:, 1:] = targets[:, :-1]
        tokens[~_inside(lengths, self.length, self.side)] = 0
        tokens.reshape(-1)[cells] = self._first_inputs(begin)
        weights = None
        if self.store.masked:
            weights = np.zeros(targets.shape, np.float32)
            self.store.copy_weights(begin, lengths, weights.reshape(-1), cells)
        return RowBlock(tokens, targets, weights, self.spans(sequences))

    def _token_runs(self, sequences: Ints) -> tuple[Ints, Ints]:
        _, begin, stop = self._extents(sequences)
        return np.maximum(begin - 1, 0), stop - begin + 1

    def _extents(self, sequences: Ints) -> tuple[Ints, Ints, Ints]:
        """(document, start, stop) of each row's tokens."""
        long = np.searchsorted(self._first, sequences, side="right") - 1
        after_long = long >= 0
        at = np.maximum(long, 0)
        piece = np.zeros_like(sequences)
        document = sequences.copy()
        if self._first.size:
            begun = sequences - self._first[at]
            rows = self._more[at] - np.where(at > 0, self._more[at - 1], 0) + 1
            inside = after_long & (begun < rows)
            piece = np.where(inside, begun, 0)
            document = np.where(inside, self._split[at], np.where(after_long, sequences - self._more[at], sequences))
        start, stop = self.store.extents(document)
        begin = start + piece * self.length
        return document, begin, np.minimum(begin + self.length, stop)

    def _first_inputs(self, begin: Ints) -> Ints:
        """The token before each position; before the first document an end-of-document token, as before the others."""
        before = np.where(begin > 0, begin, self.store.tokens) - 1
        return self.store.gather(before, 1)[:, 0].astype(np.int64)


def _long_documents(store: TokenStore, length: int) -> tuple[Ints, Ints]:
    """The documents that fill more than one row, and their number of extra rows."""
    documents, extra = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(0, store.documents, _DOCUMENTS):
        stop = min(first + _DOCUMENTS, store.documents)
        more = (np.diff(store.edges(first, stop)) - 1) // length
        at = np.flatnonzero(more)
        documents.append(first + at)
        extra.append(more[at])
    return np.concatenate(documents), np.concatenate(extra)


class Trim:
    """A `Transform` that removes the columns that are padding in every row of the micro-batch.

    On the right these are the columns after the last target that counts; on the left, those before any document, where
    padding has its own document number. Targets that count stay, so the stream's identity does not change.
    """

    def __init__(self, multiple_of: int = 1, side: Side = "right") -> None:
        self.multiple_of, self.side = multiple_of, side

    @property
    def identity(self) -> dict[str, Any]:
        return {}

    def __call__(self, batch: Batch) -> Batch:
        width = batch.tokens.shape[1]
        unused = self._unused_right(batch) if self.side == "right" else self._unused_left(batch)
        trimmed = min(width, max(1, -(-(width - unused) // self.multiple_of)) * self.multiple_of)
        columns = slice(0, trimmed) if self.side == "right" else slice(width - trimmed, width)
        cut = {name: getattr(batch, name)[:, columns] for name in ("tokens", "targets", "weights", "documents")}
        trimmed_fields = {
            name: np.ascontiguousarray(array[:, columns]) if array.ndim == 2 else array
            for name, array in batch.fields.items()
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in cut.items()}
        return dataclasses.replace(batch, **arrays, fields=trimmed_fields)

    def _unused_right(self, batch: Batch) -> int:
        counted = np.flatnonzero(batch.weights.any(axis=0))
        return batch.weights.shape[1] - (int(counted[-1]) + 1 if counted.size else 0)

    def _unused_left(self, batch: Batch) -> int:
        leading = batch.documents == 0
        padded = (batch.documents[:, -1] > 0) & ~(leading & (batch.weights > 0)).any(axis=1)
        unused = np.where(padded, leading.sum(axis=1), 0)
        unused[batch.positions < 0] = batch.tokens.shape[1]
        return int(unused.min(initial=batch.tokens.shape[1]))
