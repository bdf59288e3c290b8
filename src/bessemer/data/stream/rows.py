"""What a source gives to the stream: rows of T tokens, numbered, each put together on demand.

`concat` cuts the store into windows, `best_fit` packs whole documents and `pad` gives every document a row of its own.
The stream only knows this protocol: `StreamOrder` says which row comes when.

Rows cut from a store as it lies: documents one after another, T tokens at a time, nothing lost and nothing padded.

Row i covers tokens [i*T, i*T + T] of the store, both ends included: T inputs and, each one further on, T targets.

Rows of one document each, padded: for fine-tuning, where documents must not share a row.

`PadRows` gives rows of the full context; `Trim` then cuts every micro-batch to its longest row. With a ranking by
`row_lengths` (see `curriculum.rank_rows`, `run=RUN_ROWS`) neighbours are of like length and little padding is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bessemer.data.store.arrays import Arrays
from bessemer.data.store.token_store import Origin, TokenSource

if TYPE_CHECKING:
    from bessemer.data.store.token_store import Origin
    from bessemer.data.stream.batches import Batch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

PADDING = -1  # the document of a span that belongs to none


@dataclass(frozen=True)
class Spans:
    """Runs of columns of one document each, by row and column; together they cover every row.

    A column belongs to the document of its *target*: as an input, the EOS of one document opens the next.
    """

    row: Ints  # index into the rows asked for
    column: Ints
    length: Ints
    document: Ints  # index in the source; PADDING for columns that belong to no document
    weight: npt.NDArray[Any]  # sum of the target weights: the length, less what a mask leaves out; 0 for padding

    @cached_property
    def number(self) -> Ints:
        """Each span's number within its row: 0, 1, 2, ... Padding behind a document shares its number, since causal
        attention never looks there: a padded row of one document then still needs no mask."""
        begins = (self.document != PADDING) & (self.column > 0)
        counted = np.cumsum(begins)
        firsts = np.flatnonzero(self.column == 0)
        spans_per_row = np.diff(firsts, append=self.row.size)
        return counted - np.repeat(counted[firsts], spans_per_row)


@dataclass
class RowBlock:
    """Some rows, put together. Padding has token 0 and target 0."""

    tokens: Ints  # (n, T) inputs
    targets: Ints  # (n, T)
    weights: Floats | None  # (n, T) of the targets; None: 1 everywhere but 0 in padding
    spans: Spans  # where there are `weights`, these count and not the spans' sums


@runtime_checkable
class Rows(Protocol):
    """The rows of one source. Pure: the same number gives the same row, in any company and in any process."""

    @property
    def count(self) -> int:
        """How many rows there are in an epoch: the source's length in the `StreamOrder`."""
        ...

    @property
    def length(self) -> int:
        """T, the columns of every row."""
        ...

    @property
    def packing(self) -> str:
        """concat, best_fit, pad, ...: with its settings, if they change a row."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of all that decides the rows besides `packing` and T. Resuming with another one is refused."""
        ...

    @property
    def full(self) -> bool:
        """Every target of every row has weight 1, so a step's count needs no spans."""
        ...

    def spans(self, sequences: Ints, /) -> Spans:
        """The documents in the rows and their weights, without reading tokens where that is possible."""
        ...

    def assemble(self, sequences: Ints, /) -> RowBlock:
        """The rows themselves, one for each number, in their order; arrays that the caller may change."""
        ...

    def origin_of_document(self, document: int, /) -> Origin:
        """Where a document of a span came from."""
        ...


@runtime_checkable
class Expecting(Protocol):
    """Rows that may come from afar: told what will be read soon, they fetch it in the background."""

    @property
    def far(self) -> bool:
        """False: all is at hand, and `expect` does nothing."""
        ...

    def expect(self, sequences: Ints, /) -> None: ...


