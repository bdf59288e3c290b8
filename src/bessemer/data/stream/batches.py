"""Batches as a pure function of (stream, segments, step): there is no iterator state, so any step can be replayed.

`StepPositions` maps a step to a range of positions, `StreamOrder` a position to a row of a source, and the source's
`Rows` the row to tokens. `Prefetch` assembles the next steps in threads. Shapes: R rows of T tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from bessemer.data.store.shard import Origin
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.order import Ints, StepPositions, StreamOrder
from bessemer.data.stream.rows import (
    EMPTY_FIELD,
    PADDING,
    ArrayPool,
    ConcatRows,
    Rows,
    Spans,
    StoreRows,
    Transform,
    repeat_into,
)
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.data.stream.user_dataset import IterableStream

Bans = Mapping[tuple[str, int], int] | Collection[tuple[str, int]]
OTHER_TARGETS, OTHER_WEIGHTS = "other_targets", "other_weights"  # fields: the row before, with `mismatch`

_FORMAT = 1  # raise it when the same inputs give another stream
_CHUNK = 4096  # positions resolved together
_CHUNKS_KEPT = 8
_HORIZON = 8  # steps after those being assembled whose remote shards are fetched


@dataclass
class Batch:
    """One micro-batch. A column belongs to the document of its target: as an input, an EOS opens the next."""

    tokens: npt.NDArray[np.int64]  # (R, T) inputs
    targets: npt.NDArray[np.int64]  # (R, T)
    weights: npt.NDArray[np.float32]  # (R, T) of the targets: 0 for padding, masked and banned ones
    documents: npt.NDArray[np.int32]  # (R, T) number of the target's document within its row: 0, 1, 2, ...
    positions: Ints  # (R,) in the stream; -1 for a padding row, also below
    sources: Ints  # (R,) index into the stream's names
    sequences: Ints  # (R,) number of the row in its source
    # Further values by name: (R, T) beside the targets, or (R, D, ...) of the documents in a row, as numbered above.
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def single_document(self) -> bool:
        """Whether no row has a document boundary inside, so that plain causal attention is enough."""
        return not self.documents[:, -1].any()

    @property
    def count(self) -> float:
        return float(self.weights.sum(dtype=np.float64))

    def part(self, start: int, stop: int) -> Batch:
        """Rows [start, stop), as views."""
        return self.select(slice(start, stop))

    def select(self, rows: slice | Ints) -> Batch:
        """Some rows; views for a slice."""
        arrays = {name: array[rows] for name, array in vars(self).items() if name != "fields"}
        return Batch(**arrays, fields={name: array[rows] for name, array in self.fields.items()})


@dataclass(frozen=True)
class DocumentShare:
    """A document's part in a step: its target tokens (banned or not) and their positions."""

    source: str
    file: str
    row: int
    document_id: str
    tokens: int
    rows: list[int]
    document: int  # index in the source's store; bans name (source, document)


