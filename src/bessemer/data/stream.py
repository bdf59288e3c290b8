"""Batches as a pure function of (stream, segments, step): no iterator state, so any step replays alone.

`Steps` turns a step into a range of positions, `Order` a position into a sequence of a source, and the token
stores the sequence into tokens. Shapes: R rows of T tokens. Sequence i of a source covers its tokens
[i*T, i*T + T], both ends included: T inputs and, each one further on, T targets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.data.order import Ints, Order
from bessemer.data.steps import Steps

if TYPE_CHECKING:
    from bessemer.data.store import Origin

_FORMAT = 1  # raise it when the same inputs give another stream
_CHUNK = 4096  # positions resolved together
_CHUNKS_KEPT = 8


class Tokens(Protocol):
    """What the stream needs of a token store; `document_of` never decreases with the token's position."""

    @property
    def tokens(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def starts(self) -> npt.NDArray[np.integer]: ...  # of each document, in tokens
    def gather(self, starts: Ints, length: int, /) -> npt.NDArray[np.integer]: ...
    def document_of(self, positions: Ints, /) -> Ints: ...
    def origin(self, position: int, /) -> Origin: ...


def sequence_count(tokens: int, sequence_length: int) -> int:
    """How many sequences a store of so many tokens holds; the last token is only ever a target."""
    return max(0, tokens - 1) // sequence_length


@dataclass
class Batch:
    """One micro-batch. A column belongs to the document of its target: as an input, an EOS opens the next."""

    tokens: npt.NDArray[np.int64]  # (R, T) inputs
    targets: npt.NDArray[np.int64]  # (R, T)
    weights: npt.NDArray[np.float32]  # (R, T) of the targets: 0 for padding and banned documents
    documents: npt.NDArray[np.int32]  # (R, T) number of the target's document within its row: 0, 1, 2, ...
    positions: Ints  # (R,) in the stream; -1 for a padding row, here and below
    sources: Ints  # (R,) index into the stream's names
    starts: Ints  # (R,) the first input's place in the source's store

    @property
    def single_document(self) -> bool:
        """No row has a boundary inside, so plain causal attention is enough."""
        return not self.documents[:, -1].any()

    @property
    def count(self) -> float:
        return float(self.weights.sum(dtype=np.float64))

    def part(self, start: int, stop: int) -> Batch:
        """Rows [start, stop), as views."""
        return Batch(**{name: array[start:stop] for name, array in vars(self).items()})


@dataclass(frozen=True)
class DocumentShare:
    """A document's part in a step: its target tokens (banned or not) and the positions they lie in."""

    source: str
    file: str
    row: int
    document_id: str
    tokens: int
    rows: list[int]
    document: int  # index in the source's store; (source, document) is what can be banned


@dataclass(frozen=True)
class _Spans:
    """The runs of columns of one document each, by row and column; together they cover every row."""

    row: Ints
    column: Ints
    length: Ints

    @cached_property
    def number(self) -> Ints:
        """Each span's number within its row."""
        return np.arange(self.row.size) - np.searchsorted(self.row, self.row)


class BatchStream:
    """Any step's batch on any rank: pure, and the global batch is the same for every world size.

    `banned` holds (source, document index) pairs whose targets weigh nothing; positions never shift. A stream
    never changes: after a rollback make another with `replace`.
    """

    def __init__(
        self,
        stores: Mapping[str, Tokens],
        order: Order,
        sequence_length: int,
        steps: Steps,
        banned: Collection[tuple[str, int]] = frozenset(),
    ) -> None:
        self.names, self.order, self.steps, self.banned = order.names, order, steps, frozenset(banned)
        self.sequence_length = sequence_length
        self.stores = {name: stores[name] for name in self.names}
        for name, store in self.stores.items():
            if order.lengths[name] != sequence_count(store.tokens, sequence_length):
                raise ValueError(f"the order has {order.lengths[name]} sequences of {name!r}, its store not")
        self._banned = [np.array([d for s, d in self.banned if s == name], np.int64) for name in self.names]
        self._chunk = lru_cache(_CHUNKS_KEPT)(lambda k: order.resolve(k * _CHUNK + np.arange(_CHUNK))[:2])
        self.identity = self._identity()
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def replace(
        self, steps: Steps | None = None, banned: Collection[tuple[str, int]] | None = None
    ) -> BatchStream:
        """The same stream, with the same fingerprint, under other steps or bans."""
        steps, banned = steps or self.steps, self.banned if banned is None else banned
        return BatchStream(self.stores, self.order, self.sequence_length, steps, banned)

    def rows(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Ints:
        """The positions that the rank reads: equally many on every rank, -1 where there are none left."""
        if not 0 <= dp_rank < dp_world:
            raise ValueError(f"rank {dp_rank} is outside a world of {dp_world}")
        start, stop = self.steps.range(step)
        share = -(-(stop - start) // dp_world)
        positions = start + dp_rank * share + np.arange(share)
        return np.where(positions < stop, positions, -1)

    def batch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Batch:
        """All the rank's rows in one batch."""
        return self._assemble(self.rows(step, dp_rank, dp_world))

    def micro_batches(self, step: int, micro_rows: int, dp_rank: int = 0, dp_world: int = 1) -> list[Batch]:
        """The rank's rows in batches of exactly `micro_rows`, as many on every rank; the last is padded."""
        positions = self.rows(step, dp_rank, dp_world)
        padding = -positions.size % micro_rows
        whole = self._assemble(np.concatenate([positions, np.full(padding, -1)]))
        return [whole.part(row, row + micro_rows) for row in range(0, positions.size, micro_rows)]

    def step_count(self, step: int) -> float:
        """The sum of the step's target weights over all ranks; reads no tokens."""
        total = self.steps.rows(step) * self.sequence_length
        if not self.banned:
            return float(total)
        sources, starts = self._resolve(self.rows(step))
        spans = self._spans(sources, starts)
        return float(total - spans.length[self._is_banned(spans, sources, starts)].sum())

    def origins(self, step: int) -> list[DocumentShare]:
        """The documents in a step, those with most target tokens first."""
        positions = self.rows(step)
        sources, starts = self._resolve(positions)
        spans = self._spans(sources, starts)
        source, document = sources[spans.row], self._documents(spans, sources, starts)
        grouped = np.lexsort((document, source))
        new = (np.diff(document[grouped]) != 0) | (np.diff(source[grouped]) != 0)
        shares = []
        for group in np.split(grouped, np.flatnonzero(new) + 1):
            origin = self._origin(spans, group[0], sources, starts)
            shares.append(
                DocumentShare(
                    source=self.names[source[group[0]]],
                    file=origin.file,
                    row=origin.row,
                    document_id=origin.document_id,
                    tokens=int(spans.length[group].sum()),
                    rows=positions[spans.row[group]].tolist(),
                    document=int(document[group[0]]),
                )
            )
        return sorted(shares, key=lambda share: -share.tokens)

    def locate(self, batch: Batch) -> list[tuple[int, int, Origin]]:
        """(row of the batch, document number in it, origin) for every document of every real row."""
        spans = self._spans(batch.sources, batch.starts)
        real = np.flatnonzero(batch.sources[spans.row] >= 0).tolist()
        return [
            (int(spans.row[k]), int(spans.number[k]), self._origin(spans, k, batch.sources, batch.starts))
            for k in real
        ]

    def _assemble(self, positions: Ints) -> Batch:
        shape = positions.size, self.sequence_length
        sources, starts = self._resolve(positions)
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for store, at in self._by_source(sources):
            window = store.gather(starts[at], self.sequence_length + 1)
            tokens[at], targets[at] = window[:, :-1], window[:, 1:]
        weights = np.ones(shape, np.float32)
        weights[positions < 0] = 0
        spans = self._spans(sources, starts)
        if self.banned:
            weights[np.repeat(self._is_banned(spans, sources, starts), spans.length).reshape(shape)] = 0
        documents = np.repeat(spans.number.astype(np.int32), spans.length).reshape(shape)
        return Batch(tokens, targets, weights, documents, positions, sources, starts)

    def _resolve(self, positions: Ints) -> tuple[Ints, Ints]:
        """(source, first token) of each position, -1 for padding."""
        sources, starts = np.full_like(positions, -1), np.full_like(positions, -1)
        number, offset = np.divmod(positions, _CHUNK)
        for k in np.unique(number[positions >= 0]).tolist():
            here = number == k
            source, sequence = self._chunk(k)
            sources[here], starts[here] = source[offset[here]], sequence[offset[here]] * self.sequence_length
        return sources, starts

    def _by_source(self, sources: Ints) -> Iterator[tuple[Tokens, Ints]]:
        for k in np.unique(sources[sources >= 0]).tolist():
            yield self.stores[self.names[k]], np.flatnonzero(sources == k)

    def _spans(self, sources: Ints, starts: Ints) -> _Spans:
        """Documents are told apart at their targets."""
        length = self.sequence_length
        edges = [np.arange(sources.size) * length]
        for store, at in self._by_source(sources):
            first, last = store.document_of(starts[at] + 1), store.document_of(starts[at] + length)
            row = np.repeat(at, last - first)
            begun = np.cumsum(last - first) - (last - first)
            wanted = np.repeat(first - begun, last - first) + np.arange(row.size) + 1
            edges.append(row * length + store.starts[wanted] - starts[row] - 1)
        cells = np.unique(np.concatenate(edges))  # an empty document shares its boundary with the next
        return _Spans(cells // length, cells % length, np.diff(cells, append=sources.size * length))

    def _documents(self, spans: _Spans, sources: Ints, starts: Ints) -> Ints:
        """Each span's document index in its store; -1 for padding."""
        documents = np.full_like(spans.row, -1)
        places = starts[spans.row] + 1 + spans.column
        for store, at in self._by_source(sources[spans.row]):
            documents[at] = store.document_of(places[at])
        return documents

    def _is_banned(self, spans: _Spans, sources: Ints, starts: Ints) -> npt.NDArray[np.bool_]:
        documents, source = self._documents(spans, sources, starts), sources[spans.row]
        found = np.zeros(documents.shape, np.bool_)
        for k, banned in enumerate(self._banned):
            if banned.size:
                found |= (source == k) & np.isin(documents, banned)
        return found

    def _origin(self, spans: _Spans, span: int, sources: Ints, starts: Ints) -> Origin:
        row = spans.row[span]
        return self.stores[self.names[sources[row]]].origin(int(starts[row] + 1 + spans.column[span]))

    def _identity(self) -> dict[str, Any]:
        """What decides the tokens at a position, and nothing else: not batch size, steps or bans."""
        return {
            "format": _FORMAT,
            "packing": "concat",
            "sequence_length": self.sequence_length,
            "seed": self.order.seed,
            "sources": {name: store.fingerprint for name, store in self.stores.items()},
            "phases": [
                [phase.start, dict(zip(phase.mixture.names, phase.mixture.counts, strict=True))]
                for phase in self.order.phases
            ],
        }
