"""Finds the m best of all collected scores exactly, in memory that does not grow with them. Scores become 64-bit keys
in the same order, and equal scores are told apart by a hash of the document's place, so that any number can be kept
exactly and a tie favours no file. Passes over the collected files narrow both down by twelve bits at a time until
what is left fits into memory. The answer depends on the parts, never on workers or batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.order import chain
from bessemer.data.step import Collected, Each

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_DIGIT_BITS = 12
_MOST_GATHERED = 1 << 19  # records of 32 bytes sorted at once
_MOST_TASKS = 512  # a histogram from each is in memory at once: 32 KiB
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class Ranking:
    """What makes a score better than another."""

    lower_is_better: bool
    seed: int

    def keys(self, scores: Floats) -> Words:
        """Larger is better."""
        better = -scores if self.lower_is_better else scores
        bits = (better + 0.0).view(np.uint64)  # -0.0 becomes 0.0
        return np.where(bits & _SIGN, ~bits, bits | _SIGN)

    def ties(self, part: int, ordinals: Ints) -> Words:
        """The order of equal scores: as good as random, the same for ever."""
        return chain(self.seed % 2**64, part, ordinals)

    def reach(self, scores: Floats, part: int, ordinals: Ints, cut: Words) -> npt.NDArray[np.bool_]:
        """Which of a part's documents are as good as the cut or better."""
        columns = (self.keys(scores), self.ties(part, ordinals), np.full(ordinals.size, part), ordinals)
        reached = np.zeros(ordinals.size, dtype=bool)
        equal = np.ones(ordinals.size, dtype=bool)
        for column, limit in zip(columns, cut, strict=True):
            words = column.astype(np.uint64)
            reached |= equal & (words > limit)
            equal &= words == limit
        return reached | equal


@dataclass(frozen=True)
class _Bucket:
    """The records whose key, followed by whose tie, begins with `bits` given bits."""

    bits: int = 0
    begin: int = 0  # those bits

    def holds(self, keys: Words, ties: Words) -> npt.NDArray[np.bool_]:
        held = np.ones(keys.size, dtype=bool)
        tie_bits = max(self.bits - 64, 0)
        of_key = (keys, self.bits - tie_bits, self.begin >> tie_bits)
        for words, count, wanted in (of_key, (ties, tie_bits, self.begin)):
            if count:
                held &= (words >> np.uint64(64 - count)) == np.uint64(wanted % 2**count)
        return held

    @property
    def width(self) -> int:
        """Bits of the next digit: the last of a word is shorter."""
        return min(_DIGIT_BITS, 64 - self.bits % 64)

    def digits(self, keys: Words, ties: Words) -> Ints:
        word = keys if self.bits < 64 else ties
        shifted = word >> np.uint64(64 - self.bits % 64 - self.width)
        return (shifted & np.uint64(2**self.width - 1)).astype(np.int64)

    def narrowed(self, digit: int) -> _Bucket:
        return _Bucket(self.bits + self.width, self.begin << self.width | digit)


def best(collected: Sequence[Collected], wanted: int, total: int, ranking: Ranking, each: Each) -> Words:
    """The cut that exactly `wanted` of the `total` records reach: key, tie, part, ordinal of the last one kept."""
    assert 0 < wanted <= total
    tasks = in_groups(collected)
    bucket, inside = _Bucket(), total
    while inside > _MOST_GATHERED and bucket.bits < 128:
        counts = sum(each(_histogram, [(group, ranking, bucket) for group in tasks]))
        # Walk down from the best digit to the one in which the last record kept lies.
        reached = np.cumsum(counts[::-1])
        step = int(np.searchsorted(reached, wanted))
        digit = len(counts) - 1 - step
        wanted -= int(reached[step] - counts[digit])
        bucket, inside = bucket.narrowed(digit), int(counts[digit])
    found = each(_gather, [(group, ranking, bucket) for group in tasks])
    records = np.concatenate(found)
    order = np.lexsort(records.T[::-1])
    cut: Words = records[order[len(order) - wanted]]
    return cut


def score_of(cut: Words, ranking: Ranking) -> float:
    """The score of a cut's record."""
    key = cut[:1]
    bits = np.where(key & _SIGN, key ^ _SIGN, ~key)
    return float(bits.view(np.float64)[0]) * (-1.0 if ranking.lower_is_better else 1.0) + 0.0


def in_groups(collected: Sequence[Collected]) -> list[list[Collected]]:
    """The parts as tasks, each of several where there are many: results of all tasks are in memory at once."""
    count = min(len(collected), _MOST_TASKS)
    edges = [len(collected) * k // count for k in range(count + 1)] if count else [0]
    return [list(collected[a:b]) for a, b in pairwise(edges)]


def scored(part: Collected) -> tuple[Ints, Floats]:
    """Ordinals and scores of a part; none where no document was left to score."""
    arrays = part.load()
    if "score" not in arrays:
        return np.empty(0, np.int64), np.empty(0)
    return arrays["ordinal"], arrays["score"]


def _records(part: Collected, ranking: Ranking, bucket: _Bucket) -> tuple[Words, Words, Ints]:
    ordinals, scores = scored(part)
    keys = ranking.keys(scores)
    ties = ranking.ties(part.part, ordinals)
    held = bucket.holds(keys, ties)
    return keys[held], ties[held], ordinals[held]


def _histogram(task: tuple[list[Collected], Ranking, _Bucket]) -> Ints:
    group, ranking, bucket = task
    counts = np.zeros(2**bucket.width, dtype=np.int64)
    for part in group:
        keys, ties, _ = _records(part, ranking, bucket)
        counts += np.bincount(bucket.digits(keys, ties), minlength=counts.size)
    return counts


def _gather(task: tuple[list[Collected], Ranking, _Bucket]) -> Words:
    group, ranking, bucket = task
    found: list[Any] = [np.empty((0, 4), dtype=np.uint64)]
    for part in group:
        keys, ties, ordinals = _records(part, ranking, bucket)
        place = np.full(keys.size, part.part, dtype=np.uint64)
        found.append(np.stack([keys, ties, place, ordinals.astype(np.uint64)], axis=1))
    return np.concatenate(found)
