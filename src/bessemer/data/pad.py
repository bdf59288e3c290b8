"""Rows of one document each, padded: for fine-tuning, where documents must not share a row.

`PadRows` gives rows of the full context; `Trim` then cuts every micro-batch to its longest row. With a ranking by
`row_lengths` (see `curriculum.rank_rows`, `run=RUN_ROWS`) neighbours are of like length and little padding is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bessemer.data.rows import PADDING, Block, Ints, Spans, token_arrays

if TYPE_CHECKING:
    from bessemer.data.store import Origin, Tokens
    from bessemer.data.stream import Batch

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
        self, store: Tokens, length: int, long: Literal["split", "truncate"] = "split", side: Side = "right"
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

    def assemble(self, sequences: Ints) -> Block:
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
        return Block(tokens, targets, weights, self.spans(sequences))

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


def _long_documents(store: Tokens, length: int) -> tuple[Ints, Ints]:
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
