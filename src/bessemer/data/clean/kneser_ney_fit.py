"""Makes the perplexity model: counts n-grams of bytes and smooths them by interpolated modified Kneser-Ney. After
Chen and Goodman (1998) and Heafield et al. (2013). Grams at the beginning of a text are counted as they are, all
others below the highest order by the number of different bytes before them. Pruned grams leave their mass to the
shorter context, so every distribution sums to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bessemer.data.clean.kneser_ney import BIT, EDGE, LONGEST, NOT_SEEN, PerplexityModel, make_table, mask
from bessemer.data.clean.selection import Floats, Ints, Words
from bessemer.errors import UserError

_BLOCK = 1 << 22  # n-grams sorted at once
_PRUNED_FROM = 4  # shorter grams are few
_FALLBACK = (0.5, 1.0, 1.5)  # discounts where counts of counts do not give any


@dataclass(frozen=True)
class Grams:
    """All n-grams of one length, sorted. The earliest byte is the highest of a key."""

    keys: Words
    raw: Ints  # how often each was seen
    counts: Ints  # the counts that Kneser-Ney smooths


@dataclass(frozen=True)
class Smooth:
    """One order's grams that are kept, their probabilities, and what their contexts keep for the shorter order."""

    keys: Words
    chances: Floats
    contexts: Words
    backs: Floats


def count_and_smooth(texts: Sequence[str], order: int, min_count: int = 1) -> PerplexityModel:
    """The model of some texts. Grams of four bytes and more that were seen less than `min_count` times are pruned.
    Memory: 24 bytes for each different gram of the highest order, and the texts."""
    if not 3 <= order <= LONGEST:
        raise UserError(f"order {order}: a perplexity model counts runs of 3 to {LONGEST} bytes")
    orders = count(texts, order)
    if not orders[0].keys.size:
        raise UserError("there is no text to count; give texts that are not empty")
    smoothed: list[Smooth] = []
    for n, grams in enumerate(orders, start=1):
        least = min_count if n >= _PRUNED_FROM else 1
        smoothed.append(smooth(grams, n, smoothed[-1] if smoothed else None, least))
    backs = [_aligned(a.keys, b.contexts, b.backs) for a, b in pairwise(smoothed)]
    backs.append(np.ones(smoothed[-1].keys.size))  # nothing follows the longest
    tables = []
    for grams_kept, back in zip(smoothed[2:], backs[2:], strict=True):
        packed = (_cost(back) << 32) | _cost(grams_kept.chances)
        tables.append(make_table(grams_kept.keys, packed.astype(np.uint64)))
    pair_costs, pair_backs = _pairs(smoothed[0], smoothed[1], backs[1])
    return PerplexityModel(order, pair_costs, pair_backs, tables, {})


def count(texts: Sequence[str], order: int) -> list[Grams]:
    """The grams of 1 to `order` bytes, shortest first."""
    found = _merged(_blocks(texts, order))
    grams = [Grams(found[0], found[1], found[1])]
    for n in range(order - 1, 0, -1):
        longer = grams[-1]
        keys, which, counts = np.unique(longer.keys & mask(n), return_inverse=True, return_counts=True)
        raw = np.bincount(which, longer.raw, keys.size).astype(np.int64)
        heads, head_counts = _heads(texts, n)
        keys = np.concatenate([keys, heads])  # heads begin with the highest byte: they follow in order
        grams.append(Grams(keys, np.concatenate([raw, head_counts]), np.concatenate([counts, head_counts])))
    return grams[::-1]


def _heads(texts: Sequence[str], n: int) -> tuple[Words, Ints]:
    """Grams of the edge and the first n-1 bytes of each text that has so many; the edge alone is no gram."""
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
            yield _unique(np.concatenate(waiting))
            waiting, size = [], 0
    yield _unique(np.concatenate(waiting) if waiting else np.empty(0, np.uint64))


def _unique(keys: Words) -> tuple[Words, Ints]:
    found, counts = np.unique(keys, return_counts=True)
    return found, counts.astype(np.int64)


