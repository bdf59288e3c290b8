"""Which documents a scoring step keeps, and what it reports: the part that all scoring steps share. A step collects
{"ordinal", "score"}; `Threshold` resolves `keep: best 25%` over the corpus or each source and turns the decisions into
outcomes.

The m best scores are found exactly, in constant memory. Scores become 64-bit keys in the same order, and equal scores
are ordered by a hash of the document's place, so any number can be kept exactly and a tie favours no file. Passes over
the collected files narrow both by twelve bits at a time until the rest fits into memory. The result depends on the
parts, never on workers or batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.step import Arrays, Collected, Drop, Outcome, RunTasks
from bessemer.data.read.entry import Document
from bessemer.data.stream.order import chain
from bessemer.spec.curate.scores import Bounds, best_share

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_DIGIT_BITS = 12
_MOST_GATHERED = 1 << 19  # records of 32 bytes sorted at once
_MOST_TASKS = 512  # each has a histogram of 32 KiB in memory
_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class ScoreRanking:
    """The order of scores."""

    lower_is_better: bool
    seed: int

    def keys(self, scores: Floats) -> Words:
        """Larger is better."""
        better = -scores if self.lower_is_better else scores
        bits = (better + 0.0).view(np.uint64)  # -0.0 becomes 0.0
        return np.where(bits & _SIGN, ~bits, bits | _SIGN)

    def ties(self, part: int, ordinals: Ints) -> Words:
        """The order of equal scores: pseudo-random but fixed."""
        return chain(self.seed % 2**64, part, ordinals)

    def reach(self, scores: Floats, part: int, ordinals: Ints, cut: Words) -> npt.NDArray[np.bool_]:
        """Which of a part's documents are at least as good as the cut."""
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
    """The records whose key, followed by their tie, starts with the given `bits` bits."""

    bits: int = 0
    begin: int = 0  # the bits

    def contains(self, keys: Words, ties: Words) -> npt.NDArray[np.bool_]:
        matches = np.ones(keys.size, dtype=bool)
        tie_bits = max(self.bits - 64, 0)
        of_key = (keys, self.bits - tie_bits, self.begin >> tie_bits)
        for words, count, prefix in (of_key, (ties, tie_bits, self.begin)):
            if count:
                matches &= (words >> np.uint64(64 - count)) == np.uint64(prefix % 2**count)
        return matches

    @property
    def width(self) -> int:
        """Bits of the next digit: the last of a word is shorter."""
        return min(_DIGIT_BITS, 64 - self.bits % 64)

    def digits(self, keys: Words, ties: Words) -> Ints:
        word = keys if self.bits < 64 else ties
        shifted = word >> np.uint64(64 - self.bits % 64 - self.width)
        return (shifted & np.uint64(2**self.width - 1)).astype(np.int64)


def find_cut(
    collected: Sequence[Collected], count: int, total: int, ranking: ScoreRanking, run_tasks: RunTasks
) -> Words:
    """The cut that exactly `count` of the `total` records reach: key, tie, part, ordinal of the last one kept."""
    assert 0 < count <= total
    tasks = group_parts(collected)
    bucket, inside = _Bucket(), total
    while inside > _MOST_GATHERED and bucket.bits < 128:
        counts: Ints = np.sum(run_tasks(_histogram, [(group, ranking, bucket) for group in tasks]), axis=0)
        # Find the digit of the last record to keep, from the best down.
        reached = np.cumsum(counts[::-1])
        step = int(np.searchsorted(reached, count))
        digit = len(counts) - 1 - step
        count -= int(reached[step] - counts[digit])
        bucket = _Bucket(bucket.bits + bucket.width, bucket.begin << bucket.width | digit)
        inside = int(counts[digit])
    groups = run_tasks(_gather, [(group, ranking, bucket) for group in tasks])
    records = np.concatenate(groups)
    order = np.lexsort(records.T[::-1])
    cut: Words = records[order[len(order) - count]]
    return cut


def score_at_cut(cut: Words, ranking: ScoreRanking) -> float:
    """The score of a cut's record."""
    key = cut[:1]
    bits = np.where(key & _SIGN, key ^ _SIGN, ~key)
    return float(bits.view(np.float64)[0]) * (-1.0 if ranking.lower_is_better else 1.0) + 0.0


