"""A user's dataset, passed from Python instead of files.

A map-style dataset (`__len__` and `__getitem__`, the same item whenever it is read) is a source like any other: rows on
demand, any step can be replayed. An iterable can only be read forwards: `IterableStream` is the one stream that is not
a pure function of the step. It cannot replay past steps, and resumes only if the iterable can restore its state.

An item is a text, a sequence of token ids, or {"tokens": ids, "mask": which of them count as targets}; a mapping may
have "fields", arrays that an objective of your own finds in the batch, of the same size in all items. For
classification it is {"text": ..., "label": ...} or {"words": [...], "label": [...]}.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.read.entry import Document
from bessemer.data.store.shard import Origin
from bessemer.data.stream.batches import Batch, DocumentShare, rank_positions
from bessemer.data.stream.order import MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import EMPTY_FIELD, PADDING, Ints, RowBlock, Spans
from bessemer.data.tokenizer.labelled import LABEL, WORDS, LabelledRows
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.mixture import Mixture

Mask = npt.NDArray[np.bool_]

_FORMAT = 1  # raise it when the same items give other rows
_SAMPLED = 32  # items in the fingerprint of a dataset that has none
_ROWS_KEPT = 1024


def is_map_style(dataset: object) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def dataset_name(dataset: object) -> str:
    """The name in origins and messages."""
    return f"dataset {type(dataset).__name__}"


def encode_items(items: Sequence[Any], tokenizer: Tokenizer, places: Sequence[str]) -> list[tuple[Ints, Mask]]:
    """(ids, which of them count as targets) of each item.

    A text is put between two end-of-document ids, so that its first token is a target too. Ids are used as they are;
    the first is only ever an input.
    """
    texts = [i for i, item in enumerate(items) if isinstance(item, str)]
    encoded = dict(zip(texts, tokenizer.encode_batch([items[i] for i in texts]), strict=True)) if texts else {}
    results = []
    for i, (item, place) in enumerate(zip(items, places, strict=True)):
        if i in encoded:
            ids = np.concatenate([[tokenizer.eos_id], np.asarray(encoded[i]), [tokenizer.eos_id]]).astype(np.int64)
            results.append((ids, np.ones(ids.size, np.bool_)))
        else:
            results.append(_check_item(item, tokenizer.vocab_size, place))
    return results


def _check_item(item: Any, vocab: int, place: str) -> tuple[Ints, Mask]:
    wanted = 'return a text, token ids, or {"tokens": ids, "mask": which of them count}'
    mask = None
    if isinstance(item, Mapping):
        if "tokens" not in item:
            raise UserError(f"{place}: a mapping with {', '.join(map(repr, item)) or 'nothing'}; {wanted}")
        item, mask = item["tokens"], item.get("mask")
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: a {type(item).__name__} ({error}); {wanted}") from error
    if ids.size == 0:
        ids = np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"{place}: a {type(item).__name__} of {ids.dtype} in {ids.ndim} dimensions; {wanted}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise UserError(f"{place}: token id {wrong} lies outside the vocabulary of {vocab:,}: use the run's tokenizer")
    counts = np.ones(ids.size, np.bool_) if mask is None else np.asarray(mask).astype(np.bool_)
    if counts.shape != ids.shape:
        raise UserError(f"{place}: {ids.size} tokens and a mask of {counts.size}; give one of each")
    return ids.astype(np.int64), counts


def _item_fields(item: Any, place: str) -> dict[str, npt.NDArray[Any]]:
    """The further arrays of an item, flat."""
    given = item.get("fields", {}) if isinstance(item, Mapping) else {}
    if not isinstance(given, Mapping):
        raise UserError(f'{place}: "fields" is a {type(given).__name__}; give a mapping of names to arrays of numbers')
    fields = {str(name): np.asarray(values).reshape(-1) for name, values in given.items()}
    for name, values in fields.items():
        if values.dtype.kind not in "iuf" or not values.size:
            raise UserError(f"{place}: field {name!r} has {values.size} values of {values.dtype}; give numbers")
    return fields


@dataclass
class _Item:
    """An encoded item, cut to T + 1 ids. `fields` are of the item, `token_fields` beside its targets."""

    ids: Ints
    counts: Mask
    fields: dict[str, npt.NDArray[Any]]
    token_fields: dict[str, npt.NDArray[Any]]


class UserDatasetRows:
    """Rows from a map-style dataset, one item each: padded to T + 1 ids, or cut to them.

    Items are read on demand by one thread at a time, and the latest are cached. The fingerprint covers the dataset's
    own `fingerprint` if it has one, else the number of items and a sample of them, which misses some changes.
    """

    packing, full = "own", False

    def __init__(
        self, dataset: Sequence[Any], tokenizer: Tokenizer, length: int, labels: ClassifySpec | None = None
    ) -> None:
        self.dataset, self.tokenizer, self.length = dataset, tokenizer, length
        self.labelled = LabelledRows(labels, tokenizer) if labels else None
        self.name = dataset_name(dataset)
        self.count = len(dataset)
        if self.count < 1:
            raise UserError(f"{self.name}: its length is {self.count}: give it at least one item")
        self._cached: OrderedDict[int, _Item] = OrderedDict()
        self._lock = threading.Lock()
        self.fingerprint = self._fingerprint()

    def spans(self, sequences: Ints) -> Spans:
        rows = self._rows(sequences)
        targets = np.array([max(0, item.ids.size - 1) for item in rows], dtype=np.int64)
        weights = np.array([item.counts[1:].sum() for item in rows], dtype=np.int64)
        n, zeros = sequences.size, np.zeros_like(targets)
        pairs = ((np.arange(n), np.arange(n)), (zeros, targets), (targets, self.length - targets),
                 (sequences, np.full(n, PADDING)), (weights, zeros))  # fmt: skip
        row, column, length, document, weight = (np.stack(pair, axis=1).ravel() for pair in pairs)
        some = length > 0
        return Spans(row[some], column[some], length[some], document[some], weight[some])

    def assemble(self, sequences: Ints) -> RowBlock:
        rows = self._rows(sequences)
        shape = sequences.size, self.length
        tokens, targets, weights = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        fields: dict[str, npt.NDArray[Any]] = {}
        for r, item in enumerate(rows):
            n = max(0, item.ids.size - 1)
            tokens[r, :n], targets[r, :n], weights[r, :n] = item.ids[:n], item.ids[1:], item.counts[1:]
            for name, values in item.fields.items():
                field = fields.setdefault(name, _empty_field((len(rows), 1, values.size), values))
                if field.shape[2] != values.size:
                    raise UserError(
                        f"{self.name}[{sequences[r]}]: field {name!r} has {values.size} values, that of another item "
                        f"{field.shape[2]}: pad them to one size"
                    )
                field[r, 0] = values
            for name, values in item.token_fields.items():
                fields.setdefault(name, _empty_field(shape, values))[r, :n] = values
        return RowBlock(tokens, targets, weights, self.spans(sequences), fields)

    def origin_of_document(self, document: int) -> Origin:
        return Origin(self.name, document + 1, f"item {document}", document, 0, self.length)

    def item(self, index: int) -> tuple[Ints, Mask]:
        """One item's ids, cut to T + 1, and which of them count as targets."""
        [item] = self._rows(np.array([index]))
        return item.ids, item.counts

    def _rows(self, sequences: Ints) -> list[_Item]:
        """The items of some rows, cut to T + 1 ids."""
        with self._lock:
            indices = sequences.tolist()
            missing = [index for index in dict.fromkeys(indices) if index not in self._cached]
            items = self._cached | dict(zip(missing, self._read(missing), strict=True))
            for index in dict.fromkeys(indices):
                self._cached[index] = items[index]
                self._cached.move_to_end(index)
            while len(self._cached) > _ROWS_KEPT:
                self._cached.popitem(last=False)
        return [items[index] for index in indices]

    def _read(self, indices: list[int]) -> list[_Item]:
        items = []
        for index in indices:
            try:
                items.append(self.dataset[index])
            except Exception as error:
                raise UserError(
                    f"{self.name}[{index}] failed: {type(error).__name__}: {error}; every item from 0 to "
                    f"{self.count - 1} must be there"
                ) from error
        places = [f"{self.name}[{index}]" for index in indices]
        if self.labelled:
            return [self._encode_labelled(*pair) for pair in zip(items, indices, places, strict=True)]
        encoded = encode_items(items, self.tokenizer, places)
        fields = [_item_fields(item, place) for item, place in zip(items, places, strict=True)]
        return [
            _Item(ids[: self.length + 1], counts[: self.length + 1], values, {})
            for (ids, counts), values in zip(encoded, fields, strict=True)
        ]

    def _encode_labelled(self, item: Any, index: int, place: str) -> _Item:
        """The item between two end-of-document ids, as a document of a store."""
        assert self.labelled is not None
        if not isinstance(item, Mapping) or not isinstance(item.get("text") or item.get(WORDS), (str, list)):
            raise UserError(f'{place}: a {type(item).__name__}; return {{"text": ..., "label": ...}}')
        text, eos = item.get("text") or " ".join(item[WORDS]), self.tokenizer.eos_id
        columns = {key: item[key] for key in (LABEL, WORDS) if key in item}
        document = Document(text, self.name, index + 1, fields=columns)
        row = self.labelled.encode(document, np.array([*self.tokenizer.encode(text), eos]))
        ids = np.concatenate([[eos], row.tokens])[: self.length + 1].astype(np.int64)
        token_fields = {name: values[: self.length] for name, values in row.token_fields.items()}
        return _Item(ids, np.ones(ids.size, np.bool_), row.fields, token_fields)

    def _fingerprint(self) -> str:
        content = xxhash.xxh3_128(f"{_FORMAT} {self.count} {self.tokenizer.fingerprint} ".encode())
        fingerprint = getattr(self.dataset, "fingerprint", None)
        if fingerprint is not None:
            content.update(str(fingerprint() if callable(fingerprint) else fingerprint).encode())
            return content.hexdigest()
        picks = np.unique(np.linspace(0, self.count - 1, _SAMPLED).astype(np.int64))
        for item in self._rows(picks):
            content.update(np.concatenate([[item.ids.size], item.ids, item.counts]).astype("<i8").tobytes())
            for name, values in sorted({**item.fields, **item.token_fields}.items()):
                content.update(name.encode() + values.tobytes())
        return content.hexdigest()