def _merged(blocks: Iterator[tuple[Words, Ints]]) -> tuple[Words, Ints]:
    """One sorted run from many, each gram merged only as often as the logarithm of their number."""
    runs: list[tuple[Words, Ints]] = []
    for block in blocks:
        runs.append(block)
        while len(runs) > 1 and runs[-2][0].size <= 2 * runs[-1][0].size:
            runs.append(_merge(runs.pop(), runs.pop()))
    while len(runs) > 1:
        runs.append(_merge(runs.pop(), runs.pop()))
    return runs[0]


def _merge(one: tuple[Words, Ints], other: tuple[Words, Ints]) -> tuple[Words, Ints]:
    keys = np.concatenate([one[0], other[0]])
    counts = np.concatenate([one[1], other[1]])
    order = np.argsort(keys, kind="stable")  # linear for two sorted runs
    keys, counts = keys[order], counts[order]
    new = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: keys.size])
    return keys[new], np.add.reduceat(counts, new) if new.size else counts


def smooth(grams: Grams, n: int, lower: Smooth | None, min_count: int) -> Smooth:
    """Counts less a discount; the mass so gained is shared out by the next shorter order (for single bytes: evenly)."""
    discounts = np.array([0.0, *discounts_of(grams.counts)])
    level = np.minimum(grams.counts, 3)
    contexts, which = np.unique(grams.keys >> np.uint64(8), return_inverse=True)
    totals = np.bincount(which, grams.counts, contexts.size)
    kept = grams.raw >= min_count
    # Whole numbers up to the last step: what is left does not depend on the order of a float sum.
    left = totals - np.bincount(which[kept], grams.counts[kept], contexts.size)
    for k in (1, 2, 3):
        left += discounts[k] * np.bincount(which[kept & (level == k)], minlength=contexts.size)
    backs = left / totals
    keys = grams.keys[kept]
    chances = (grams.counts - discounts[level])[kept] / totals[which[kept]]
    if lower is None:
        everything = np.full(256, backs[0] / 256)
        everything[keys.view(np.int64)] += chances
        return Smooth(np.arange(256, dtype=np.uint64), everything, contexts, backs)
    shorter = np.searchsorted(lower.keys, keys & mask(n - 1))
    return Smooth(keys, chances + backs[which[kept]] * lower.chances[shorter], contexts, backs)


def discounts_of(counts: Ints) -> tuple[float, ...]:
    """What is taken off a count of 1, of 2, and of more, from how many grams were counted once to four times."""
    once, twice, thrice, four = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].tolist()
    if not (once and twice and thrice):
        return _FALLBACK
    share = once / (once + 2 * twice)
    pairs = ((once, twice), (twice, thrice), (thrice, four))
    found = tuple(k - (k + 1) * share * more / less for k, (less, more) in enumerate(pairs, start=1))
    sound = all(0 < discount < k for k, discount in enumerate(found, start=1))
    return found if sound else _FALLBACK


def _pairs(one: Smooth, two: Smooth, backs: Floats) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Costs of all pairs of bytes, also of those never seen, and what backing off from a pair costs."""
    first = np.ones(256)
    first[two.contexts.view(np.int64)] = two.backs
    chances = (first[:, None] * one.chances).ravel()
    chances[two.keys.view(np.int64)] = two.chances
    pair_backs = np.full(1 << 16, NOT_SEEN, dtype=np.int32)
    pair_backs[two.keys.view(np.int64)] = _cost(backs)
    return _cost(chances).astype(np.int32), pair_backs


def _aligned(keys: Words, contexts: Words, backs: Floats) -> Floats:
    """What each gram keeps for shorter contexts: all of it where nothing was ever seen after the gram."""
    found = np.ones(keys.size)
    if contexts.size:
        at = np.minimum(np.searchsorted(contexts, keys), contexts.size - 1)
        hit = contexts[at] == keys
        found[hit] = backs[at[hit]]
    return found


def _cost(chances: Floats) -> Ints:
    return np.rint(-np.log2(chances) * BIT).astype(np.int64)
