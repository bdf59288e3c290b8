"""The step `perplexity`: how surprising a model of good text finds each document, in bits per byte. The model counts
n-grams of bytes: they need no vocabulary, fit every language, and up to eight of them are one exact 64-bit key, so
probabilities sum to one. Costs are integers (2^-20 bits), so a score is the same on any machine and in any batch.

Training is interpolated modified Kneser-Ney, after Chen and Goodman (1998) and Heafield et al. (2013). Grams at the
beginning of a text keep their counts; all others below the highest order count the distinct bytes before them. Pruned
grams leave their mass to the shorter context, so every distribution sums to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.scores.classifier import Ints, Words, join_texts, load_model, save_model
from bessemer.data.curate.scores.threshold import Floats, ScoredStep, Threshold
from bessemer.data.curate.step import file_identity
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.scores import PerplexitySpec

KIND, VERSION = "perplexity model", 1
BIT = 1 << 20  # the cost of one bit
EDGE = 0xFF  # precedes a text: a byte that UTF-8 does not use
LONGEST = 8  # bytes in a 64-bit key
UNSURE_BITS = 8.0  # of an empty text: like random bytes
NOT_SEEN = -1
_PIECE_BYTES = 1 << 16  # looked up together, so that the arrays stay in the CPU cache
_EMPTY = np.uint64(2**64 - 1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_TAIL = 64  # slots after the last home slot
_FILLED = 0.6  # of a table: 1.75 lookups on average for a present key

Costs = npt.NDArray[np.int32]


@dataclass
class PerplexityModel:
    """`pair_costs` and `pair_backs` have an entry per two bytes: the cost of the second after the first, and the cost
    of backing off from both, NOT_SEEN where they never occurred together. `tables` are for 3 bytes and more."""

    order: int
    pair_costs: Costs
    pair_backs: Costs
    tables: list[Words]
    report: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.pair_costs.shape == self.pair_backs.shape == (1 << 16,)
        assert len(self.tables) == self.order - 2

    def bits_per_byte(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """The model's bits for each text over the length of its UTF-8. 12 MB/s on one core for text like the training
        text, 5 MB/s for other text, with a model of 180 MB."""
        costs = np.zeros(len(texts), dtype=np.int64)
        sizes = np.zeros(len(texts), dtype=np.int64)
        # Each piece includes the context before it, so pieces give the same result as the whole text.
        for buffer, owners, starts, stops in join_texts(texts, _PIECE_BYTES, bytes([EDGE]), self.order - 1):
            running = np.zeros(len(buffer) + 1, dtype=np.int64)
            np.cumsum(self.costs(np.frombuffer(buffer, np.uint8)), out=running[1:])
            np.add.at(costs, owners, running[stops] - running[starts])
            np.add.at(sizes, owners, stops - starts)
        return np.where(sizes > 0, costs / np.maximum(sizes, 1) / BIT, UNSURE_BITS)

    def costs(self, text: npt.NDArray[np.uint8]) -> Costs:
        """The cost of each byte after those before it. EDGE starts a new text; costs of edges, and the first, are
        meaningless. The longest grams are looked up first: where they are found, as in most text similar to the
        training text, nothing else is needed. Backing off needs the shorter grams of a byte and of the one before it.
        """
        windows = _windows(text)
        values = look_up(self.tables[-1], windows & mask(self.order))
        costs = (values & np.uint64(2**32 - 1)).astype(np.int32)
        missed = values == _EMPTY
        needed = missed.copy()
        needed[:-1] |= missed[1:]
        at = np.flatnonzero(needed)
        costs[missed] = self._backed_off(windows[at])[missed[at]]
        return costs

    def _backed_off(self, windows: Words) -> Costs:
        """Costs without the longest grams; each window belongs to the next byte. After a gap they may be wrong, but no
        such byte was missed; the last one before a gap begins a gram that was found, so its shorter grams exist."""
        pairs = windows.astype(np.uint16)
        costs, backs = self.pair_costs.take(pairs), self.pair_backs.take(pairs)
        for n, table in enumerate(self.tables[:-1], start=3):
            seen = backs != NOT_SEEN
            costs[1:] += np.maximum(backs[:-1], 0)
            # A gram was counted only where its first and its last n-1 bytes were.
            seen[1:] &= seen[:-1]
            queried = np.flatnonzero(seen)
            values = look_up(table, windows[queried] & mask(n))
            hit = np.flatnonzero(values != _EMPTY)
            queried, values = queried[hit], values[hit]
            costs[queried] = (values & np.uint64(2**32 - 1)).astype(np.int32)
            backs = np.full(windows.size, NOT_SEEN, dtype=np.int32)
            backs[queried] = (values >> _HALF).astype(np.int32)
        costs[1:] += np.maximum(backs[:-1], 0)
        return costs

    def grams(self) -> dict[int, int]:
        """The number of n-grams of each length."""
        longer = enumerate(self.tables, start=3)
        two = int((self.pair_backs >= 0).sum())
        return {2: two} | {n: int((table[::2] != _EMPTY).sum()) for n, table in longer}

    def save(self, path: Path) -> None:
        metadata = {"order": self.order, "report": self.report}
        arrays = {f"table-{n}": table for n, table in enumerate(self.tables, start=3)}
        pairs = {"pair-costs": self.pair_costs, "pair-backs": self.pair_backs}
        save_model(path, KIND, VERSION, metadata, pairs | arrays)


def load(path: str | Path) -> PerplexityModel:
    """A model that `train_perplexity` wrote. It stays in the file; its pages are shared by all processes."""
    metadata, arrays = load_model(path, KIND, VERSION, "`bessemer data perplexity`")
    try:
        order = metadata["order"]
        tables = [arrays[f"table-{n}"] for n in range(3, order + 1)]
        return PerplexityModel(order, arrays["pair-costs"], arrays["pair-backs"], tables, metadata["report"])
    except (KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{path}: the perplexity model is damaged ({error!r}); train it again") from error


def mask(n: int) -> np.uint64:
    return np.uint64(2 ** (8 * n) - 1)


def _windows(text: npt.NDArray[np.uint8]) -> Words:
    """The eight bytes that end at each byte, the last in the lowest bits; EDGE precedes the first."""
    padded = np.concatenate([np.full(LONGEST - 1, EDGE, dtype=np.uint8), text])
    overlapping = np.lib.stride_tricks.sliding_window_view(padded, LONGEST)
    return np.ascontiguousarray(overlapping).view(">u8").ravel().astype(np.uint64)


def make_table(keys: Words, values: Words) -> Words:
    """A hash table with open addressing: key, value, key, value. Keys are distinct."""
    slots = int(keys.size / _FILLED) + 1
    rank = np.arange(keys.size)
    while True:
        home = _home(keys, slots)
        order = np.argsort(home, kind="stable")
        # Each key takes its home slot or, if that is taken, the first after the previous key.
        places = np.maximum.accumulate(home[order] - rank) + rank
        if not keys.size or places[-1] < slots + _TAIL - 1:
            break
        slots += _TAIL  # the last slot stays empty, so that no search passes the end
    table = np.full(2 * (slots + _TAIL), _EMPTY)
    table[2 * places] = keys[order]
    table[2 * places + 1] = values[order]
    return table


def look_up(table: Words, keys: Words) -> Words:
    """The value of each key, or all ones where there is none."""
    places = 2 * _home(keys, table.size // 2 - _TAIL)
    values = np.full(keys.size, _EMPTY)
    pending = np.arange(keys.size)
    while pending.size:
        stored = table.take(places)
        hit = stored == keys
        values[pending[hit]] = table.take(places[hit] + 1)
        on = np.flatnonzero(~hit & (stored != _EMPTY))
        pending, keys, places = pending[on], keys[on], places[on] + 2
    return values


def _home(keys: Words, slots: int) -> Ints:
    return ((((keys * _SPREAD) >> _HALF) * np.uint64(slots)) >> _HALF).view(np.int64)


_BLOCK = 1 << 22  # n-grams sorted at once
_PRUNED_FROM = 4  # shorter grams are few
_FALLBACK = (0.5, 1.0, 1.5)  # discounts where the counts give none


@dataclass(frozen=True)
class NgramCounts:
    """All n-grams of one length, sorted. The earliest byte is the highest of a key."""

    keys: Words
    raw: Ints  # how often each was seen
    counts: Ints  # the counts that Kneser-Ney smooths


@dataclass(frozen=True)
class SmoothedNgrams:
    """The kept grams of one order, their probabilities, and the mass that their contexts leave to the shorter order."""

    keys: Words
    chances: Floats
    contexts: Words
    backs: Floats


def count_and_smooth(texts: Sequence[str], order: int, min_count: int = 1) -> PerplexityModel:
    """The model of some texts. Grams of four bytes and more seen fewer than `min_count` times are pruned. Memory: 24
    bytes per distinct gram of the highest order, plus the texts."""
    if not 3 <= order <= LONGEST:
        raise UserError(f"order {order}: a perplexity model counts runs of 3 to {LONGEST} bytes")
    orders = count(texts, order)
    if not orders[0].keys.size:
        raise UserError("there is no text to count; give texts that are not empty")
    smoothed: list[SmoothedNgrams] = []
    for n, grams in enumerate(orders, start=1):
        least = min_count if n >= _PRUNED_FROM else 1
        smoothed.append(smooth(grams, n, smoothed[-1] if smoothed else None, least))
    backs = [_align_backoffs(a.keys, b.contexts, b.backs) for a, b in pairwise(smoothed)]
    backs.append(np.ones(smoothed[-1].keys.size))  # nothing follows the longest
    tables = []
    for grams_kept, back in zip(smoothed[2:], backs[2:], strict=True):
        packed = (_cost(back) << 32) | _cost(grams_kept.chances)
        tables.append(make_table(grams_kept.keys, packed.astype(np.uint64)))
    pair_costs, pair_backs = _pairs(smoothed[0], smoothed[1], backs[1])
    return PerplexityModel(order, pair_costs, pair_backs, tables, {})


def count(texts: Sequence[str], order: int) -> list[NgramCounts]:
    """The grams of 1 to `order` bytes, shortest first."""
    ngrams = _merge_runs(_blocks(texts, order))
    grams = [NgramCounts(ngrams[0], ngrams[1], ngrams[1])]
    for n in range(order - 1, 0, -1):
        longer = grams[-1]
        keys, which, counts = np.unique(longer.keys & mask(n), return_inverse=True, return_counts=True)
        raw = np.bincount(which, longer.raw, keys.size).astype(np.int64)
        heads, head_counts = _count_heads(texts, n)
        keys = np.concatenate([keys, heads])  # heads begin with the highest byte, so they come last
        grams.append(NgramCounts(keys, np.concatenate([raw, head_counts]), np.concatenate([counts, head_counts])))
    return grams[::-1]


def _count_heads(texts: Sequence[str], n: int) -> tuple[Words, Ints]:
    """Grams of the edge and the first n-1 bytes of each text that is long enough; the edge alone is no gram."""
    starts = [text[:n].encode()[: n - 1] for text in texts] if n > 1 else []
    keys = [int.from_bytes(bytes([EDGE]) + start, "big") for start in starts if len(start) == n - 1]
    unique, counts = np.unique(np.array(keys, dtype=np.uint64), return_counts=True)
    return unique, counts.astype(np.int64)


def _blocks(texts: Sequence[str], n: int) -> Iterator[tuple[Words, Ints]]:
    """Sorted n-grams and their counts, block by block."""
    waiting: list[Words] = []
    size = 0
    for text in texts:
        data = np.frombuffer(bytes([EDGE]) + text.encode(), np.uint8)
        if data.size < n:
            continue
        keys = np.zeros(data.size - n + 1, dtype=np.uint64)
        for k in range(n):
            keys = (keys << np.uint64(8)) | data[k : k + keys.size]
        waiting.append(keys)
        size += keys.size
        if size >= _BLOCK:
            yield _count_unique(np.concatenate(waiting))
            waiting, size = [], 0
    yield _count_unique(np.concatenate(waiting) if waiting else np.empty(0, np.uint64))


def _count_unique(keys: Words) -> tuple[Words, Ints]:
    unique, counts = np.unique(keys, return_counts=True)
    return unique, counts.astype(np.int64)


def _merge_runs(blocks: Iterator[tuple[Words, Ints]]) -> tuple[Words, Ints]:
    """One sorted run from many; each gram is merged a logarithmic number of times."""
    runs: list[tuple[Words, Ints]] = []
    for block in blocks:
        runs.append(block)
        while len(runs) > 1 and runs[-2][0].size <= 2 * runs[-1][0].size:
            runs.append(_merge(runs.pop(), runs.pop()))
    while len(runs) > 1:
        runs.append(_merge(runs.pop(), runs.pop()))
    return runs[0]


def _merge(first: tuple[Words, Ints], second: tuple[Words, Ints]) -> tuple[Words, Ints]:
    keys = np.concatenate([first[0], second[0]])
    counts = np.concatenate([first[1], second[1]])
    order = np.argsort(keys, kind="stable")  # linear for two sorted runs
    keys, counts = keys[order], counts[order]
    new = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: keys.size])
    return keys[new], np.add.reduceat(counts, new) if new.size else counts


def smooth(grams: NgramCounts, n: int, lower: SmoothedNgrams | None, min_count: int) -> SmoothedNgrams:
    """Subtracts a discount from the counts; the next shorter order distributes the mass (for single bytes: evenly)."""
    discounts = np.array([0.0, *estimate_discounts(grams.counts)])
    level = np.minimum(grams.counts, 3)
    contexts, which = np.unique(grams.keys >> np.uint64(8), return_inverse=True)
    totals = np.bincount(which, grams.counts, contexts.size)
    is_kept = grams.raw >= min_count
    # Integers up to the last step, so the result does not depend on the order of a float sum.
    left = totals - np.bincount(which[is_kept], grams.counts[is_kept], contexts.size)
    for k in (1, 2, 3):
        left += discounts[k] * np.bincount(which[is_kept & (level == k)], minlength=contexts.size)
    backs = left / totals
    keys = grams.keys[is_kept]
    chances = (grams.counts - discounts[level])[is_kept] / totals[which[is_kept]]
    if lower is None:
        everything = np.full(256, backs[0] / 256)
        everything[keys.view(np.int64)] += chances
        return SmoothedNgrams(np.arange(256, dtype=np.uint64), everything, contexts, backs)
    shorter = np.searchsorted(lower.keys, keys & mask(n - 1))
    return SmoothedNgrams(keys, chances + backs[which[is_kept]] * lower.chances[shorter], contexts, backs)


def estimate_discounts(counts: Ints) -> tuple[float, ...]:
    """The discounts of counts of 1, of 2 and of more, from how many grams were counted once to four times."""
    once, twice, thrice, four = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].tolist()
    if not (once and twice and thrice):
        return _FALLBACK
    share = once / (once + 2 * twice)
    pairs = ((once, twice), (twice, thrice), (thrice, four))
    discounts = tuple(k - (k + 1) * share * more / less for k, (less, more) in enumerate(pairs, start=1))
    sound = all(0 < discount < k for k, discount in enumerate(discounts, start=1))
    return discounts if sound else _FALLBACK


def _pairs(
    unigrams: SmoothedNgrams, bigrams: SmoothedNgrams, backs: Floats
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Costs of all pairs of bytes, including unseen ones, and of backing off from a pair."""
    first = np.ones(256)
    first[bigrams.contexts.view(np.int64)] = bigrams.backs
    chances = (first[:, None] * unigrams.chances).ravel()
    chances[bigrams.keys.view(np.int64)] = bigrams.chances
    pair_backs = np.full(1 << 16, NOT_SEEN, dtype=np.int32)
    pair_backs[bigrams.keys.view(np.int64)] = _cost(backs)
    return _cost(chances).astype(np.int32), pair_backs


def _align_backoffs(keys: Words, contexts: Words, backs: Floats) -> Floats:
    """The mass that each gram leaves to shorter contexts: all of it where nothing followed the gram."""
    aligned = np.ones(keys.size)
    if contexts.size:
        at = np.minimum(np.searchsorted(contexts, keys), contexts.size - 1)
        hit = contexts[at] == keys
        aligned[hit] = backs[at[hit]]
    return aligned


def _cost(chances: Floats) -> Ints:
    return np.rint(-np.log2(chances) * BIT).astype(np.int64)


class Perplexity(ScoredStep):
    """The least surprising documents are the best; `head`, `middle` and `tail` label them as in CCNet."""

    judging = ("keep", "per", "head", "middle")

    def __init__(self, spec: PerplexitySpec, seed: int) -> None:
        self.spec = spec
        self.model = load(spec.model)
        parts = [("head", spec.head), ("middle", spec.middle)]
        self.threshold = Threshold("perplexity", spec.keep, spec.per, seed, lower_is_better=True, parts=parts)

    @cached_property
    def identity(self) -> str:
        return file_identity(self.spec.model)

    def scores(self, documents: Sequence[Document]) -> Floats:
        return self.model.bits_per_byte([document.text for document in documents])
