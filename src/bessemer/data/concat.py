"""Rows cut from a store as it lies: documents one after another, T tokens at a time, nothing lost and nothing padded.

Row i covers tokens [i*T, i*T + T] of the store, both ends included: T inputs and, each one further on, T targets.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bessemer.data.arrays import Arrays
from bessemer.data.rows import Block, Ints, Spans
from bessemer.data.store import Origin, Tokens

_WINDOW_TOKENS = 1 << 15


def sequence_count(tokens: int, sequence_length: int) -> int:
    """How many sequences a store of so many tokens holds; the last token is only ever a target."""
    return max(0, tokens - 1) // sequence_length


class ConcatRows:
    """The windows of a store."""

    packing = "concat"

    def __init__(self, store: Tokens, length: int) -> None:
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

    def assemble(self, sequences: Ints) -> Block:
        starts = sequences * self.length
        weights = self.store.weights(starts + 1, self.length) if self.store.masked else None
        tokens, targets = self._arrays.take((sequences.size, self.length), np.int64, np.int64)
        step = max(1, _WINDOW_TOKENS // self.length)
        for row in range(0, sequences.size, step):  # windows that stay in the processor's cache
            window = self.store.gather(starts[row : row + step], self.length + 1)
            tokens[row : row + step], targets[row : row + step] = window[:, :-1], window[:, 1:]
        return Block(tokens, targets, weights, self._spans(sequences))

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
