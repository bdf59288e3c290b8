"""Batches from an iterable that can only be read forwards: the one stream that is not a pure function of the step.

It answers as `BatchStream` does for the steps at hand. What has passed cannot be read again: a past step does not
replay, a rollback without a skip is refused, and a resume works only if the iterable can restore its own state.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.data.order import Order, Phase
from bessemer.data.own import Encoder, Mask, dataset_name, encode_items
from bessemer.data.rows import Ints
from bessemer.data.steps import Steps
from bessemer.data.store import Origin
from bessemer.data.stream import Batch, DocumentShare
from bessemer.errors import UserError
from bessemer.spec.mixture import Mixture

_FORMAT = 1
_ITEMS_READ = 16  # encoded together
_STEPS_KEPT = 8  # whose rows are still at hand: those ahead, and those that a late verdict is about
_STATES_KEPT = 64

NOT_REPLAYABLE = (
    "not replayable: the data is an iterable, so past steps cannot be read again; give a dataset with __len__ and "
    "__getitem__, or files, to get replay and exact resume"
)


@dataclass
class _Row:
    ids: Ints  # T + 1
    counts: Mask
    items: Ints  # (T + 1,) which item each id came from, counted from 0


class _Reader:
    """Items end to end, each followed by an end of document, cut into windows of T + 1 ids that overlap by one."""

    def __init__(self, dataset: Iterable[Any], tokenizer: Encoder, length: int) -> None:
        self.dataset, self.tokenizer, self.length = dataset, tokenizer, length
        self.name = dataset_name(dataset)
        self.lock = threading.Lock()
        self.next = 0  # position of the next row
        self.rows: OrderedDict[int, _Row] = OrderedDict()
        self.states: OrderedDict[int, str] = OrderedDict()  # by the position that they stand before
        self._items = 0  # read so far, over all passes
        self._waiting: deque[_Row] = deque()  # encoded items that no row has yet
        self._left = _Row(np.array([tokenizer.eos_id]), np.ones(1, np.bool_), np.array([-1]))
        self._iterator: Iterator[Any] | None = None
        self._restored = False  # the next iterator goes on with a pass, whose end may be all that is left of it

    def read_to(self, stop: int, keep: int) -> None:
        """Reads rows until `stop` is the next; the latest `keep` stay at hand."""
        while self.next < stop:
            self.rows[self.next] = self._row()
            self.next += 1
            while len(self.rows) > keep:
                self.rows.popitem(last=False)

    def remember(self) -> None:
        """Keeps the iterable's state as it is now, if it has one."""
        holder = self._holder("state_dict")
        if holder is None or self.next in self.states:
            return
        waiting = [self._left, *self._waiting]
        state = {
            "iterable": holder.state_dict(),
            "items": self._items,
            "waiting": [[row.ids.tolist(), row.counts.tolist(), row.items.tolist()] for row in waiting],
        }
        try:
            self.states[self.next] = json.dumps(state)
        except TypeError as error:
            raise UserError(
                f"{self.name}.state_dict() holds what JSON cannot ({error}): return numbers, texts, lists and mappings"
            ) from error
        while len(self.states) > _STATES_KEPT:
            self.states.popitem(last=False)

    def restore(self, position: int, state: str) -> None:
        holder = self._holder("load_state_dict")
        if holder is None:
            raise UserError(f"{self.name} has no load_state_dict, so the run cannot go on with it; {NOT_REPLAYABLE}")
        found = json.loads(state)
        holder.load_state_dict(found["iterable"])
        self._iterator, self._restored = None, True
        rows = [
            _Row(np.array(i, np.int64), np.array(c, np.bool_), np.array(o, np.int64)) for i, c, o in found["waiting"]
        ]
        self._left, self._waiting, self._items = rows[0], deque(rows[1:]), found["items"]
        self.next = position
        self.rows.clear()
        self.states.clear()
        self.states[position] = state

    def _holder(self, method: str) -> Any:
        """What has the state: the iterator if it can tell, else the dataset. A state is loaded into the dataset, whose
        next iterator goes on from there."""
        if method == "state_dict" and self._iterator is not None and hasattr(self._iterator, method):
            return self._iterator
        return self.dataset if hasattr(self.dataset, method) else None

    def _row(self) -> _Row:
        parts, size = [self._left], self._left.ids.size
        while size <= self.length:
            while not self._waiting:  # a pass that ends gives none
                self._waiting.extend(self._read())
            parts.append(self._waiting.popleft())
            size += parts[-1].ids.size
        ids = np.concatenate([part.ids for part in parts])
        counts = np.concatenate([part.counts for part in parts])
        items = np.concatenate([part.items for part in parts])
        cut, keep = slice(0, self.length + 1), slice(self.length, None)
        self._left = _Row(ids[keep], counts[keep], items[keep])
        return _Row(ids[cut], counts[cut], items[cut])

    def _read(self) -> list[_Row]:
        """The next items, encoded; a new pass begins where one ends."""
        items: list[Any] = []
        fresh = self._iterator is None and not self._restored
        if self._iterator is None:
            self._iterator, self._restored = iter(self.dataset), False
        for item in self._iterator:
            items.append(item)
            if len(items) == _ITEMS_READ:
                break
        else:
            again = self._iterator is not self.dataset
            self._iterator = None
            if not items and (fresh or not again):
                raise UserError(
                    f"{self.name} ended after {self._items:,} items ({self.next:,} rows of {self.length}): lower the "
                    "budget, or give something that can be iterated again"
                )
        places = [f"{self.name} item {self._items + k}" for k in range(len(items))]
        encoded = encode_items(items, self.tokenizer, places)
        rows = []
        for k, (item, (ids, counts)) in enumerate(zip(items, encoded, strict=True)):
            if isinstance(item, str):
                ids, counts = ids[1:], counts[1:]  # the end of the item before opens this one
            elif not ids.size or ids[-1] != self.tokenizer.eos_id:
                ids, counts = np.append(ids, self.tokenizer.eos_id), np.append(counts, True)
            rows.append(_Row(ids, counts, np.full(ids.size, self._items + k)))
        self._items += len(items)
        return rows


