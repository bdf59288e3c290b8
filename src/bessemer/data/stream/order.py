"""The order of the data: which sequence of which source is at a stream position, and which positions a step reads.

Both are pure functions with O(1) seek. Mixture blocks interleave the sources, and a keyed permutation reshuffles each
source in every epoch. Old runs are replayed from these numbers, so no output may ever change: all arithmetic is in
integers and all randomness is `mix`, since numpy and torch promise no stable shuffles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bessemer.errors import UserError
from bessemer.spec.mixture import Mixture

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_ROUNDS = 8
_SMALL = 256  # below this many items a Feistel network has too few bits to shuffle well
_TABLE_POSITIONS = 4096  # small blocks are arranged together, about this many positions at a time
_TABLES_KEPT = 8
_LAYOUT, _SHUFFLE = 1, 2  # the two uses of the seed
_GROUP, _RUN = 1, 2  # the two uses of a ranked source's key of an epoch


def mix(values: npt.ArrayLike) -> Words:
    """The 64-bit mixer (one step of splitmix64 from each value): a bijection of the 64-bit words."""
    word = np.array(values, dtype=np.uint64)  # a copy, changed in place: arrays wrap around without a warning
    word += np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(30)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(27)
    word *= np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def chain(first: npt.ArrayLike, *parts: npt.ArrayLike) -> Words:
    """One key from several non-negative integers or broadcasting arrays of them; their order matters."""
    key = mix(first)
    for part in parts:
        key = mix(key ^ np.asarray(part).astype(np.uint64))
    return key


def name_key(name: str) -> Words:
    """A source's key depends on its name, so adding or reordering sources does not change the others' shuffles."""
    raw = name.encode()
    return chain(len(raw), *(int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)))


def permute(index: npt.ArrayLike, n: int, key: npt.ArrayLike) -> Ints:
    """The image of each index under the keyed permutation of [0, n); one key, or one per index."""
    words = np.asarray(index).astype(np.uint64)
    if words.size and int(words.max()) >= n:
        raise ValueError(f"index outside [0, {n})")
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), words.shape)
    if n < _SMALL:
        return _argsort_shuffle(words.ravel(), n, keys.ravel()).reshape(words.shape)
    flat, keys = words.ravel(), keys.ravel()
    moved = _feistel(flat, (n - 1).bit_length(), keys)
    outside = np.flatnonzero(moved >= n)
    while outside.size:  # cycle walking: at most half of the words are outside, so about two turns each
        moved[outside] = _feistel(moved[outside], (n - 1).bit_length(), keys[outside])
        outside = outside[moved[outside] >= n]
    return moved.astype(np.int64).reshape(words.shape)


def _feistel(words: Words, bits: int, keys: Words) -> Words:
    """A permutation of the `bits`-bit words: each round changes one part by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = words >> low_bits, words & low_mask
    for turn in range(_ROUNDS):
        fixed = low if turn % 2 == 0 else high
        change = mix(((fixed << np.uint64(3)) | np.uint64(turn)) ^ keys)
        if turn % 2 == 0:
            high = high ^ (change & high_mask)
        else:
            low = low ^ (change & low_mask)
    return (high << low_bits) | low


def _argsort_shuffle(words: Words, n: int, keys: Words) -> Ints:
    distinct, which = np.unique(keys, return_inverse=True)
    hashes = mix(distinct[:, None] ^ np.arange(n, dtype=np.uint64))
    return np.argsort(hashes, axis=1, kind="stable")[which.ravel(), words.astype(np.int64)].astype(np.int64)


@dataclass(frozen=True)
class MixturePhase:
    """From position `start` on, the sources are mixed by `mixture`."""

    start: int
    mixture: Mixture


