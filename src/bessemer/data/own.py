"""A user's own dataset, given from Python instead of files.

A map-style one (`__len__` and `__getitem__`) is a source like any other: rows on demand, any step replays. An iterable
can only be read forwards: `own_stream.ForwardStream` says so and refuses what it cannot do.

An item is a text, a sequence of token ids, or {"tokens": ids, "mask": which of them count as targets}.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.pad import pad_rows
from bessemer.data.rows import PADDING, Block, Ints, Spans
from bessemer.data.store import Origin
from bessemer.errors import UserError

Mask = npt.NDArray[np.bool_]

_FORMAT = 1  # raise it when the same items give other rows
_SAMPLED = 32  # items that a fingerprint is made of where the dataset has none of its own
_ROWS_KEPT = 1024


class MapStyle(Protocol):
    """What torch calls a map-style dataset. Its item i must be the same whenever it is asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    eos_id: int
    vocab_size: int

    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: Sequence[str], /) -> Sequence[Sequence[int] | npt.NDArray[Any]]: ...


def is_map_style(dataset: object) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def dataset_name(dataset: object) -> str:
    """What origins and messages call it."""
    return f"dataset {type(dataset).__name__}"


def encode_items(items: Sequence[Any], tokenizer: Encoder, places: Sequence[str]) -> list[tuple[Ints, Mask]]:
    """(ids, which of them count as targets) of each item.

    A text is put between two end-of-document ids, so that its first token is a target too. Ids are taken as they are;
    the first is only ever an input.
    """
    texts = [i for i, item in enumerate(items) if isinstance(item, str)]
    encoded = dict(zip(texts, tokenizer.encode_batch([items[i] for i in texts]), strict=True)) if texts else {}
    found = []
    for i, (item, place) in enumerate(zip(items, places, strict=True)):
        if i in encoded:
            ids = np.concatenate([[tokenizer.eos_id], np.asarray(encoded[i]), [tokenizer.eos_id]]).astype(np.int64)
            found.append((ids, np.ones(ids.size, np.bool_)))
        else:
            found.append(_checked(item, tokenizer.vocab_size, place))
    return found


def _checked(item: Any, vocab: int, place: str) -> tuple[Ints, Mask]:
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


class OwnRows:
    """Rows from a map-style dataset, one item each: padded where it is shorter, cut where it is longer than T + 1 ids.

    Items are read when their rows are, by one thread at a time, and the latest are kept. `fingerprint_from` says what
    the fingerprint covers: the dataset's own `fingerprint` if it has one, else the number of items and a sample of
    them, which does not notice every change.
    """

    packing, full = "own", False

    def __init__(self, dataset: MapStyle, tokenizer: Encoder, length: int) -> None:
        self.dataset, self.tokenizer, self.length = dataset, tokenizer, length
        self.name = dataset_name(dataset)
        self.count = len(dataset)
        if self.count < 1:
            raise UserError(f"{self.name}: its length is {self.count}: give it at least one item")
        self._kept: OrderedDict[int, tuple[Ints, Mask]] = OrderedDict()
        self._lock = threading.Lock()
        self.fingerprint, self.fingerprint_from = self._fingerprint()

    def spans(self, sequences: Ints) -> Spans:
        rows = self._rows(sequences)
        targets = np.array([max(0, ids.size - 1) for ids, _ in rows], dtype=np.int64)
        kept = np.array([counts[1:].sum() for _, counts in rows], dtype=np.int64)
        n = sequences.size
        length = np.stack([targets, self.length - targets], axis=1)
        column = np.stack([np.zeros_like(targets), targets], axis=1)
        document = np.stack([sequences, np.full(n, PADDING)], axis=1)
        weight = np.stack([kept, np.zeros_like(kept)], axis=1)
        some = length.ravel() > 0
        row = np.repeat(np.arange(n), 2)
        return Spans(
            row[some], column.ravel()[some], length.ravel()[some], document.ravel()[some], weight.ravel()[some]
        )

    def assemble(self, sequences: Ints) -> Block:
        rows = self._rows(sequences)
        tokens, _ = pad_rows([ids[:-1] for ids, _ in rows], self.length)
        targets, _ = pad_rows([ids[1:] for ids, _ in rows], self.length)
        weights, _ = pad_rows([counts[1:].astype(np.float32) for _, counts in rows], self.length)
        return Block(tokens, targets, weights, self.spans(sequences))

    def origin_of_document(self, document: int) -> Origin:
        return Origin(self.name, document + 1, f"item {document}", document, 0, self.length)

    def _rows(self, sequences: Ints) -> list[tuple[Ints, Mask]]:
        """The items of some rows, cut to T + 1 ids."""
        with self._lock:
            wanted = sequences.tolist()
            missing = [index for index in dict.fromkeys(wanted) if index not in self._kept]
            fresh = dict(zip(missing, self._read(missing), strict=True))
            found = [fresh.get(index) or self._kept[index] for index in wanted]
            for index in dict.fromkeys(wanted):
                self._kept[index] = fresh.get(index) or self._kept[index]
                self._kept.move_to_end(index)
            while len(self._kept) > _ROWS_KEPT:
                self._kept.popitem(last=False)
        return found

    def _read(self, indices: list[int]) -> list[tuple[Ints, Mask]]:
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
        encoded = encode_items(items, self.tokenizer, places)
        return [(ids[: self.length + 1], counts[: self.length + 1]) for ids, counts in encoded]

    def _fingerprint(self) -> tuple[str, str]:
        content = xxhash.xxh3_128(f"{_FORMAT} {self.count} {self.tokenizer.fingerprint} ".encode())
        given = getattr(self.dataset, "fingerprint", None)
        if given is not None:
            content.update(str(given() if callable(given) else given).encode())
            return content.hexdigest(), "its own fingerprint"
        picks = np.unique(np.linspace(0, self.count - 1, _SAMPLED).astype(np.int64))
        for ids, counts in self._rows(picks):
            content.update(np.concatenate([[ids.size], ids, counts]).astype("<i8").tobytes())
        return (content.hexdigest(), f"its length and {picks.size} of its items; give it a fingerprint to be sure")