class BatchStream:
    """Any step's batch on any rank: pure, and the global batch is the same for every world size.

    A source is given by its `Rows`, or by its store for `ConcatRows`. `banned` maps (source, document index) to the
    first position at which the document weighs nothing; a plain collection of pairs bans from the start. Positions
    never shift. `transforms` change every micro-batch at the end. With `mismatch` a row comes with the targets of the
    one before it: of the step's last row for its first (0), or in a cycle of this many rows from the stream's start. A
    stream of `length` positions has missing rows, without weight, after them. It is immutable: see `replace`.
    """

    def __init__(
        self,
        sources: Mapping[str, Rows | TokenStore],
        order: StreamOrder,
        sequence_length: int,
        steps: StepPositions,
        banned: Bans = frozenset(),
        transforms: Sequence[Transform] = (),
        mismatch: int | None = None,
        length: int | None = None,
    ) -> None:
        self.mismatch, self.length = mismatch, length
        self.names, self.order, self.steps = order.names, order, steps
        self.banned = dict(banned) if isinstance(banned, Mapping) else dict.fromkeys(banned, 0)
        self.sequence_length, self.transforms = sequence_length, tuple(transforms)
        self.sources: dict[str, Rows] = {}
        for name in self.names:
            source = sources[name]
            rows = source if isinstance(source, Rows) else ConcatRows(source, sequence_length)
            if (order.lengths[name], sequence_length) != (rows.count, rows.length):
                raise ValueError(
                    f"the order has {order.lengths[name]} sequences of {sequence_length} tokens of {name!r}, "
                    f"which has {rows.count} of {rows.length}"
                )
            self.sources[name] = rows
        self._rows, self._arrays = list(self.sources.values()), ArrayPool()
        self._banned = [_ban_table(self.banned, name) for name in self.names]
        self._chunk = lru_cache(_CHUNKS_KEPT)(lambda k: order.resolve(k * _CHUNK + np.arange(_CHUNK))[:2])
        self.identity = self._identity()
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def replace(self, steps: StepPositions | None = None, banned: Bans | None = None) -> BatchStream:
        """The same stream, with the same fingerprint, under other steps or bans."""
        steps, banned = steps or self.steps, self.banned if banned is None else banned
        return BatchStream(
            self.sources, self.order, self.sequence_length, steps, banned, self.transforms, self.mismatch, self.length
        )

    def rows(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Ints:
        """The positions that the rank reads."""
        positions = rank_positions(self.steps, step, dp_rank, dp_world)
        return positions if self.length is None else np.where(positions < self.length, positions, -1)

    def batch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Batch:
        """All the rank's rows in one batch."""
        return self._finish(self._with_others(step, self._assemble(self.rows(step, dp_rank, dp_world))))

    def micro_batches(self, step: int, micro_rows: int, dp_rank: int = 0, dp_world: int = 1) -> list[Batch]:
        """The rank's rows in batches of exactly `micro_rows`, as many on every rank; the last is padded."""
        positions = self.rows(step, dp_rank, dp_world)
        padding = -positions.size % micro_rows
        batch = self._with_others(step, self._assemble(np.concatenate([positions, np.full(padding, -1)])))
        cuts = range(0, positions.size, micro_rows)
        return [self._finish(batch.part(row, row + micro_rows)) for row in cuts]

    def step_count(self, step: int) -> float:
        """The sum of the step's target weights over all ranks; reads no tokens."""
        positions = self.rows(step)
        sources, sequences = self._resolve(positions)
        total = 0.0
        for k, at in _by_source(sources):
            if self._rows[k].full and not self._banned[k].size:
                total += at.size * self.sequence_length
            else:
                spans = self._rows[k].spans(sequences[at])
                total += float(spans.weight[~self._is_banned(k, spans, positions[at])].sum())
        return total

    def origins(self, step: int) -> list[DocumentShare]:
        """The documents in a step, those with most target tokens first."""
        positions = self.rows(step)
        sources, sequences = self._resolve(positions)
        shares = []
        for k, at in _by_source(sources):
            spans = self._rows[k].spans(sequences[at])
            order = np.argsort(spans.document, kind="stable")
            order = order[spans.document[order] != PADDING]
            groups = np.split(order, np.flatnonzero(np.diff(spans.document[order])) + 1)
            for group in groups if order.size else []:
                origin = self._rows[k].origin_of_document(int(spans.document[group[0]]))
                shares.append(
                    DocumentShare(
                        source=self.names[k],
                        file=origin.file,
                        row=origin.row,
                        document_id=origin.document_id,
                        tokens=int(spans.length[group].sum()),
                        rows=positions[at[spans.row[group]]].tolist(),
                        document=origin.document,
                    )
                )
        return sorted(shares, key=lambda share: -share.tokens)

    def locate(self, batch: Batch) -> list[tuple[int, int, Origin]]:
        """(row of the batch, document number in it, origin) for every document of every real row."""
        located = []
        for k, at in _by_source(batch.sources):
            rows, spans = self._rows[k], self._rows[k].spans(batch.sequences[at])
            for i in np.flatnonzero(spans.document != PADDING).tolist():
                origin = rows.origin_of_document(int(spans.document[i]))
                located.append((int(at[spans.row[i]]), int(spans.number[i]), origin))
        return sorted(located, key=lambda entry: entry[:2])

    def prefetch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> None:
        """Fetches the remote shards of a step that the rank will read soon, in the background."""
        remote = {k: rows for k, rows in enumerate(self._rows) if isinstance(rows, StoreRows) and rows.store.cache}
        if remote:
            sources, sequences = self._resolve(self.rows(step, dp_rank, dp_world))
            for k, at in _by_source(sources):
                if k in remote:
                    remote[k].prefetch(sequences[at])

    def _assemble(self, positions: Ints) -> Batch:
        shape = positions.size, self.sequence_length
        sources, sequences = self._resolve(positions)
        groups = list(_by_source(sources))
        if len(groups) == 1 and groups[0][1].size == positions.size:
            block = self._block(groups[0][0], sequences, positions)  # one source: its arrays are the batch
            return Batch(*block[:4], positions, sources, sequences, block[4])
        tokens, targets, weights, documents = self._arrays.take(shape, np.int64, np.int64, np.float32, np.int32)
        for array in (tokens, targets, weights, documents):
            array[sources < 0] = 0
        parts = []
        for k, at in groups:
            tokens[at], targets[at], weights[at], documents[at], fields = self._block(k, sequences[at], positions[at])
            parts.append((at, fields))
        first = self._rows[0]
        if not parts and isinstance(first, StoreRows):  # rows of padding have empty fields
            nothing = np.empty(0, np.int64)
            parts = [(np.arange(shape[0]), first.fields(Spans(*[nothing] * 5), shape[0]))]
        return Batch(tokens, targets, weights, documents, positions, sources, sequences, join_fields(parts, shape[0]))

    def _with_others(self, step: int, batch: Batch) -> Batch:
        """The batch with the rows of `mismatch`."""
        if self.mismatch is None:
            return batch
        start, stop = (0, self.mismatch) if self.mismatch else self.steps.range(step)
        before = np.where(batch.positions == start, stop - 1, batch.positions - 1)
        others = self._assemble(np.where(batch.positions < 0, -1, before))
        batch.fields |= {OTHER_TARGETS: others.targets, OTHER_WEIGHTS: others.weights}
        return batch

    def _block(
        self, source: int, sequences: Ints, positions: Ints
    ) -> tuple[Ints, Ints, npt.NDArray[np.float32], Any, dict[str, npt.NDArray[Any]]]:
        """(tokens, targets, weights, document numbers, fields) of some rows of one source."""
        block = self._rows[source].assemble(sequences)
        spans = block.spans
        weights, documents = self._arrays.take(block.tokens.shape, np.float32, np.int32)
        counts = (spans.document != PADDING) & ~self._is_banned(source, spans, positions)
        if counts.all():
            weights[:] = 1 if block.weights is None else block.weights
        else:
            repeat_into(counts.astype(np.float32), spans.length, weights.reshape(-1))
            if block.weights is not None:
                weights *= block.weights
        repeat_into(spans.number.astype(np.int32), spans.length, documents.reshape(-1))
        rows = self._rows[source]
        fields = (
            rows.fields(spans, sequences.size) if isinstance(rows, StoreRows) and rows.store.fields else block.fields
        )
        return block.tokens, block.targets, weights, documents, fields

    def _finish(self, batch: Batch) -> Batch:
        for transform in self.transforms:
            batch = transform(batch)
        return batch

    def _resolve(self, positions: Ints) -> tuple[Ints, Ints]:
        """(source, row of the source) at each position, -1 for padding."""
        sources, sequences = np.full_like(positions, -1), np.full_like(positions, -1)
        number, offset = np.divmod(positions, _CHUNK)
        for k in np.unique(number[positions >= 0]).tolist():
            at = number == k
            source, sequence = self._chunk(k)
            sources[at], sequences[at] = source[offset[at]], sequence[offset[at]]
        return sources, sequences

    def _is_banned(self, source: int, spans: Spans, positions: Ints) -> npt.NDArray[np.bool_]:
        """Which spans are of banned documents, in rows at the given positions."""
        documents, since = self._banned[source]
        if not documents.size:
            return np.zeros(spans.document.shape, np.bool_)
        at = np.minimum(np.searchsorted(documents, spans.document), documents.size - 1)
        return (documents[at] == spans.document) & (positions[spans.row] >= since[at])

    def _identity(self) -> dict[str, Any]:
        """What decides the tokens at a position: not batch size, steps or bans."""
        packings = {name: rows.packing for name, rows in self.sources.items()}
        identity = {
            "format": _FORMAT,
            "packing": packings if len(set(packings.values())) > 1 else next(iter(packings.values())),
            "sequence_length": self.sequence_length,
            "sources": {name: rows.fingerprint for name, rows in self.sources.items()},
            **self.order.identity,
        }
        for transform in self.transforms:
            identity |= transform.identity
        return identity


def join_fields(parts: Sequence[tuple[Ints, Mapping[str, npt.NDArray[Any]]]], rows: int) -> dict[str, npt.NDArray[Any]]:
    """Fields of the rows of several sources in one batch. Rows without a field, and documents that a row does not have,
    hold NaN, or -100 in fields of integers."""
    joined: dict[str, npt.NDArray[Any]] = {}
    for name in dict.fromkeys(name for _, fields in parts for name in fields):
        arrays = [fields[name] for _, fields in parts if name in fields]
        shape = (rows, max(array.shape[1] for array in arrays), *arrays[0].shape[2:])
        joined[name] = np.full(shape, np.nan if arrays[0].dtype.kind == "f" else EMPTY_FIELD, arrays[0].dtype)
        for at, fields in parts:
            if name in fields:
                joined[name][at, : fields[name].shape[1]] = fields[name]
    return joined


def rank_positions(steps: StepPositions, step: int, dp_rank: int, dp_world: int) -> Ints:
    """The positions that a rank reads in a step: equally many on every rank, -1 where none are left."""
    if not 0 <= dp_rank < dp_world:
        raise ValueError(f"rank {dp_rank} is outside a world of {dp_world}")
    start, stop = steps.range(step)
    share = -(-(stop - start) // dp_world)
    positions = start + dp_rank * share + np.arange(share)
    return np.where(positions < stop, positions, -1)


def _ban_table(banned: Mapping[tuple[str, int], int], name: str) -> Ints:
    """(2, n): the source's banned documents in rising order, and the positions from which they are banned."""
    table = sorted((document, since) for (source, document), since in banned.items() if source == name)
    return np.array(table, np.int64).reshape(-1, 2).T


def _by_source(sources: Ints) -> Iterator[tuple[int, Ints]]:
    """Each source with the indices of its rows; padding rows belong to none."""
    for k in np.unique(sources[sources >= 0]).tolist():
        yield k, np.flatnonzero(sources == k)


class Prefetch:
    """Assembles the micro-batches of the next `depth` steps in threads while a step trains; close it, or use `with`.

    One thread is enough except for very large or slow reads (100 M tokens/s and more from memory); more threads overlap
    disk latency. With `pin`, the arrays are in page-locked memory, so that copies to a CUDA GPU are asynchronous.
    """

    def __init__(
        self,
        stream: BatchStream | IterableStream,
        micro_rows: int,
        dp_rank: int = 0,
        dp_world: int = 1,
        depth: int = 2,
        threads: int = 1,
        pin: bool = False,
    ) -> None:
        if pin:
            import torch

            if not torch.cuda.is_available():
                raise UserError("batches can be pinned for a CUDA GPU only, and this machine has none: use pin=False")
        self.stream, self.depth, self.pin = stream, depth, pin
        self.wait_s = 0.0  # how long the last `get` waited
        self._micro_rows, self._rank = micro_rows, (dp_rank, dp_world)
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="batches")
        self._ahead: dict[int, Future[list[Batch]]] = {}
        self._prefetched = -1  # the last step whose shards were requested
        # A copy to the GPU may still read from a batch that the caller has dropped.
        self._returned: deque[list[Batch]] = deque(maxlen=2)

    def get(self, step: int) -> list[Batch]:
        """The step's micro-batches; starts those of the `depth` steps after it. A step out of turn discards what is
        under way. An error while assembling a step is raised here, and a repeated call tries again."""
        began = time.perf_counter()
        if step not in self._ahead:
            self._discard()
        for ahead in range(step, step + 1 + self.depth):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._threads.submit(self._assemble, ahead)
        for passed in [key for key in self._ahead if key < step]:
            self._ahead.pop(passed).cancel()
        batches = self._ahead.pop(step).result()
        if self.pin:
            self._returned.append(batches)
        self.wait_s = time.perf_counter() - began
        return batches

    def close(self) -> None:
        """Waits for the steps being assembled and drops the rest."""
        self._discard()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._returned.clear()

    def _assemble(self, step: int) -> list[Batch]:
        for coming in range(max(step, self._prefetched) + 1, step + 1 + _HORIZON):
            self._prefetched = coming
            self.stream.prefetch(coming, *self._rank)
        batches = self.stream.micro_batches(step, self._micro_rows, *self._rank)
        return [pinned(batch) for batch in batches] if self.pin else batches

    def _discard(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._prefetched = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pinned(batch: Batch) -> Batch:
    """A copy in page-locked memory. Every array has its own allocation, so that torch knows when copies from it end."""
    import torch

    def copy(array: np.ndarray) -> np.ndarray:
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
        locked = tensor.numpy()
        locked[...] = array
        return locked

    large = ("tokens", "targets", "weights", "documents")
    arrays: dict[str, Any] = {name: copy(getattr(batch, name)) for name in large}
    return dataclasses.replace(batch, **arrays)
