"""A model of good text that says how surprising another text is: n-grams of bytes, smoothed by Kneser and Ney. Bytes
need no vocabulary and no rule for unknown words, fit every language, and up to eight of them are one exact 64-bit
key: nothing is hashed away, so the probabilities after any context sum to one. Costs are integers (2^-20 bits): a
text's score from a given file is the same on any machine and in any batch. `kneser_ney_fit` makes the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.clean.features import Ints, Words, gathered
from bessemer.data.clean.model_file import load_model, save_model
from bessemer.errors import UserError

KIND, VERSION = "perplexity model", 1
BIT = 1 << 20  # the cost of one bit
EDGE = 0xFF  # stands before a text: a byte that UTF-8 does not use
LONGEST = 8  # bytes in a 64-bit key
UNSURE_BITS = 8.0  # of an empty text: as surprising as random bytes
NOT_SEEN = -1
_PIECE_BYTES = 1 << 16  # looked up together; the arrays of a piece stay in the cache
_EMPTY = np.uint64(2**64 - 1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_TAIL = 64  # places after the last home
_FILLED = 0.6  # of a table: 1.75 looks on average for a key that is there

Costs = npt.NDArray[np.int32]


@dataclass
class PerplexityModel:
    """`pair_costs` and `pair_backs` have an entry for each two bytes: the cost of the second after the first, and what
    backing off from the two costs, NOT_SEEN where they never stood together. `tables` are for 3 bytes and more."""

    order: int
    pair_costs: Costs
    pair_backs: Costs
    tables: list[Words]
    report: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.pair_costs.shape == self.pair_backs.shape == (1 << 16,)
        assert len(self.tables) == self.order - 2

    def bits_per_byte(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """How surprising each text is: the model's bits for it by the length of its UTF-8. 12 MB/s on one core for text
        like the model's own, 5 MB/s for any other, with a model of 180 MB."""
        costs = np.zeros(len(texts), dtype=np.int64)
        sizes = np.zeros(len(texts), dtype=np.int64)
        # What stands before a piece is its context, so that pieces give what the whole would.
        for buffer, owners, starts, stops in gathered(texts, _PIECE_BYTES, bytes([EDGE]), self.order - 1):
            running = np.zeros(len(buffer) + 1, dtype=np.int64)
            np.cumsum(self.costs(np.frombuffer(buffer, np.uint8)), out=running[1:])
            np.add.at(costs, owners, running[stops] - running[starts])
            np.add.at(sizes, owners, stops - starts)
        return np.where(sizes > 0, costs / np.maximum(sizes, 1) / BIT, UNSURE_BITS)

    def costs(self, text: npt.NDArray[np.uint8]) -> Costs:
        """Of each byte after those before it. EDGE begins a text anew; costs of edges, and the first, mean nothing.
        The longest grams are looked up first: where they are found, as they mostly are in text of the kind that the
        model knows, nothing else is needed. Backing off needs the shorter grams of a byte and of the one before
        it."""
        windows = _windows(text)
        values = find(self.tables[-1], windows & mask(self.order))
        costs = (values & np.uint64(2**32 - 1)).astype(np.int32)
        missed = values == _EMPTY
        needed = missed.copy()
        needed[:-1] |= missed[1:]
        at = np.flatnonzero(needed)
        costs[missed] = self._backed_off(windows[at])[missed[at]]
        return costs

    def _backed_off(self, windows: Words) -> Costs:
        """Costs without the longest grams, where each window is that of the next byte. After a gap they may be wrong,
        but no such byte was missed; and the last before a gap begins a gram that was found, so its shorter ones are
        there and hold up no search."""
        pairs = windows.astype(np.uint16)
        costs, backs = self.pair_costs.take(pairs), self.pair_backs.take(pairs)
        for n, table in enumerate(self.tables[:-1], start=3):
            seen = backs != NOT_SEEN
            costs[1:] += np.maximum(backs[:-1], 0)
            # A gram was counted only where its first and its last n-1 bytes were.
            seen[1:] &= seen[:-1]
            asked = np.flatnonzero(seen)
            values = find(table, windows[asked] & mask(n))
            hit = np.flatnonzero(values != _EMPTY)
            asked, values = asked[hit], values[hit]
            costs[asked] = (values & np.uint64(2**32 - 1)).astype(np.int32)
            backs = np.full(windows.size, NOT_SEEN, dtype=np.int32)
            backs[asked] = (values >> _HALF).astype(np.int32)
        costs[1:] += np.maximum(backs[:-1], 0)
        return costs

    def grams(self) -> dict[int, int]:
        """How many n-grams of each length the model holds."""
        longer = enumerate(self.tables, start=3)
        two = int((self.pair_backs >= 0).sum())
        return {2: two} | {n: int((table[::2] != _EMPTY).sum()) for n, table in longer}

    def save(self, path: Path) -> None:
        about = {"order": self.order, "report": self.report}
        arrays = {f"table-{n}": table for n, table in enumerate(self.tables, start=3)}
        pairs = {"pair-costs": self.pair_costs, "pair-backs": self.pair_backs}
        save_model(path, KIND, VERSION, about, pairs | arrays)


def load(path: str | Path) -> PerplexityModel:
    """A model that `train_perplexity` wrote. It stays in the file; its pages are shared by all processes."""
    about, arrays = load_model(path, KIND, VERSION, "`bessemer data perplexity`")
    try:
        order = about["order"]
        tables = [arrays[f"table-{n}"] for n in range(3, order + 1)]
        return PerplexityModel(order, arrays["pair-costs"], arrays["pair-backs"], tables, about["report"])
    except (KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path}: the perplexity model is damaged ({error!r}); train it again") from error


def mask(n: int) -> np.uint64:
    return np.uint64(2 ** (8 * n) - 1)


def _windows(text: npt.NDArray[np.uint8]) -> Words:
    """The eight bytes that end at each byte, the last in the lowest bits; EDGE stands before the first."""
    padded = np.concatenate([np.full(LONGEST - 1, EDGE, dtype=np.uint8), text])
    overlapping = np.lib.stride_tricks.sliding_window_view(padded, LONGEST)
    return np.ascontiguousarray(overlapping).view(">u8").ravel().astype(np.uint64)


def make_table(keys: Words, values: Words) -> Words:
    """A hash table with open addressing: key, value, key, value. Keys are different from each other."""
    slots = int(keys.size / _FILLED) + 1
    rank = np.arange(keys.size)
    while True:
        home = _home(keys, slots)
        order = np.argsort(home, kind="stable")
        # Each key takes its own place or, if that is taken, the first after the key before it.
        places = np.maximum.accumulate(home[order] - rank) + rank
        if not keys.size or places[-1] < slots + _TAIL - 1:
            break
        slots += _TAIL  # the last place stays empty, so that no search runs over the end
    table = np.full(2 * (slots + _TAIL), _EMPTY)
    table[2 * places] = keys[order]
    table[2 * places + 1] = values[order]
    return table


def find(table: Words, keys: Words) -> Words:
    """The value of each key, or all ones where there is none."""
    places = 2 * _home(keys, table.size // 2 - _TAIL)
    values = np.full(keys.size, _EMPTY)
    pending = np.arange(keys.size)
    while pending.size:
        there = table.take(places)
        hit = there == keys
        values[pending[hit]] = table.take(places[hit] + 1)
        on = np.flatnonzero(~hit & (there != _EMPTY))
        pending, keys, places = pending[on], keys[on], places[on] + 2
    return values


def _home(keys: Words, slots: int) -> Ints:
    return ((((keys * _SPREAD) >> _HALF) * np.uint64(slots)) >> _HALF).view(np.int64)
