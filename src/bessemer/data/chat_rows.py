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


class StoreReader:
    """The documents of a token store. Of a remote store only the first shard is read."""

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        self.count = store.infos[0].documents if store.cache and store.infos else store.documents

    def row(self, number: int) -> ChatRow:
        start, stop = (int(edge[0]) for edge in self.store.extents(np.array([number])))
        origin = self.store.origin_of_document(number)
        half = _ROW_TOKENS // 2
        runs = [(start, stop - start)] if stop - start <= _ROW_TOKENS else [(start, half), (stop - half, half)]
        parts = [self._read(*run) for run in runs]
        ids, weights = (np.concatenate([part[i] for part in parts]) for i in range(2))
        return ChatRow(f"{origin.file}:{origin.row}", ids, weights)

    def _read(self, start: int, length: int) -> tuple[Ints, Floats]:
        at = np.array([start], np.int64)
        weights = self.store.weights(at, length) if length else None
        ones = np.ones(length, np.float32)
        return self.store.slice(start, start + length).astype(np.int64), ones if weights is None else weights[0]


class DatasetReader:
    """The items of a caller's map-style dataset."""

    def __init__(self, rows: UserDatasetRows) -> None:
        self.rows, self.count = rows, rows.count

    def row(self, number: int) -> ChatRow:
        ids, counts = self.rows.item(number)
        weights = counts.astype(np.float32)
        weights[:1] = 0  # the first token is only an input
        return ChatRow(f"{self.rows.name}[{number}]", ids, weights)


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
            origins = (store.origin_of_document(first + int(i)) for i in np.flatnonzero(flag)[:3])
            tally.add_places(name, int(flag.sum()), [f"{origin.file}:{origin.row}" for origin in origins])
    return tally


def text_keys(reader: RowReader, tokenizer: Tokenizer) -> dict[int, str]:
    """Hashes of the rows' words without case, spacing and punctuation, and the place of each."""
    keys: dict[int, str] = {}
    numbers = sample_numbers(reader.count, COMPARED_ROWS // 2, COMPARED_ROWS // 2)
    for start in range(0, len(numbers), _DECODED):
        rows = [reader.row(number) for number in numbers[start : start + _DECODED]]
        texts = tokenizer.inner.decode_batch([row.ids.tolist() for row in rows], skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            if words := _WORD.findall(text.casefold()):
                keys.setdefault(_hash(" ".join(words)), row.place)
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