@dataclass(frozen=True)
class CurriculumRanking:
    """A source's sequences sorted by a measure, lowest first, for curricula and length buckets.

    The ranks are cut into `groups` of equal size, and each group is reshuffled in every epoch. Without `run` the groups
    follow each other: a curriculum. With it, `run` consecutive sequences of one group stay together and these runs are
    shuffled: length buckets.
    """

    sequences: npt.NDArray[np.integer]  # rank -> sequence, every sequence once; usually mapped from a file
    groups: int
    fingerprint: str  # of the sequences
    run: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.run < 0:
            raise ValueError(f"a ranking needs at least one group and no negative run: {self.groups}, {self.run}")

    @property
    def identity(self) -> list[str | int]:
        """What decides the order besides the seed: part of the stream's identity."""
        return [self.fingerprint, self.groups, self.run]

    @cached_property
    def _edges(self) -> Ints:
        """The start of each group, and the end. In Python integers, since the products may exceed 64 bits."""
        n = self.sequences.shape[0]
        groups = min(self.groups, n)
        return np.array([n * k // groups for k in range(groups + 1)], dtype=np.int64)

    def permute(self, index: Ints, keys: Words) -> Ints:
        """The sequence at each index of an epoch; one key per index, the same for all of an epoch."""
        n = self.sequences.shape[0]
        rank = index.copy()
        if self.run and n >= self.run:
            runs = n // self.run
            in_runs = np.flatnonzero(index < runs * self.run)  # a partial run stays at the end
            moved = permute(index[in_runs] // self.run, runs, chain(keys[in_runs], _RUN))
            rank[in_runs] = moved * self.run + index[in_runs] % self.run
        edges = self._edges
        group = np.searchsorted(edges, rank, side="right") - 1
        for k in np.unique(group).tolist():
            at = np.flatnonzero(group == k)
            first, size = int(edges[k]), int(edges[k + 1] - edges[k])
            rank[at] = first + permute(rank[at] - first, size, chain(keys[at], _GROUP, k))
        return np.asarray(self.sequences[rank], dtype=np.int64)


class _Layout:
    """How one phase mixes: the items of a block by source, then rank, each with the salt of its offset."""

    def __init__(self, phase: MixturePhase, number: int, names: Sequence[str], seed: int) -> None:
        counts = dict(zip(phase.mixture.names, phase.mixture.counts, strict=True))
        self.start, self.block = phase.start, phase.mixture.block
        self.counts = np.array([counts.get(name, 0) for name in names], dtype=np.int64)
        self.source = np.repeat(np.arange(len(names)), self.counts)
        self.rank = np.concatenate([np.arange(count) for count in self.counts])
        self.blocks_per_table = max(1, _TABLE_POSITIONS // self.block)
        self._key = chain(seed, _LAYOUT, number)
        name_keys = np.array([name_key(name) for name in names], dtype=np.uint64)
        self._salts = chain(name_keys[self.source], self.rank)

    def table(self, number: int) -> npt.NDArray[np.int32]:
        """The items of `blocks_per_table` blocks in their order."""
        blocks = number * self.blocks_per_table + np.arange(self.blocks_per_table)
        offset = mix(chain(self._key, blocks)[:, None] ^ self._salts) >> np.uint64(32)
        # (rank + offset) / count in fixed point: 16 bits of rank and 32 of offset, shifted by 15, fill 63.
        fixed = ((self.rank.astype(np.uint64) << np.uint64(32)) | offset) << np.uint64(15)
        when = fixed // self.counts[self.source].astype(np.uint64)
        return np.argsort(when, axis=1, kind="stable").astype(np.int32).ravel()


class StreamOrder:
    """The order of a stream, from its phases, the number of sequences per source and the seed.

    Source indices refer to the sorted `names`. A source in several phases continues from one to the next. A source with
    a ranking follows it in every epoch; the others are fully shuffled.
    """

    def __init__(
        self,
        phases: Sequence[MixturePhase],
        lengths: Mapping[str, int],
        seed: int,
        rankings: Mapping[str, CurriculumRanking] | None = None,
    ) -> None:
        starts = [phase.start for phase in phases]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise UserError(f"mixture phases start at {starts}: begin at 0 and let each start after the last")
        self.phases, self.seed = tuple(phases), seed
        self.names = tuple(sorted({name for phase in phases for name in phase.mixture.names}))
        for name in self.names:
            if name not in lengths:
                raise UserError(f"the mixture's source {name!r} has no data: prepare it or remove it")
            if lengths[name] < 1:
                raise UserError(
                    f"source {name!r} has too few tokens for one sequence: "
                    "add data, shorten the sequence length or remove the source"
                )
        self.lengths = {name: int(lengths[name]) for name in self.names}
        self.rankings = {name: rank for name, rank in (rankings or {}).items() if name in self.lengths}
        for name, ranking in self.rankings.items():
            if ranking.sequences.shape != (self.lengths[name],):
                raise ValueError(f"the ranking of {name!r} is for {ranking.sequences.size} sequences")
        word = seed % 2**64
        self._sizes = np.array([self.lengths[name] for name in self.names], dtype=np.int64)
        self._shuffle_keys = [chain(word, _SHUFFLE, name_key(name)) for name in self.names]
        self._layouts = [_Layout(phase, k, self.names, word) for k, phase in enumerate(phases)]
        self._table = lru_cache(_TABLES_KEPT)(lambda phase, number: self._layouts[phase].table(number))
        self._starts = np.array(starts, dtype=np.int64)
        self._bases = [np.zeros(len(self.names), dtype=np.int64)]
        for k in range(1, len(starts)):
            self._bases.append(self._before(k - 1, starts[k] - starts[k - 1]))

    def resolve(self, positions: npt.ArrayLike) -> tuple[Ints, Ints, Ints]:
        """(index into `names`, sequence of that source, epoch) at each position.

        Pass thousands at once: a call costs about a millisecond, a position less than a microsecond.
        """
        at = np.asarray(positions, dtype=np.int64)
        if at.size and at.min() < 0:
            raise ValueError(f"position {at.min()} is negative")
        source, ordinal, sequence = np.empty_like(at), np.empty_like(at), np.empty_like(at)
        phases = np.searchsorted(self._starts, at, side="right") - 1
        for k in np.unique(phases).tolist():
            in_phase = phases == k
            source[in_phase], ordinal[in_phase] = self._assign(k, at[in_phase] - self._starts[k])
        epoch, index = np.divmod(ordinal, self._sizes[source])
        for s in np.unique(source).tolist():
            of_source = source == s
            keys, indices = chain(self._shuffle_keys[s], epoch[of_source]), index[of_source]
            ranking = self.rankings.get(self.names[s])
            sequence[of_source] = (
                ranking.permute(indices, keys) if ranking else permute(indices, int(self._sizes[s]), keys)
            )
        return source, sequence, epoch

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order besides the data, for the stream's fingerprint. Without rankings there is no key for
        them: such streams keep their old fingerprint."""
        phases = [
            [phase.start, dict(zip(phase.mixture.names, phase.mixture.counts, strict=True))] for phase in self.phases
        ]
        ranked = {name: ranking.identity for name, ranking in sorted(self.rankings.items())}
        return {"seed": self.seed, "phases": phases, **({"rankings": ranked} if ranked else {})}

    def consumed(self, position: int) -> dict[str, int]:
        """The number of sequences of each source before a position, repeats included."""
        if position < 0:
            raise ValueError(f"position {position} is negative")
        k = int(np.searchsorted(self._starts, position, side="right")) - 1
        counts = self._before(k, position - self.phases[k].start)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _assign(self, phase: int, local: Ints) -> tuple[Ints, Ints]:
        """(source, ordinal) at positions counted from the phase's start."""
        layout = self._layouts[phase]
        number, offset = np.divmod(local, layout.block * layout.blocks_per_table)
        item = np.empty(local.shape, dtype=np.int64)
        for k in np.unique(number).tolist():
            at = number == k
            item[at] = self._table(phase, k)[offset[at]]
        source = layout.source[item]
        done = self._bases[phase][source] + local // layout.block * layout.counts[source]
        return source, done + layout.rank[item]

    def _before(self, phase: int, local: int) -> Ints:
        """Each source's number of sequences before a position counted from the phase's start."""
        layout = self._layouts[phase]
        blocks, part = divmod(local, layout.block)
        number, skipped = divmod(blocks, layout.blocks_per_table)
        items = self._table(phase, number)[skipped * layout.block :][:part]
        partial = np.bincount(layout.source[items], minlength=len(self.names))
        return self._bases[phase] + blocks * layout.counts + partial


@dataclass(frozen=True)
class Segment:
    """From step `from_step` on, the stream is read from `position`. A skip after a rollback adds one."""

    from_step: int
    position: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, int]) -> Self:
        return cls(from_step=entry["from_step"], position=entry["position"])


@dataclass(frozen=True)
class BatchPhase:
    """From step `from_step` on, a step has `rows` sequences."""

    from_step: int
    rows: int


class StepPositions:
    """Which positions each step reads; closed-form, so a seek costs the same anywhere."""

    def __init__(self, batch_phases: Sequence[BatchPhase], segments: Sequence[Segment] = (Segment(0, 0),)) -> None:
        self.batch_phases, self.segments = tuple(batch_phases), tuple(segments)
        self._changes = [phase.from_step for phase in batch_phases]
        if self._changes[:1] != [0] or self._changes != sorted(set(self._changes)):
            raise UserError(f"batch sizes change at steps {self._changes}: begin at 0, then in rising order")
        for phase in batch_phases:
            if phase.rows < 1:
                raise UserError(f"from step {phase.from_step} a batch has {phase.rows} rows: give it at least 1")
        self._cuts = [segment.from_step for segment in segments]
        if self._cuts[:1] != [0] or self._cuts != sorted(self._cuts):
            raise ValueError(f"segments begin at steps {self._cuts}: expected 0 first, then in rising order")
        self._rows_before = [0]  # rows before each batch phase, without skips
        for last, phase in pairwise(batch_phases):
            self._rows_before.append(self._rows_before[-1] + (phase.from_step - last.from_step) * last.rows)

    def rows(self, step: int) -> int:
        """The step's sequences over all ranks."""
        return self.batch_phases[bisect_right(self._changes, step) - 1].rows

    def position(self, step: int) -> int:
        """The first position that the step reads."""
        segment = self.segments[bisect_right(self._cuts, step) - 1]
        return segment.position + self._unskipped(step) - self._unskipped(segment.from_step)

    def range(self, step: int) -> tuple[int, int]:
        start = self.position(step)
        return start, start + self.rows(step)

    def skip(self, from_step: int, position: int) -> StepPositions:
        """After a rollback to `from_step`, continue at `position`; later segments are dropped."""
        earlier = [segment for segment in self.segments if segment.from_step < from_step]
        return StepPositions(self.batch_phases, [*earlier, Segment(from_step, position)])

    def _unskipped(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        k = bisect_right(self._changes, step) - 1
        return self._rows_before[k] + (step - self._changes[k]) * self.batch_phases[k].rows