def group_parts(collected: Sequence[Collected]) -> list[list[Collected]]:
    """The parts as tasks, several per task where there are many: the results of all tasks are in memory at once."""
    count = min(len(collected), _MOST_TASKS)
    edges = [len(collected) * k // count for k in range(count + 1)] if count else [0]
    return [list(collected[a:b]) for a, b in pairwise(edges)]


def load_scores(part: Collected) -> tuple[Ints, Floats]:
    """Ordinals and scores of a part; empty where no document was left to score."""
    arrays = part.load()
    if "score" not in arrays:
        return np.empty(0, np.int64), np.empty(0)
    return arrays["ordinal"], arrays["score"]


def _records(part: Collected, ranking: ScoreRanking, bucket: _Bucket) -> tuple[Words, Words, Ints]:
    ordinals, scores = load_scores(part)
    keys = ranking.keys(scores)
    ties = ranking.ties(part.part, ordinals)
    inside = bucket.contains(keys, ties)
    return keys[inside], ties[inside], ordinals[inside]


def _histogram(task: tuple[list[Collected], ScoreRanking, _Bucket]) -> Ints:
    group, ranking, bucket = task
    counts = np.zeros(2**bucket.width, dtype=np.int64)
    for part in group:
        keys, ties, _ = _records(part, ranking, bucket)
        counts += np.bincount(bucket.digits(keys, ties), minlength=counts.size)
    return counts


def _gather(task: tuple[list[Collected], ScoreRanking, _Bucket]) -> Words:
    group, ranking, bucket = task
    blocks: list[Any] = [np.empty((0, 4), dtype=np.uint64)]
    for part in group:
        keys, ties, ordinals = _records(part, ranking, bucket)
        place = np.full(keys.size, part.part, dtype=np.uint64)
        blocks.append(np.stack([keys, ties, place, ordinals.astype(np.uint64)], axis=1))
    return np.concatenate(blocks)


Resolved = tuple[Iterator[Arrays], dict[str, Any]]
BINS = 20  # of the histogram in the report
_DIGITS = 6  # of a score as a label


class Threshold:
    """`parts` names shares from the best down; each document is labelled with its share."""

    def __init__(
        self,
        name: str,
        keep: float | Bounds | str | None,
        per: Literal["corpus", "source"],
        seed: int,
        lower_is_better: bool = False,
        parts: Sequence[tuple[str, float]] = (),
    ) -> None:
        self.name, self.per = name, per
        least = Bounds(min=keep, max=None) if isinstance(keep, float) else None
        self.bounds = keep if isinstance(keep, Bounds) else least
        self.ranking = ScoreRanking(lower_is_better, seed)
        self.shares: dict[str, Fraction] = {}
        if isinstance(keep, str):
            self.shares["keep"] = _to_fraction(best_share(keep) or 0.0)
        reached = Fraction()
        for part, share in parts:
            reached += _to_fraction(share)
            self.shares[part] = reached
        self.parts = [part for part, _ in parts]

    def collected(self, scores: Floats, ordinals: Ints) -> Arrays:
        assert scores.dtype == np.float64 and np.isfinite(scores).all()
        return {"ordinal": np.asarray(ordinals, dtype=np.int64), "score": scores}

    def resolve(self, collected: Sequence[Collected], run_tasks: RunTasks) -> Resolved:
        """Decisions are loaded lazily. Reads the collected files twice, and two to four times more per share."""
        groups: dict[str, list[Collected]] = {}
        for part in collected:
            groups.setdefault(self._group(part), []).append(part)
        resolved = {name: self._resolve(group, run_tasks) for name, group in groups.items()}
        cuts = {name: cut for name, (cut, _) in resolved.items()}
        summaries = {name: summary for name, (_, summary) in resolved.items()}
        together = summaries.get("", {"documents": 0, "kept": 0})
        overall = {"sources": summaries} if self.per == "source" else together
        return (_part_decisions(part, cuts[self._group(part)]) for part in collected), overall

    def _group(self, part: Collected) -> str:
        return part.source if self.per == "source" else ""

    def _resolve(self, group: list[Collected], run_tasks: RunTasks) -> tuple[Arrays, dict[str, Any]]:
        tasks = group_parts(group)
        surveys = run_tasks(_survey, tasks)
        total = sum(survey[0] for survey in surveys)
        if not total:
            return {}, {"documents": 0, "kept": 0}
        lowest, highest = min(survey[1] for survey in surveys), max(survey[2] for survey in surveys)
        counted = run_tasks(_count, [(task, lowest, highest, _limits(self.bounds)) for task in tasks])
        kept_count = sum(count for _, count in counted)
        cuts = {
            name: find_cut(group, math.ceil(share * total), total, self.ranking, run_tasks)
            for name, share in self.shares.items()
            if share > 0
        }
        summary: dict[str, Any] = {"documents": total, "lowest": lowest, "highest": highest}
        summary["histogram"] = sum(counts for counts, _ in counted).tolist()
        if "keep" in self.shares:
            kept_count = math.ceil(self.shares["keep"] * total)
            summary["threshold"] = score_at_cut(cuts["keep"], self.ranking)
        elif self.bounds:
            limits = [limit for limit in (self.bounds.min, self.bounds.max) if limit is not None]
            summary["threshold"] = limits[0] if len(limits) == 1 else limits
        for part in self.parts:
            if part in cuts:
                summary[f"{part}_threshold"] = score_at_cut(cuts[part], self.ranking)
        return cuts, summary | {"kept": kept_count, "kept_share": kept_count / total}

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        scores = decisions["score"][ordinals]
        assert not np.isnan(scores).any(), "a document was not scored"
        part = int(decisions["part"][0])
        dropped = self._dropped(scores, part, ordinals, decisions)
        named_parts = [name for name in self.parts if name in decisions]
        parts = [(name, self.ranking.reach(scores, part, ordinals, decisions[name])) for name in named_parts]
        outcomes: list[Outcome] = []
        for i, document in enumerate(documents):
            score = round(float(scores[i]), _DIGITS)
            if dropped[i]:
                outcomes.append(Drop(dropped[i], score))
                continue
            document.labels[self.name] = score
            if self.parts:
                reached = (name for name, those in parts if those[i])
                document.labels[f"{self.name}_part"] = next(reached, "tail")
            outcomes.append(None)
        return outcomes

    def _dropped(self, scores: Floats, part: int, ordinals: Ints, decisions: Arrays) -> list[str]:
        """Why each document is dropped; empty for those that stay."""
        if "keep" in self.shares:
            is_kept = self.ranking.reach(scores, part, ordinals, decisions["keep"])
            side = "above" if self.ranking.lower_is_better else "below"
            of = " of its source" if self.per == "source" else ""
            why = f"{self.name} {side} the best {float(self.shares['keep'] * 100):g} %{of}"
            return ["" if stays else why for stays in is_kept.tolist()]
        if self.bounds is None:
            return [""] * scores.size
        low, high = _limits(self.bounds)
        below = np.where(scores < low, f"{self.name} below {low:g}", "")
        reasons: list[str] = np.where(scores > high, f"{self.name} above {high:g}", below).tolist()
        return reasons


class ScoredStep(ABC):
    """The common part of steps that score documents: everything but the scoring."""

    version = 1
    threshold: Threshold

    @abstractmethod
    def scores(self, documents: Sequence[Document]) -> Floats: ...

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        return self.threshold.collected(self.scores(documents), ordinals)

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        return self.threshold.resolve(collected, run_tasks)

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        return self.threshold.apply(documents, ordinals, decisions)


def _to_fraction(share: float) -> Fraction:
    """0.1 as a tenth: the nearest binary fraction would keep 4 of 30 documents."""
    return Fraction(repr(share))


def _limits(bounds: Bounds | None) -> tuple[float, float]:
    low, high = (bounds.min, bounds.max) if bounds else (None, None)
    return -math.inf if low is None else low, math.inf if high is None else high


def _survey(group: list[Collected]) -> tuple[int, float, float]:
    """The number of scores, the lowest and the highest."""
    count, lowest, highest = 0, math.inf, -math.inf
    for part in group:
        _, scores = load_scores(part)
        if scores.size:
            count += scores.size
            lowest, highest = min(lowest, float(scores.min())), max(highest, float(scores.max()))
    return count, lowest, highest


def _count(task: tuple[list[Collected], float, float, tuple[float, float]]) -> tuple[Ints, int]:
    """A histogram between the lowest and the highest score, and how many are within the limits."""
    group, lowest, highest, (low, high) = task
    counts, within = np.zeros(BINS, dtype=np.int64), 0
    width = highest / BINS - lowest / BINS  # the difference may overflow
    for part in group:
        _, scores = load_scores(part)
        with np.errstate(all="ignore"):
            bins = np.nan_to_num((scores - lowest) / width, posinf=BINS)
        counts += np.bincount(np.clip(bins, 0, BINS - 1).astype(np.int64), minlength=BINS)
        within += int(((scores >= low) & (scores <= high)).sum())
    return counts, within


def _part_decisions(part: Collected, cuts: Arrays) -> Arrays:
    """The part's scores by ordinal, NaN in the gaps, with the cuts to reach."""
    ordinals, scores = load_scores(part)
    dense = np.full(part.documents, np.nan)
    dense[ordinals] = scores
    return {"score": dense, "part": np.array([part.part], dtype=np.int64), **cuts}
