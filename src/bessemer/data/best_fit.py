"""Rows of whole documents, packed by best fit: the row source over a `PackIndex`."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from bessemer.data.arrays import Arrays
from bessemer.data.pack import PackIndex, Pieces, pack
from bessemer.data.rows import PADDING, Block, Ints, Spans
from bessemer.data.store import Origin, Tokens, run_indices


def best_fit_rows(store: Tokens, length: int, prefix: str | Path) -> BestFitRows:
    """The store's rows of `length`; the packing is read from the files with this prefix, or computed into them."""
    return BestFitRows(store, pack(store, length, prefix))


class BestFitRows:
    """Every token of the store is a target exactly once, in the row of its document, and inputs never cross documents.

    As when rows are cut from the store as it lies, the input before a document's first token is the end-of-document
    token (which stands before it in the store, and at the store's end). The input before a later piece of a document
    that was cut is its true predecessor. Space left at the end of a row is padding.
    """

    packing = "best_fit"

    def __init__(self, store: Tokens, index: PackIndex) -> None:
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

    def assemble(self, sequences: Ints) -> Block:
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
        return Block(tokens, targets, weights, spans)

    def origin_of_document(self, document: int) -> Origin:
        return self.store.origin_of_document(document)

    def expect(self, sequences: Ints) -> None:
        """Tells a store whose shards lie afar what will be read soon."""
        if self.far:
            pieces = self.index.pieces(sequences)
            real = pieces.document != PADDING
            self.store.expect(pieces.place[real], pieces.length[real])  # type: ignore[attr-defined]

    def _spans(self, pieces: Pieces) -> Spans:
        """As if every target had weight 1."""
        row = np.repeat(np.arange(pieces.counts.size), pieces.counts)
        column = np.cumsum(pieces.length) - pieces.length - row * self.length
        weight = pieces.length * (pieces.document != PADDING) if self.index.about.padding else pieces.length
        return Spans(row, column, pieces.length, pieces.document, weight)

    @cached_property
    def _end_of_document(self) -> int:
        return int(self.store.gather(np.array([self.store.tokens - 1]), 1)[0, 0])
