"""Rows of groups: documents that belong together, such as the answers to one prompt, share a row.

A row is the smallest part of a step, so a group is never divided between micro-batches or ranks. Its documents are
consecutive in the store and have the same number in the field `group`. Attention stays inside each of them, or, with
`share`, their common beginning (the prompt) is in the row once and each continues it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.store.shard import run_indices
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.packing import best_fit
from bessemer.data.stream.rows import PADDING, Ints, RowBlock, Spans, StoreRows
from bessemer.errors import UserError

GROUP = "group"
REFERENCE_LOGP = "reference_logp"  # field: the reference's log-probability of each document's answer
SHARED = "shared"  # field: 1 in the columns of a beginning that is in the row once
_DOCUMENTS = 1 << 20  # read together
_COMPARED = 1 << 12  # groups whose beginnings are compared together


@dataclass(frozen=True)
class GroupSizes:
    """The groups of a store: their first documents (and the end), the tokens of their common beginnings, and the
    columns that each takes."""

    first: Ints
    common: Ints
    columns: Ints

    def place(self, store: TokenStore, group: int) -> str:
        origin = store.origin_of_document(int(self.first[group]))
        return f"{origin.file}:{origin.row}"


def measure_groups(store: TokenStore, share: bool = False, single: bool = False) -> GroupSizes:
    """Finds the groups; with `single`, every document is one. `share` reads the tokens to find common beginnings."""
    first = np.arange(store.documents + 1) if single else _group_starts(store)
    common = _common_beginnings(store, first) if share else np.zeros(first.size - 1, np.int64)
    starts, stops = _extents(store, first)
    return GroupSizes(first, common, stops - starts - common * (np.diff(first) - 1))


class GroupRows(StoreRows):
    """One group in each row, padded on the right; with `pack` as many as fit. A group that exceeds the row is refused
    by its file and row."""

    full = False

    def __init__(
        self, store: TokenStore, length: int, share: bool = False, single: bool = False, pack: bool = False
    ) -> None:
        super().__init__(store, length)
        self.reference: npt.NDArray[np.float32] | None = None  # log-probability of each document's answer
        self.share, groups = share, measure_groups(store, share, single)
        self._first, self._common = groups.first, groups.common
        _refuse_long(store, groups, length)
        self._groups, self._rows = np.arange(groups.columns.size), np.arange(groups.columns.size + 1)
        self.packing = "groups"  # the same with `share`: rows and their order do not change
        if pack:
            self.packing = "groups, shared, best fit" if share else "groups, best fit"
            order, bins = best_fit(groups.columns, length)
            self._groups = order[np.argsort(bins, kind="stable")]
            self._rows = np.append(0, np.cumsum(np.bincount(bins))).astype(np.int64)
        self.count = self._rows.size - 1
        self.used = float(groups.columns.sum() / max(1, self.count * length))  # share of the columns

    def spans(self, sequences: Ints) -> Spans:
        row, document, begin, size, column = self._pieces(sequences)
        end = np.zeros(sequences.size, np.int64)
        np.add.at(end, row, size)
        weight = self.store.targets_before(begin + size) - self.store.targets_before(begin)
        padded = np.flatnonzero(end < self.length)
        nothing = np.zeros_like(padded)
        order = np.argsort(np.concatenate([row, padded]), kind="stable")  # padding comes after a row's documents
        columns = (
            (row, padded), (column, end[padded]), (size, self.length - end[padded]), (document, nothing + PADDING),
            (weight, nothing), (begin, nothing),
        )  # fmt: skip
        return Spans(*(np.concatenate(pair)[order] for pair in columns))

    def assemble(self, sequences: Ints) -> RowBlock:
        row, _, begin, size, column = self._pieces(sequences)
        shape, cells = (sequences.size, self.length), row * self.length + column
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.store.copy_runs(begin, size, targets.reshape(-1), cells)
        tokens[:, 1:] = targets[:, :-1]
        tokens.reshape(-1)[(cells + size)[column + size < self.length]] = 0  # begins the next document, or padding
        # The input of a first column is the token before it: the end of the document before, or the shared beginning's.
        before = np.where(begin > 0, begin, self.store.tokens) - 1
        tokens.reshape(-1)[cells] = self.store.gather(before, 1)[:, 0]
        weights = None
        if self.store.masked:
            weights = np.zeros(shape, np.float32)
            self.store.copy_weights(begin, size, weights.reshape(-1), cells)
        return RowBlock(tokens, targets, weights, self.spans(sequences))

    def fields(self, spans: Spans, rows: int) -> dict[str, npt.NDArray[Any]]:
        made, real = super().fields(spans, rows), np.flatnonzero(spans.document != PADDING)
        if self.reference is not None:
            width = int(spans.number[real].max(initial=0)) + 1
            values = made[REFERENCE_LOGP] = np.zeros((rows, width, 1), np.float32)
            values[spans.row[real], spans.number[real], 0] = self.reference[spans.document[real]]
        if self.share:
            group = np.searchsorted(self._first, spans.document[real], side="right") - 1
            length = np.where(self._first[group] == spans.document[real], self._common[group], 0)
            shared = made[SHARED] = np.zeros((rows, self.length), np.int32)
            shared.reshape(-1)[run_indices(spans.row[real] * self.length + spans.column[real], length)] = 1
        return made

    def _token_runs(self, sequences: Ints) -> tuple[Ints, Ints]:
        _, _, begin, size, _ = self._pieces(sequences)
        return np.maximum(begin - 1, 0), size + 1

    def _pieces(self, sequences: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """(row, document, first token, tokens, first column) of every document in the rows, in order."""
        counts = self._rows[sequences + 1] - self._rows[sequences]
        group = self._groups[run_indices(self._rows[sequences], counts)]
        members = self._first[group + 1] - self._first[group]
        document = run_indices(self._first[group], members)
        row = np.repeat(np.repeat(np.arange(sequences.size), counts), members)
        start, stop = self.store.extents(document)
        later = document != np.repeat(self._first[group], members)
        begin = start + np.repeat(self._common[group], members) * later
        size = stop - begin
        ends = np.cumsum(size)
        leads = np.searchsorted(row, np.arange(sequences.size))  # the first piece of each row
        return row, document, begin, size, ends - size - (ends - size)[leads][row]


def _group_starts(store: TokenStore) -> Ints:
    numbers = [
        store.document_field(GROUP, np.arange(first, min(first + _DOCUMENTS, store.documents)))[:, 0]
        for first in range(0, store.documents, _DOCUMENTS)
    ]
    group = np.concatenate([*numbers, np.empty(0, np.int64)])
    begins = np.flatnonzero(np.diff(group, prepend=group[:1] - 1 if group.size else 0))
    return np.append(begins, store.documents).astype(np.int64)


def _extents(store: TokenStore, first: Ints) -> tuple[Ints, Ints]:
    """The tokens of each group, as [begin, end)."""
    if first.size < 2:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return store.extents(first[:-1])[0], store.extents(first[1:] - 1)[1]


def _common_beginnings(store: TokenStore, first: Ints) -> Ints:
    """How many tokens all documents of a group begin with, up to the first that is trained in any of them. One token
    of each document is left."""
    common = np.zeros(first.size - 1, np.int64)
    for begin in range(0, common.size, _COMPARED):
        some = slice(begin, begin + _COMPARED)
        heads, ends = first[:-1][some], first[1:][some]
        members = (ends - heads).max(initial=1)
        starts, stops = store.extents(heads)
        length = (stops - starts - 1) * (ends - heads > 1)
        for member in range(1, int(members)):
            has = np.flatnonzero(ends - heads > member)
            other, stop = store.extents(heads[has] + member)
            length[has] = _first_difference(store, starts[has], other, np.minimum(length[has], stop - other - 1))
        common[some] = length
    return common


def _first_difference(store: TokenStore, left: Ints, right: Ints, length: Ints) -> Ints:
    """The tokens that two runs begin with, at most `length`, before one is trained in either."""
    ends = np.cumsum(length)
    at, total = ends - length, int(ends[-1]) if ends.size else 0
    tokens = [np.empty(total, np.int64) for _ in range(2)]
    stop = np.zeros(total, np.bool_)
    for starts, out in zip((left, right), tokens, strict=True):
        store.copy_runs(starts, length, out, at)
        if store.masked:
            weights = np.zeros(total, np.float32)
            store.copy_weights(starts, length, weights, at)
            stop |= weights > 0
        else:
            stop[:] = True
    stops = np.append(np.flatnonzero(stop | (tokens[0] != tokens[1])), total)
    return np.minimum(stops[np.searchsorted(stops, at)] - at, length)


def _refuse_long(store: TokenStore, groups: GroupSizes, length: int) -> None:
    too_long = np.flatnonzero(groups.columns > length)
    if too_long.size:
        problem = f"the {groups.columns[too_long[0]]} tokens of its group exceed data.context {length}"
        more = f" (so do {too_long.size - 1:,} others)" if too_long.size > 1 else ""
        fix = f"raise it to {groups.columns.max()}, or shorten the row"
        raise UserError(f"{groups.place(store, int(too_long[0]))}: {problem}{more}: {fix}")
