"""Rows of groups: documents that belong together, such as the answers to one prompt, share a row.

A row is the smallest part of a step, so a group is never divided between micro-batches or ranks. Its documents are
consecutive in the store and have the same number in the field `group`. Attention stays inside each of them.
"""

from __future__ import annotations

import numpy as np

from bessemer.data.store.shard import run_indices
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.rows import PADDING, Ints, RowBlock, Spans, StoreRows
from bessemer.errors import UserError

GROUP = "group"
_DOCUMENTS = 1 << 20  # read together


class GroupRows(StoreRows):
    """One group in each row, padded on the right. A group that exceeds the row is refused by its file and row."""

    packing, full = "groups", False

    def __init__(self, store: TokenStore, length: int) -> None:
        super().__init__(store, length)
        numbers = [
            store.document_field(GROUP, np.arange(first, min(first + _DOCUMENTS, store.documents)))[:, 0]
            for first in range(0, store.documents, _DOCUMENTS)
        ]
        group = np.concatenate([*numbers, np.empty(0, np.int64)])
        begins = np.flatnonzero(np.diff(group, prepend=group[:1] - 1 if group.size else 0))
        self._first: Ints = np.append(begins, store.documents).astype(np.int64)  # document of each group, and the end
        self.count = begins.size
        self._check_lengths()

    def spans(self, sequences: Ints) -> Spans:
        counts = self._first[sequences + 1] - self._first[sequences]
        document = run_indices(self._first[sequences], counts)
        start, stop = self.store.extents(document)
        row = np.repeat(np.arange(sequences.size), counts)
        begin, end = self._extents(sequences)
        weight = self.store.targets_before(stop) - self.store.targets_before(start)
        padded = np.flatnonzero(end - begin < self.length)
        size = (end - begin)[padded]
        nothing = np.zeros_like(padded)
        order = np.argsort(np.concatenate([row, padded]), kind="stable")  # padding comes after a row's documents
        columns = (
            (row, padded), (start - begin[row], size), (stop - start, self.length - size),
            (document, nothing + PADDING), (weight, nothing),
        )  # fmt: skip
        return Spans(*(np.concatenate(pair)[order] for pair in columns))

    def assemble(self, sequences: Ints) -> RowBlock:
        begin, end = self._extents(sequences)
        lengths, shape = end - begin, (sequences.size, self.length)
        cells = np.arange(sequences.size) * self.length
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.store.copy_runs(begin, lengths, targets.reshape(-1), cells)
        tokens[:, 1:] = targets[:, :-1]
        tokens[np.arange(self.length) >= lengths[:, None]] = 0
        before = np.where(begin > 0, begin, self.store.tokens) - 1  # before the first document, the last one's end
        tokens[:, 0] = self.store.gather(before, 1)[:, 0]
        weights = None
        if self.store.masked:
            weights = np.zeros(shape, np.float32)
            self.store.copy_weights(begin, lengths, weights.reshape(-1), cells)
        return RowBlock(tokens, targets, weights, self.spans(sequences))

    def _token_runs(self, sequences: Ints) -> tuple[Ints, Ints]:
        begin, end = self._extents(sequences)
        return np.maximum(begin - 1, 0), end - begin + 1

    def _extents(self, sequences: Ints) -> tuple[Ints, Ints]:
        """The tokens of each group, as [begin, end)."""
        begin, _ = self.store.extents(self._first[sequences])
        _, end = self.store.extents(self._first[sequences + 1] - 1)
        return begin, end

    def _check_lengths(self) -> None:
        for first in range(0, self.count, _DOCUMENTS):
            sequences = np.arange(first, min(first + _DOCUMENTS, self.count))
            begin, end = self._extents(sequences)
            if (too_long := np.flatnonzero(end - begin > self.length)).size:
                at = too_long[0]
                origin = self.store.origin_of_document(int(self._first[sequences[at]]))
                place, size = f"{origin.file}:{origin.row}", int(end[at] - begin[at])
                problem = f"the {size} tokens of its group exceed data.context {self.length}"
                raise UserError(f"{place}: {problem}: raise it, or shorten the row")