class Transform(Protocol):
    """A last change to each micro-batch, such as noise on its inputs or cutting off common padding.

    Pure: it may draw only on its settings and the batch's `positions`. It keeps every row's sum of weights, because
    `step_count` is known before the batch is built; and document numbers, because `locate` reports by them.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Entries for the stream's identity: what changes the tokens. Empty when nothing does."""
        ...

    def __call__(self, batch: Batch, /) -> Batch: ...


def token_arrays(rows: int, length: int) -> tuple[Ints, Ints]:
    """Two uninitialised (rows, length) arrays for tokens and targets."""
    return np.empty((rows, length), np.int64), np.empty((rows, length), np.int64)


_WINDOW_TOKENS = 1 << 15


def sequence_count(tokens: int, sequence_length: int) -> int:
    """How many sequences a store of so many tokens holds; the last token is only ever a target."""
    return max(0, tokens - 1) // sequence_length


class ConcatRows:
    """The windows of a store."""

    packing = "concat"

    def __init__(self, store: TokenSource, length: int) -> None:
        self.store, self.length = store, length
        self.count = sequence_count(store.tokens, length)
        self.fingerprint = store.fingerprint
        self._arrays = Arrays()

    @property
    def full(self) -> bool:
        return not self.store.masked

    @property
    def far(self) -> bool:
        return bool(getattr(self.store, "far", False))

    def spans(self, sequences: Ints) -> Spans:
        """Reads the documents' starts; their tokens stay where they are."""
        spans = self._spans(sequences)
        if not self.store.masked:
            return spans
        first = sequences * self.length + 1
        begin = first[spans.row] + spans.column
        kept = self.store.kept_before(np.concatenate([begin, begin + spans.length]))
        return replace(spans, weight=kept[begin.size :] - kept[: begin.size])

    def assemble(self, sequences: Ints) -> RowBlock:
        starts = sequences * self.length
        weights = self.store.weights(starts + 1, self.length) if self.store.masked else None
        tokens, targets = self._arrays.take((sequences.size, self.length), np.int64, np.int64)
        step = max(1, _WINDOW_TOKENS // self.length)
        for row in range(0, sequences.size, step):  # windows that stay in the processor's cache
            window = self.store.gather(starts[row : row + step], self.length + 1)
            tokens[row : row + step], targets[row : row + step] = window[:, :-1], window[:, 1:]
        return RowBlock(tokens, targets, weights, self._spans(sequences))

    def origin_of_document(self, document: int) -> Origin:
        return self.store.origin_of_document(document)

    def expect(self, sequences: Ints) -> None:
        """Tells a store whose shards lie afar what will be read soon."""
        if self.far:
            self.store.expect(sequences * self.length, np.full_like(sequences, self.length + 1))  # type: ignore[attr-defined]

    def _spans(self, sequences: Ints) -> Spans:
        """As if every target had weight 1."""
        length = self.length
        targets = sequences * length + 1
        first, more, inner = self.store.documents_in(targets, np.full_like(targets, length))
        leads = np.cumsum(more + 1) - (more + 1)  # the span that each row begins with
        total = inner.size + sequences.size
        row = np.repeat(np.arange(sequences.size), more + 1)
        begins = np.ones(total, np.bool_)
        begins[leads] = False
        column = np.zeros(total, np.int64)
        column[begins] = inner - np.repeat(targets, more)
        span_length = np.diff(row * length + column, append=sequences.size * length)
        document = np.arange(total) + np.repeat(first - leads, more + 1)
        return Spans(row, column, span_length, document, span_length)


if TYPE_CHECKING:
    from bessemer.data.store.token_store import Origin, TokenSource
    from bessemer.data.stream.batches import Batch

Side = Literal["right", "left"]
Flags = npt.NDArray[np.bool_]

# Rows of one length bucket that follow each other: as many as a usual micro-batch. Longer runs pad no less, and make
# the steps less alike.
RUN_ROWS = 32
_DOCUMENTS = 1 << 20  # looked at together when rows are counted


def pad_rows(
    rows: Sequence[npt.ArrayLike],
    length: int | None = None,
    multiple_of: int = 1,
    side: Side = "right",
    value: float = 0,
) -> tuple[npt.NDArray[Any], Flags]:
    """Arrays of different lengths in one: (array, which cells are real). Of the type of the first row.

    As wide as `length`, or as the longest row, rounded up to a multiple; a row longer than `length` loses its end.
    """
    arrays = [np.asarray(row)[:length] for row in rows]
    lengths = np.array([array.size for array in arrays], dtype=np.int64)
    width = -(-int(lengths.max(initial=0) if length is None else length) // multiple_of) * multiple_of
    inside = _inside(lengths, width, side)
    padded = np.full(inside.shape, value, dtype=arrays[0].dtype if arrays else np.int64)
    if arrays:
        padded[inside] = np.concatenate(arrays)
    return padded, inside


def _inside(lengths: Ints, width: int, side: Side) -> Flags:
    """Which cells of so many columns are real."""
    columns = np.arange(width)
    return columns < lengths[:, None] if side == "right" else columns >= width - lengths[:, None]


class PadRows:
    """Every document of a store in a row of its own, the end-of-document token before it as the first input.

    A document longer than `length` is split into rows that follow each other, or truncated to one. Memory grows with
    the number of long documents only.
    """

    full = False

    def __init__(
        self, store: TokenSource, length: int, long: Literal["split", "truncate"] = "split", side: Side = "right"
    ) -> None:
        self.store, self.length, self.long, self.side = store, length, long, side
        self.fingerprint = store.fingerprint
        self.packing = f"pad, {long}, {side}"
        self._split, extra = _long_documents(store, length) if long == "split" else (np.empty(0, np.int64),) * 2
        self._more = np.cumsum(extra)  # rows beyond one each, up to and with each long document
        self._first = self._split + self._more - extra  # the row that each long document begins with
        self.count = store.documents + int(extra.sum())

    def row_lengths(self, sequences: Ints) -> Ints:
        """Columns of each row that are not padding: the measure of length buckets."""
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
        weight[:, real] = self.store.kept_before(stop) - self.store.kept_before(begin)
        column = np.zeros((n, 2), np.int64)
        column[:, 1] = cells[:, 0]
        some = cells.ravel() > 0
        return Spans(row[some], column.ravel()[some], cells.ravel()[some], owner.ravel()[some], weight.ravel()[some])

    def assemble(self, sequences: Ints) -> RowBlock:
        _, begin, stop = self._extents(sequences)
        lengths, n = stop - begin, sequences.size
        first = np.zeros_like(begin) if self.side == "right" else self.length - lengths
        cells = np.arange(n) * self.length + first
        tokens, targets = token_arrays(n, self.length)
        targets.fill(0)
        self.store.copy_runs(begin, lengths, targets.reshape(-1), cells)
        # An input is the target before it; the first is what stands before the row in the store.
        tokens[:, 1:] = targets[:, :-1]
        tokens[~_inside(lengths, self.length, self.side)] = 0
        tokens.reshape(-1)[cells] = self._openers(begin)
        weights = None
        if self.store.masked:
            weights = np.zeros(targets.shape, np.float32)
            self.store.copy_weights(begin, lengths, weights.reshape(-1), cells)
        return RowBlock(tokens, targets, weights, self.spans(sequences))

    def origin_of_document(self, document: int) -> Origin:
        return self.store.origin_of_document(document)

    @property
    def far(self) -> bool:
        return bool(getattr(self.store, "far", False))

    def expect(self, sequences: Ints) -> None:
        """Tells a store whose shards lie afar what will be read soon."""
        if self.far:
            _, begin, stop = self._extents(sequences)
            self.store.expect(np.maximum(begin - 1, 0), stop - begin + 1)  # type: ignore[attr-defined]

    def _extents(self, sequences: Ints) -> tuple[Ints, Ints, Ints]:
        """(document, first token, token behind the last) of each row."""
        long = np.searchsorted(self._first, sequences, side="right") - 1
        known = long >= 0
        at = np.maximum(long, 0)
        piece = np.zeros_like(sequences)
        document = sequences.copy()
        if self._first.size:
            begun = sequences - self._first[at]
            rows = self._more[at] - np.where(at > 0, self._more[at - 1], 0) + 1
            inside = known & (begun < rows)
            piece = np.where(inside, begun, 0)
            document = np.where(inside, self._split[at], np.where(known, sequences - self._more[at], sequences))
        start, stop = self.store.extents(document)
        begin = start + piece * self.length
        return document, begin, np.minimum(begin + self.length, stop)

    def _openers(self, begin: Ints) -> Ints:
        """The token before each place; before the store's first document an end of document, as before any other."""
        before = np.where(begin > 0, begin, self.store.tokens) - 1
        return self.store.gather(before, 1)[:, 0].astype(np.int64)


def _long_documents(store: TokenSource, length: int) -> tuple[Ints, Ints]:
    """The documents that fill more than one row, and how many rows more."""
    found, extra = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(0, store.documents, _DOCUMENTS):
        stop = min(first + _DOCUMENTS, store.documents)
        more = (np.diff(store.edges(first, stop)) - 1) // length
        at = np.flatnonzero(more)
        found.append(first + at)
        extra.append(more[at])
    return np.concatenate(found), np.concatenate(extra)


class Trim:
    """A `Transform` that cuts off the columns which are padding in every row of the micro-batch.

    At the right these are the columns behind the last target that counts. At the left, those before any document:
    there a row's padding has a document number of its own. What counts is unchanged, so the stream's identity is too.
    """

    def __init__(self, multiple_of: int = 1, side: Side = "right") -> None:
        self.multiple_of, self.side = multiple_of, side

    @property
    def identity(self) -> dict[str, Any]:
        return {}

    def __call__(self, batch: Batch) -> Batch:
        width = batch.tokens.shape[1]
        unused = self._behind(batch) if self.side == "right" else self._before(batch)
        kept = min(width, max(1, -(-(width - unused) // self.multiple_of)) * self.multiple_of)
        columns = slice(0, kept) if self.side == "right" else slice(width - kept, width)
        cut = {name: getattr(batch, name)[:, columns] for name in ("tokens", "targets", "weights", "documents")}
        return dataclasses.replace(batch, **{name: np.ascontiguousarray(array) for name, array in cut.items()})

    def _behind(self, batch: Batch) -> int:
        counted = np.flatnonzero(batch.weights.any(axis=0))
        return batch.weights.shape[1] - (int(counted[-1]) + 1 if counted.size else 0)

    def _before(self, batch: Batch) -> int:
        leading = batch.documents == 0
        padded = (batch.documents[:, -1] > 0) & ~(leading & (batch.weights > 0)).any(axis=1)
        unused = np.where(padded, leading.sum(axis=1), 0)
        unused[batch.positions < 0] = batch.tokens.shape[1]
        return int(unused.min(initial=batch.tokens.shape[1]))


def padding_share(lengths: Ints, micro_rows: int, width: int, multiple_of: int, to: str = "longest") -> float:
    """The share of columns that are padding when rows of these lengths come in this order: what the plan reports.

    `lengths` are of the rows in the order they are read, such as `rows.row_lengths(order.resolve(...)[1])`; a few
    thousand suffice. Rows that do not fill a last micro-batch are left out, unless they are all there are.
    """
    whole = lengths.size // micro_rows * micro_rows or lengths.size
    if not whole:
        return 0.0
    batches = lengths[:whole].reshape(-1, min(micro_rows, whole))
    widest = np.full(batches.shape[0], width)
    if to == "longest":
        widest = np.minimum(-(-batches.max(axis=1) // multiple_of) * multiple_of, width)
    return float(1 - batches.sum() / (widest.sum() * batches.shape[1]))
