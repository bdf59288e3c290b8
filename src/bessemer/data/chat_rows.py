"""Rows as supervised fine-tuning trains them: token ids, weights and the place that they came from.

Read from token stores, from a caller's datasets, or from files that are rendered on the spot. Checks read a bounded
sample: the first rows and others chosen by hash.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.read.answers import divide_answers
from bessemer.data.read.chat_turns import MESSAGE_WEIGHT
from bessemer.data.read.entry import Document
from bessemer.data.store.token_store import TokenStore
from bessemer.data.tokenizer.chat import Learn, render

if TYPE_CHECKING:
    from bessemer.data.stream.user_dataset import UserDatasetRows
    from bessemer.data.tokenizer.tokenizer import Tokenizer

FIRST_ROWS = HASHED_ROWS = 1000
FIRST_CONVERSATIONS = 200  # of which it is known whether they have system messages
COUNTED_ROWS = 20_000_000  # lengths and weights are counted up to here: 0.2 s per million
COMPARED_ROWS = 20_000  # of each side, to find training rows among the validation rows
_ROW_TOKENS = 1 << 13  # of a longer row, the beginning and the end are read
_DECODED = 512
_WORD = re.compile(r"\w+")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ChatRow:
    """One row. A token of weight 0 is read but not trained."""

    place: str
    ids: Ints
    weights: Floats

    def trained_runs(self) -> list[tuple[int, int]]:
        """The ranges [start, stop) of neighbouring trained tokens."""
        edges = np.flatnonzero(np.diff(np.pad((self.weights > 0).astype(np.int8), 1)))
        return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    def pieces(self, tokenizer: Tokenizer) -> list[tuple[str, float]]:
        """The text in pieces of one weight."""
        cuts = [0, *(np.flatnonzero(np.diff(self.weights)) + 1).tolist(), self.ids.size]
        return [
            (tokenizer.decode(self.ids[start:stop].tolist(), continues=start > 0), float(self.weights[start]))
            for start, stop in pairwise(cuts)
            if stop > start
        ]


class RowReader(Protocol):
    """Rows by number."""

    count: int

    def row(self, number: int) -> ChatRow: ...

    def ids(self, numbers: Sequence[int]) -> list[list[int]]:
        """The first tokens of some rows."""

    def place(self, number: int) -> str: ...


class StoreReader:
    """The documents of a token store. Of a remote store only the first shard is read."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self.count = store.infos[0].documents if store.cache and store.infos else store.documents

    def row(self, number: int) -> ChatRow:
        start, stop = (int(edge[0]) for edge in self.store.extents(np.array([number])))
        half = _ROW_TOKENS // 2
        runs = [(start, stop - start)] if stop - start <= _ROW_TOKENS else [(start, half), (stop - half, half)]
        parts = [self._read(*run) for run in runs]
        ids, weights = (np.concatenate([part[i] for part in parts]) for i in range(2))
        return ChatRow(self.place(number), ids, weights)

    def ids(self, numbers: Sequence[int]) -> list[list[int]]:
        starts, stops = self.store.extents(np.array(numbers))
        ends = np.minimum(stops, starts + _ROW_TOKENS)
        return [
            self.store.slice(start, end).tolist() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def place(self, number: int) -> str:
        origin = self.store.origin_of_document(number)
        return f"{origin.file}:{origin.row}"

    def _read(self, start: int, length: int) -> tuple[Ints, Floats]:
        at, lengths = np.array([start], np.int64), np.array([length], np.int64)
        weights = np.ones(length, np.float32)
        if length and self.store.masked:
            self.store.copy_weights(at, lengths, weights, np.array([0]))
        if length and MESSAGE_WEIGHT in self.store.fields:
            factors = np.ones(length, np.float32)
            self.store.copy_field(MESSAGE_WEIGHT, at, lengths, factors, np.array([0]))
            weights *= factors
        return self.store.slice(start, start + length).astype(np.int64), weights


class DatasetReader:
    """The items of a caller's map-style dataset."""

    def __init__(self, rows: UserDatasetRows) -> None:
        self.rows, self.count = rows, rows.count

    def row(self, number: int) -> ChatRow:
        ids, counts = self.rows.item(number)
        weights = counts.astype(np.float32)
        weights[:1] = 0  # the first token is only an input
        return ChatRow(self.place(number), ids, weights)

    def ids(self, numbers: Sequence[int]) -> list[list[int]]:
        return [self.rows.item(number)[0].tolist() for number in numbers]

    def place(self, number: int) -> str:
        return f"{self.rows.name}[{number}]"


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def sample_numbers(count: int, first: int = FIRST_ROWS, others: int = HASHED_ROWS) -> list[int]:
    """All rows, or the first ones and others chosen by hash."""
    if count <= first + others:
        return list(range(count))
    hashed = {first + _hash(str(i)) % (count - first) for i in range(others)}
    return [*range(first), *sorted(hashed)]


class RowSample:
    """Collects a bounded sample of a stream of rows: the first ones, and those with the smallest hashes."""

    def __init__(self) -> None:
        self._first: list[ChatRow] = []
        self._hashed: list[tuple[int, int, ChatRow]] = []
        self.count = 0

    def add(self, row: ChatRow) -> None:
        self.count += 1
        if len(self._first) < FIRST_ROWS:
            self._first.append(row)
            return
        entry = (-_hash(row.place), self.count, row)
        if len(self._hashed) < HASHED_ROWS:
            heapq.heappush(self._hashed, entry)
        else:
            heapq.heappushpop(self._hashed, entry)

    def rows(self) -> list[ChatRow]:
        return [*self._first, *(row for _, _, row in sorted(self._hashed, key=lambda entry: entry[1]))]


@dataclass
class RowCounts:
    """How many rows there are, and how many train nothing (`untrained`), train only tokens past the context (`late`)
    or exceed the context (`long`); with the first places."""

    rows: int = 0
    longest: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, row: ChatRow, context: int | None) -> None:
        self.rows += 1
        self.longest = max(self.longest, row.ids.size)
        trained = row.weights > 0
        flags = {
            "untrained": not trained.any(),
            "late": context is not None and trained.any() and not trained[:context].any(),
            "long": context is not None and row.ids.size > context,
        }
        for name, flag in flags.items():
            if flag:
                self.add_places(name, 1, [row.place])

    def add_places(self, name: str, count: int, places: Sequence[str]) -> None:
        self.counts[name] += count
        listed = self.places.setdefault(name, [])
        listed += places[: 3 - len(listed)]