class ForwardStream:
    """The batches of an iterable, one step after another. Every rank reads all of it and takes its own rows, so it must
    give the same items on every rank."""

    replayable = False
    banned: frozenset[tuple[str, int]] = frozenset()

    def __init__(
        self,
        dataset: Iterable[Any],
        tokenizer: Encoder,
        sequence_length: int,
        steps: Steps,
        reader: _Reader | None = None,
    ) -> None:
        self.dataset, self.tokenizer = dataset, tokenizer
        self.sequence_length, self.steps = sequence_length, steps
        self._reader = reader or _Reader(dataset, tokenizer, sequence_length)
        self.names = (self._reader.name,)
        self.order = Order([Phase(0, Mixture(self.names, (1,), 1))], {self.names[0]: 1}, 0)  # it has one phase
        self.identity = {
            "format": _FORMAT,
            "packing": "iterable",
            "sequence_length": sequence_length,
            "sources": {self._reader.name: tokenizer.fingerprint},
        }
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def replace(self, steps: Steps | None = None, banned: object = None) -> ForwardStream:
        """The same iterable, as far as it has been read, under other steps. Documents cannot be banned."""
        return ForwardStream(self.dataset, self.tokenizer, self.sequence_length, steps or self.steps, self._reader)

    def rows(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Ints:
        """The positions that the rank reads: equally many on every rank, -1 where there are none left."""
        if not 0 <= dp_rank < dp_world:
            raise ValueError(f"rank {dp_rank} is outside a world of {dp_world}")
        start, stop = self.steps.range(step)
        share = -(-(stop - start) // dp_world)
        positions = start + dp_rank * share + np.arange(share)
        return np.where(positions < stop, positions, -1)

    def batch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Batch:
        return self._assemble(step, self.rows(step, dp_rank, dp_world))

    def micro_batches(self, step: int, micro_rows: int, dp_rank: int = 0, dp_world: int = 1) -> list[Batch]:
        positions = self.rows(step, dp_rank, dp_world)
        padding = -positions.size % micro_rows
        whole = self._assemble(step, np.concatenate([positions, np.full(padding, -1)]))
        return [whole.part(row, row + micro_rows) for row in range(0, positions.size, micro_rows)]

    def step_count(self, step: int) -> float:
        """The sum of the step's target weights over all ranks. Reads the step."""
        return float(sum(row.counts[1:].sum() for row in self._rows(step)))

    def origins(self, step: int) -> list[DocumentShare]:
        """The items in a step that is still at hand, those with most target tokens first."""
        start, _ = self.steps.range(step)
        tokens: dict[int, int] = {}
        rows: dict[int, list[int]] = {}
        for k, row in enumerate(self._rows(step)):
            for item, count in zip(*np.unique(row.items[1:], return_counts=True), strict=True):
                tokens[int(item)] = tokens.get(int(item), 0) + int(count)
                rows.setdefault(int(item), []).append(start + k)
        shares = [
            DocumentShare(self.names[0], self.names[0], item + 1, f"item {item}", tokens[item], rows[item], item)
            for item in tokens
        ]
        return sorted(shares, key=lambda share: -share.tokens)

    def locate(self, batch: Batch) -> list[tuple[int, int, Origin]]:
        """(row of the batch, document number in it, origin) for the rows that are still at hand."""
        found = []
        with self._reader.lock:
            for r, position in enumerate(batch.positions.tolist()):
                row = self._reader.rows.get(position)
                for number, item in enumerate(dict.fromkeys(row.items[1:].tolist()) if row else ()):
                    origin = Origin(self.names[0], item + 1, f"item {item}", item, 0, self.sequence_length)
                    found.append((r, number, origin))
        return found

    def expect(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> None:
        """Nothing lies afar."""

    def state(self, step: int) -> str | None:
        """What a checkpoint before `step` needs in order to go on; None if the iterable has no state_dict."""
        with self._reader.lock:
            position = self.steps.position(step)
            if self._reader.next == position:
                self._reader.remember()
            return self._reader.states.get(position)

    def resume(self, step: int, state: Mapping[str, Any] | str | None) -> None:
        """Goes on before `step`, from what `state(step)` gave."""
        if step == 0 and not state:
            return
        if not state:
            raise UserError(
                f"{self.names[0]}: the checkpoint of step {step:,} has no state of the iterable: give it state_dict "
                f"and load_state_dict, or start the run anew ({NOT_REPLAYABLE})"
            )
        text = state if isinstance(state, str) else json.dumps(state)
        with self._reader.lock:
            self._reader.restore(self.steps.position(step), text)

    def _rows(self, step: int) -> list[_Row]:
        start, stop = self.steps.range(step)
        reader = self._reader
        with reader.lock:
            if start >= reader.next:
                reader.read_to(start, 0)  # a skip: read, and let go
                reader.remember()
            reader.read_to(stop, max(_STEPS_KEPT * (stop - start), len(reader.rows)))
            while len(reader.rows) > _STEPS_KEPT * (stop - start):
                reader.rows.popitem(last=False)
            missing = [position for position in range(start, stop) if position not in reader.rows]
            if missing:
                raise UserError(f"step {step:,} (row {missing[0]:,} of the data) has passed; {NOT_REPLAYABLE}")
            return [reader.rows[position] for position in range(start, stop)]

    def _assemble(self, step: int, positions: Ints) -> Batch:
        start, _ = self.steps.range(step)
        rows = self._rows(step)
        shape = positions.size, self.sequence_length
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights, documents = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        for r, position in enumerate(positions.tolist()):
            if position < 0:
                continue
            row = rows[position - start]
            tokens[r], targets[r], weights[r] = row.ids[:-1], row.ids[1:], row.counts[1:]
            documents[r] = np.cumsum(np.diff(row.items[1:], prepend=row.items[1]) != 0)
        real = positions >= 0
        return Batch(
            tokens, targets, weights, documents, positions, np.where(real, 0, -1), np.where(real, positions, -1)
        )
