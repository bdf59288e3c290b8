"""The batches of a run that trains on its own rollouts: the interface of `BatchStream`, read from stored rounds.

A position of the stream is a prompt. The answers of a step are dealt out to the data-parallel ranks by length, and
each rank packs its own into rows of at most the context; attention stays inside an answer and its prompt. Losses are
weighted by token, so they do not depend on this. Legend: R rows, T columns, D answers in a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.align.prompts import PromptRows
from bessemer.align.rollouts import Floats, Round, RoundStore, positions_key
from bessemer.data.store.shard import Origin
from bessemer.data.stream.batches import Bans, Batch, DocumentShare, rank_positions
from bessemer.data.stream.order import StepPositions, StreamOrder
from bessemer.data.stream.rows import EMPTY_FIELD, Ints
from bessemer.errors import UserError
from bessemer.spec.rl import RlSpec

_FORMAT = 1  # raise it when the same rounds give other batches
LENGTHS, SAMPLES, ORIGIN = "lengths", "samples", "origin"  # fields: see `RolloutStream._fill`
_MULTIPLE = 8  # of the columns of a step
_WORTH_TRIMMING = 0.75  # of the context; longer steps are padded to it, for which blocks are compiled


@dataclass
class CurrentRounds:
    """The round that is trained on, shared by all views of a stream. Until the run has begun (`synthetic`), batches are
    full rows of random tokens, which memory and speed are measured with."""

    store: RoundStore
    synthetic: bool = True
    current: Round | None = None
    key: str = ""

    def set(self, made: Round, key: str) -> None:
        self.current, self.key, self.synthetic = made, key, False

    def find(self, first: int, key: str) -> Round | None:
        """The round in memory, or on disk."""
        if self.current is None or (self.current.first, self.key) != (first, key):
            made = self.store.load(first, key)
            if made is None:
                return None
            self.set(made, key)
        return self.current


class RolloutStream:
    """Any step's batch on any rank, from the stored round of the step. Immutable but for `rounds`."""

    def __init__(
        self, sources: Mapping[str, PromptRows], order: StreamOrder, context: int, steps: StepPositions, rl: RlSpec,
        arrays: Sequence[str], rounds: CurrentRounds, vocab: int, banned: Bans = frozenset(), together: int = 1,
    ) -> None:  # fmt: skip
        self.names, self.order, self.steps = order.names, order, steps
        self.sources = {name: sources[name] for name in order.names}
        self.sequence_length, self.rl, self.arrays, self.rounds, self.vocab = context, rl, tuple(arrays), rounds, vocab
        self.banned = dict(banned) if isinstance(banned, Mapping) else dict.fromkeys(banned, 0)
        self.together = together  # answers of a step that stay in one row: 2 if they are pairs
        self.transforms: tuple[Any, ...] = ()
        self.identity = {
            "format": _FORMAT, "packing": "rollouts", "sequence_length": context, "round_steps": rl.round_steps,
            "sources": {name: rows.fingerprint for name, rows in self.sources.items()}, **order.identity,
        }  # fmt: skip
        self.fingerprint = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def replace(self, steps: StepPositions | None = None, banned: Bans | None = None) -> RolloutStream:
        """The same stream, with the same rounds, under other steps or bans."""
        steps, banned = steps or self.steps, self.banned if banned is None else banned
        return RolloutStream(
            self.sources, self.order, self.sequence_length, steps, self.rl, self.arrays, self.rounds, self.vocab,
            banned, self.together,
        )  # fmt: skip

    def first_step(self, step: int) -> int:
        """The first step of a step's round."""
        return step - step % self.rl.round_steps

    def round_positions(self, step: int) -> Ints:
        """The positions of the prompts of a step's round."""
        first = self.first_step(step)
        ranges = [self.steps.range(step) for step in range(first, first + self.rl.round_steps)]
        return np.concatenate([np.arange(start, stop) for start, stop in ranges])

    def round_of(self, step: int) -> Round | None:
        """The round that a step trains on; None as long as batches are synthetic."""
        if self.rounds.synthetic:
            return None
        first = self.first_step(step)
        made = self.rounds.find(first, positions_key(self.round_positions(step)))
        if made is None:
            raise UserError(
                f"step {step}: {self.rounds.store.path(first)} holds no rollouts of its prompts: the round was removed "
                "(rl.keep), or the step was skipped after a rollback"
            )
        return made

    def step_samples(self, step: int) -> list[int]:
        """The numbers of the samples in the round that a step trains on, without those that are not used."""
        made, rl = self.round_of(step), self.rl
        assert made is not None
        part = (step - made.first) % rl.minibatches
        share = len(made.samples) // made.group // rl.minibatches * made.group
        numbers = range(part * share, (part + 1) * share)
        used = [number for number in numbers if made.used[number] and not self._is_banned(made, number)]
        if self.together == 1:
            return used
        advantages = {number: -float(made.tokens_of(number, "advantages")[0]) for number in used}
        return sorted(used, key=lambda number: (number // made.group, advantages[number]))  # the chosen one first

    def rows(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Ints:
        """The positions by which a step advances."""
        return rank_positions(self.steps, step, dp_rank, dp_world)

    def batch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> Batch:
        """All the rank's rows in one batch."""
        return self.micro_batches(step, 1 << 30, dp_rank, dp_world)[0]

    def micro_batches(self, step: int, micro_rows: int, dp_rank: int = 0, dp_world: int = 1) -> list[Batch]:
        """The rank's rows in batches of at most `micro_rows`, as many and as wide on every rank."""
        made = self.round_of(step)
        if made is None:
            return self._synthetic(micro_rows, dp_world)
        return self.rows_of(made, self.step_samples(step), micro_rows, dp_rank, dp_world, self.together)[1]

    def rows_of(
        self, made: Round, numbers: Sequence[int], micro_rows: int, dp_rank: int, dp_world: int, together: int = 1
    ) -> tuple[list[list[list[int]]], list[Batch]]:
        """A rank's rows of some samples, as their numbers and as batches, in parts of at most `micro_rows`. So many
        consecutive samples as `together` says share a row."""
        packed = self._pack(made, [numbers[k : k + together] for k in range(0, len(numbers), together)], dp_world)
        count = max(len(rows) for rows in packed)
        size = min(micro_rows, count)
        fill = max(1, *(sum(made.samples[n].length - 1 for n in row) for rows in packed for row in rows))
        width = min(self.sequence_length, -(-fill // _MULTIPLE) * _MULTIPLE)
        width = self.sequence_length if width > _WORTH_TRIMMING * self.sequence_length else width
        rows = packed[dp_rank] + [[]] * (-(-count // size) * size - len(packed[dp_rank]))
        rows_batch, starts = self._fill(made, rows, width), range(0, len(rows), size)
        return [rows[start : start + size] for start in starts], [
            rows_batch.part(start, start + size) for start in starts
        ]

    def values_of(self, made: Round, rows: Sequence[Sequence[int]], values: Floats) -> Iterator[tuple[int, Floats]]:
        """The values of each sample's answer tokens, from those of all columns of such rows."""
        for r, row in enumerate(rows):
            column = 0
            for number in row:
                sample = made.samples[number]
                end = column + sample.length - 1
                yield number, values[r, column + sample.prompt.size - 1 : end]
                column = end

    def step_count(self, step: int) -> float:
        """The answer tokens of the step over all ranks."""
        made = self.round_of(step)
        if made is None:
            return float(self.rl.step_prompts * self.rl.samples * self._answer_columns)
        return float(sum(made.learned_of(number).sum() for number in self.step_samples(step)))

    def origins(self, step: int) -> list[DocumentShare]:
        """The prompts of a step, those with most answer tokens first."""
        made = self.round_of(step)
        shares: dict[int, DocumentShare] = {}
        for number in self.step_samples(step) if made else ():
            assert made is not None
            sample = made.samples[number]
            name = self.names[sample.source]
            origin = self.sources[name].origin_of_document(sample.sequence)
            tokens = int(made.lengths[number]) + (shares[sample.position].tokens if sample.position in shares else 0)
            shares[sample.position] = DocumentShare(
                name, origin.file, origin.row, origin.document_id, tokens, [sample.position], sample.sequence
            )
        return sorted(shares.values(), key=lambda share: -share.tokens)

    def locate(self, batch: Batch) -> list[tuple[int, int, Origin]]:
        """(row of the batch, document number in it, origin of the prompt) for every answer."""
        located = []
        for row, number in zip(*np.nonzero(batch.fields[ORIGIN][:, :, 0] >= 0), strict=True):
            source, sequence = batch.fields[ORIGIN][row, number].tolist()
            located.append((int(row), int(number), self.sources[self.names[source]].origin_of_document(sequence)))
        return located

    def texts(self, step: int) -> Iterator[tuple[str, Origin, str]]:
        """(source, origin of the prompt, answer with its reward) for every answer of a step."""
        made = self.round_of(step)
        for number in self.step_samples(step) if made else ():
            assert made is not None
            sample = made.samples[number]
            name = self.names[sample.source]
            text = sample.text if np.isnan(sample.reward) else f"reward {sample.reward:g}: {sample.text}"
            yield name, self.sources[name].origin_of_document(sample.sequence), text

    def prefetch(self, step: int, dp_rank: int = 0, dp_world: int = 1) -> None:
        """Prompts are in memory: there is nothing to fetch."""

    def resolve(self, positions: Ints) -> tuple[Ints, Ints]:
        """(source, row of the source) at each position."""
        sources, sequences, _ = self.order.resolve(positions)
        return sources, sequences

    @property
    def _answer_columns(self) -> int:
        return min(self.rl.max_tokens, self.sequence_length - 1)

    def _is_banned(self, made: Round, number: int) -> bool:
        sample = made.samples[number]
        since = self.banned.get((self.names[sample.source], sample.sequence))
        return since is not None and sample.position >= since

    def _pack(self, made: Round, units: Sequence[Sequence[int]], dp_world: int) -> list[list[list[int]]]:
        """Of each rank, the samples of each row: the longest unit first, to the rank with the fewest tokens, into its
        first row with room."""
        ranks: list[list[list[int]]] = [[] for _ in range(dp_world)]
        room: list[list[int]] = [[] for _ in range(dp_world)]
        tokens = [0] * dp_world
        sizes = [sum(made.samples[number].length - 1 for number in unit) for unit in units]
        for size, unit in sorted(zip(sizes, units, strict=True), key=lambda pair: (-pair[0], pair[1][0])):
            rank = tokens.index(min(tokens))
            tokens[rank] += size
            at = next((row for row, left in enumerate(room[rank]) if left >= size), None)
            if at is None:
                ranks[rank].append([])
                room[rank].append(self.sequence_length)
                at = len(room[rank]) - 1
            ranks[rank][at].extend(unit)
            room[rank][at] -= size
        return ranks if units else [[[]] for _ in ranks]

    def _fill(self, made: Round, rows: Sequence[Sequence[int]], width: int) -> Batch:
        """The rows as arrays. Fields beside the targets: the round's arrays, how many tokens the model wrote in each
        token's answer (`lengths`; 0 for tokens of an environment) and its number in the row (`samples`); beside the
        answers: source and row of its prompt."""
        batch = _empty(len(rows), width, self.arrays, max(1, *(len(row) for row in rows)))
        for r, row in enumerate(rows):
            column = 0
            for number, sample_number in enumerate(row):
                sample = made.samples[sample_number]
                ids = np.concatenate([sample.prompt, sample.tokens])
                end, answer = column + ids.size - 1, column + sample.prompt.size - 1
                batch.tokens[r, column:end], batch.targets[r, column:end] = ids[:-1], ids[1:]
                written = made.learned_of(sample_number)
                batch.weights[r, answer:end] = written
                batch.documents[r, column:] = number  # padding shares the last one's number
                for name in made.arrays.keys() & set(self.arrays):  # the rest is not computed yet
                    batch.fields[name][r, answer:end] = made.tokens_of(sample_number, name)
                batch.fields[LENGTHS][r, answer:end] = written * written.sum()
                batch.fields[SAMPLES][r, column:] = number
                batch.fields[ORIGIN][r, number] = sample.source, sample.sequence
                if number == 0:
                    batch.positions[r], batch.sources[r] = sample.position, sample.source
                    batch.sequences[r] = sample.sequence
                column = end
        return batch

    def _synthetic(self, micro_rows: int, dp_world: int) -> list[Batch]:
        """Up to two micro-batches of random tokens in full rows."""
        rows = max(1, -(-self.rl.step_prompts * self.rl.samples // dp_world))
        size = min(micro_rows, rows)
        count = min(rows, 2 * size)
        batch = _empty(count, self.sequence_length, self.arrays, 1)
        draw = np.random.default_rng(0)
        batch.tokens[:] = draw.integers(0, self.vocab, batch.tokens.shape)
        batch.targets[:, :-1] = batch.tokens[:, 1:]
        batch.weights[:, -self._answer_columns :] = 1.0
        batch.fields[LENGTHS][:] = batch.weights * self._answer_columns
        if "advantages" in batch.fields:
            batch.fields["advantages"][:] = batch.weights
        batch.positions[:] = 0
        return [batch.part(start, start + size) for start in range(0, count, size)]


def _empty(rows: int, width: int, arrays: Collection[str], answers: int) -> Batch:
    """Rows of padding."""
    shape, nothing = (rows, width), np.full(rows, -1, np.int64)
    fields: dict[str, npt.NDArray[Any]] = {name: np.zeros(shape, np.float32) for name in (*arrays, LENGTHS)}
    fields[SAMPLES] = np.zeros(shape, np.int64)
    fields[ORIGIN] = np.full((rows, answers, 2), EMPTY_FIELD, np.int64)
    tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    weights, documents = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    return Batch(tokens, targets, weights, documents, nothing, nothing.copy(), nothing.copy(), fields)