def count_store(store: TokenStore, context: int) -> RowCounts:
    """Counts over all rows, from lookups of lengths and weights, without reading tokens."""
    tally, reader = RowCounts(), StoreReader(store)
    tally.rows = min(reader.count, COUNTED_ROWS)
    for first in range(0, tally.rows, 1 << 20):
        edges = store.edges(first, min(first + (1 << 20), tally.rows))
        starts, stops = edges[:-1], edges[1:]
        targets = store.targets_before(edges)
        inside = store.targets_before(np.minimum(starts + context, stops)) - targets[:-1]
        trained = np.diff(targets)
        flags = {"untrained": trained == 0, "late": (trained > 0) & (inside == 0), "long": stops - starts > context}
        tally.longest = max(tally.longest, int((stops - starts).max()))
        for name, flag in flags.items():
            places = [reader.place(first + int(i)) for i in np.flatnonzero(flag)[:3]]
            tally.add_places(name, int(flag.sum()), places)
    return tally


@dataclass(frozen=True)
class SharedRows:
    """Rows of the validation set that are among the training rows, and how many of each were compared."""

    count: int = 0
    held_out: int = 0
    training: int = 0
    places: list[tuple[str, str]] = field(default_factory=list)  # of the first ones: validation, training


def shared_rows(held_out: RowReader, training: RowReader, tokenizer: Tokenizer) -> SharedRows:
    """Compares words without case, spacing and punctuation. Identical rows are always on one side."""
    validation, train = (_text_keys(reader, tokenizer) for reader in (held_out, training))
    shared = [key for key in validation if key in train]
    places = [(held_out.place(validation[key]), training.place(train[key])) for key in shared[:3]]
    return SharedRows(len(shared), len(validation), len(train), places)


def _text_keys(reader: RowReader, tokenizer: Tokenizer) -> dict[int, int]:
    """Hashes of the rows' words, and a row of each."""
    keys: dict[int, int] = {}
    numbers = sample_numbers(reader.count, COMPARED_ROWS // 2, COMPARED_ROWS // 2)
    for start in range(0, len(numbers), _DECODED):
        some = numbers[start : start + _DECODED]
        texts = tokenizer.inner.decode_batch(reader.ids(some), skip_special_tokens=True)
        for number, text in zip(some, texts, strict=True):
            if words := _WORD.findall(text.casefold()):
                keys.setdefault(_hash(" ".join(words)), number)
    return keys


def render_document(document: Document, tokenizer: Tokenizer, template: str, learn: Learn) -> Iterator[ChatRow]:
    """The rows of a conversation, as preparing the data would store them."""
    for one in divide_answers(iter([document]), learn == "everything"):
        ids, mask = render(one.messages or [], tokenizer, template, learn)
        if not ids.size or ids[-1] != tokenizer.eos_id:
            ids, mask = np.append(ids, np.uint32(tokenizer.eos_id)), np.append(mask, np.uint8(0))
        yield ChatRow(document.place, ids.astype(np.int64), mask.astype(np.float32))


def has_system(messages: Sequence[Mapping[str, Any]] | None) -> bool:
    return any(message["role"] == "system" and message["content"].strip() for message in messages or ())