def _empty_field(shape: tuple[int, ...], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.full(shape, np.nan if like.dtype.kind == "f" else EMPTY_FIELD, like.dtype)


_STREAM_FORMAT = 1
_ITEMS_READ = 16  # encoded together
_STEPS_KEPT = 8  # whose rows stay in memory: those ahead, and those that a late verdict may concern
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

    def __init__(self, dataset: Iterable[Any], tokenizer: Tokenizer, length: int) -> None:
        self.dataset, self.tokenizer, self.length = dataset, tokenizer, length
        self.name = dataset_name(dataset)
        self.lock = threading.Lock()
        self.next = 0  # position of the next row
        self.rows: OrderedDict[int, _Row] = OrderedDict()
        self.states: OrderedDict[int, str] = OrderedDict()  # by the position that they precede
        self._items = 0  # read so far, over all passes
        self._waiting: deque[_Row] = deque()  # encoded items that are in no row yet
        self._left = _Row(np.array([tokenizer.eos_id]), np.ones(1, np.bool_), np.array([-1]))
        self._iterator: Iterator[Any] | None = None
        self._restored = False  # the next iterator continues a pass, which may be at its end

    def read_to(self, stop: int, keep: int) -> None:
        """Reads rows up to `stop`; the latest `keep` stay in memory."""
        while self.next < stop:
            self.rows[self.next] = self._row()
            self.next += 1
            while len(self.rows) > keep:
                self.rows.popitem(last=False)

    def save_state(self) -> None:
        """Records the iterable's current state, if it has one."""
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
            raise UserError(f"{self.name} has no load_state_dict, so the run cannot continue with it; {NOT_REPLAYABLE}")
        saved = json.loads(state)
        holder.load_state_dict(saved["iterable"])
        self._iterator, self._restored = None, True
        rows = [
            _Row(np.array(i, np.int64), np.array(c, np.bool_), np.array(o, np.int64)) for i, c, o in saved["waiting"]
        ]
        self._left, self._waiting, self._items = rows[0], deque(rows[1:]), saved["items"]
        self.next = position
        self.rows.clear()
        self.states.clear()
        self.states[position] = state

    def _holder(self, method: str) -> Any:
        """The object with the state: the iterator if it has one, else the dataset. A state is loaded into the dataset,
        whose next iterator continues from there."""
        if method == "state_dict" and self._iterator is not None and hasattr(self._iterator, method):
            return self._iterator
        return self.dataset if hasattr(self.dataset, method) else None

    def _row(self) -> _Row:
        parts, size = [self._left], self._left.ids.size
        while size <= self.length:
            while not self._waiting:  # the end of a pass gives none
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


class IterableStream:
    """The batches of an iterable, one step after another. Every rank reads all items and takes its own rows, so the
    iterable must give the same items on every rank."""

    banned: frozenset[tuple[str, int]] = frozenset()

    def __init__(
        self,
        dataset: Iterable[Any],
        tokenizer: Tokenizer,
        sequence_length: int,
        steps: StepPositions,
        reader: _Reader | None = None,
    ) -> None:
        self.dataset, self.tokenizer = dataset, tokenizer
        self.sequence_length, self.steps = sequence_length, steps
        self._reader = reader or _Reader(dataset, tokenizer, sequence_length)
        self.names = (self._reader.name,)
        self.order = StreamOrder([MixturePhase(0, Mixture(self.names, (1,), 1))], {self.names[0]: 1}, 0)
        self.identity = {
            "format": _STREAM_FORMAT,
            "packing": "iterable",
            "sequence_length": sequence_length,
            "sources": {self._reader.name: tokenizer.fingerprint},
        }
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def replace(self, steps: StepPositions | None = None, banned: object = None) -> IterableStream:
        """The same iterable at its current position, under other steps. Documents cannot be banned."""
        return IterableStream(self.dataset, self.tokenizer, self.sequence_length, steps or self.steps, self._reader)

    def rows(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Ints:
        """The positions that the rank reads."""
        return rank_positions(self.steps, step, dp_rank, dp_world)

    def batch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Batch:
        return self._assemble(step, self.rows(step, dp_rank, dp_world))

    def micro_batches(self, step: int, micro_rows: int, dp_rank: int = 0, dp_world: int = 1) -> list[Batch]:
        positions = self.rows(step, dp_rank, dp_world)
        padding = -positions.size % micro_rows
        batch = self._assemble(step, np.concatenate([positions, np.full(padding, -1)]))
        return [batch.part(row, row + micro_rows) for row in range(0, positions.size, micro_rows)]

    def step_count(self, step: int) -> float:
        """The sum of the step's target weights over all ranks. Reads the step."""
        return float(sum(row.counts[1:].sum() for row in self._rows(step)))

    def origins(self, step: int) -> list[DocumentShare]:
        """The items of a step that is still in memory, those with most target tokens first."""
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
        """(row of the batch, document number in it, origin) for the rows that are still in memory."""
        located = []
        with self._reader.lock:
            for r, position in enumerate(batch.positions.tolist()):
                row = self._reader.rows.get(position)
                for number, item in enumerate(dict.fromkeys(row.items[1:].tolist()) if row else ()):
                    origin = Origin(self.names[0], item + 1, f"item {item}", item, 0, self.sequence_length)
                    located.append((r, number, origin))
        return located

    def prefetch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> None:
        """There are no remote shards."""

    def state(self, step: int) -> str | None:
        """The state that a checkpoint before `step` needs for a resume; None if the iterable has no state_dict."""
        with self._reader.lock:
            position = self.steps.position(step)
            if self._reader.next == position:
                self._reader.save_state()
            return self._reader.states.get(position)

    def resume(self, step: int, state: Mapping[str, Any] | str | None) -> None:
        """Continues before `step`, from the result of `state(step)`."""
        if step == 0 and not state:
            return
        if not state:
            raise UserError(
                f"{self.names[0]}: the checkpoint of step {step:,} has no state of the iterable: give it state_dict "
                f"and load_state_dict, or restart the run ({NOT_REPLAYABLE})"
            )
        text = state if isinstance(state, str) else json.dumps(state)
        with self._reader.lock:
            self._reader.restore(self.steps.position(step), text)

    def _rows(self, step: int) -> list[_Row]:
        start, stop = self.steps.range(step)
        reader = self._reader
        with reader.lock:
            if start >= reader.next:
                reader.read_to(start, 0)  # a skip: read and discard
                reader.save_state()
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
