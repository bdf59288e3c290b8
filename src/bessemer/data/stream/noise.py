"""Noise on the inputs of a batch (`data.noise`): masked spans, random tokens, deletions.

The draws depend only on the seed and on the row's position in the stream, so a replayed step has the same noise. The
targets stay the true tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bessemer.data.stream.order import Ints, Words, chain
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.data.stream.batches import Batch
    from bessemer.spec.data import NoiseSpec

_FORMAT = 1  # raise it when the same settings give other noise
_PURPOSE = 0x6E6F697365  # separates these draws from other uses of the seed
_CHOICE, _TOKEN = 1, 2
_ONE = 1 << 32  # draws are 32-bit integers

Flags = npt.NDArray[np.bool_]


class Noise:
    """A `Transform` of batches. Shares are of the columns that may change: all but the first of each document.

    - `mask_spans` of them are in spans of `span_length` columns on average (as in T5, with 15 % and 3) and get one of
      `mask_ids`, each span the next in turn: several ids act as sentinels. A span keeps its length.
    - `replace` of them get a random id below `vocab` that is not in `special_ids`.
    - `delete` of them are removed with their targets, and padding of weight 0 fills the row. The weight of a deleted
      target goes to the column before it, which must have the same document and weight: every document keeps its sum,
      and masked targets stay masked.

    No column gets more than one of the three, so the shares are exact.
    """

    def __init__(
        self,
        seed: int,
        vocab: int,
        mask_spans: float = 0.0,
        span_length: float = 3.0,
        replace: float = 0.0,
        delete: float = 0.0,
        mask_ids: Sequence[int] = (),
        special_ids: Collection[int] = (),
    ) -> None:
        assert mask_spans + replace + delete < 1 and (mask_ids or not mask_spans), "the spec is checked"
        self.seed, self.vocab = seed, vocab
        self.mask_spans, self.span_length = mask_spans, span_length
        self.replace, self.delete = replace, delete
        self.mask_ids, self.special_ids = tuple(mask_ids), tuple(sorted(set(special_ids)))
        if replace and len(self.special_ids) >= vocab:
            raise UserError(f"data.noise.replace: all of the {vocab} tokens are special ones; remove it")

    @property
    def identity(self) -> dict[str, Any]:
        return {"noise": {"format": _FORMAT, **vars(self)}}

    def __call__(self, batch: Batch) -> Batch:
        """A copy of the batch with noise."""
        columns = batch.tokens.shape[1]
        key = chain(self.seed % 2**64, _PURPOSE, np.maximum(batch.positions, 0))[:, None]
        draw = chain(key, np.arange(columns), _CHOICE)
        masked, replaced, deleted = self._choose(draw, _may_change(batch))
        deleted[:, 1:] &= batch.weights[:, 1:] == batch.weights[:, :-1]
        tokens = batch.tokens.copy()
        if replaced.any():
            tokens[replaced] = self._random_ids(np.broadcast_to(key, tokens.shape)[replaced], np.nonzero(replaced)[1])
        if masked.any():
            begins = masked & ~np.pad(masked, ((0, 0), (1, 0)))[:, :-1]
            span = np.cumsum(begins, axis=1) - 1
            tokens[masked] = np.array(self.mask_ids, np.int64)[span[masked] % len(self.mask_ids)]
        noisy = dataclasses.replace(batch, tokens=tokens)
        return _delete_columns(noisy, deleted) if deleted.any() else noisy

    def _choose(self, draw: Words, free: Flags) -> tuple[Flags, Flags, Flags]:
        """(masked, replaced, deleted): the upper half of each draw is for spans, the lower for the other two."""
        spans = self._spans(draw >> np.uint64(32))
        other = draw & np.uint64(_ONE - 1)
        unmasked = 1.0 - self.mask_spans
        least = round(self.replace / unmasked * _ONE)
        most = round((self.replace + self.delete) / unmasked * _ONE)
        plain = free & ~spans
        return free & spans, plain & (other < least), plain & (other >= least) & (other < most)

    def _spans(self, draw: Words) -> Flags:
        """Which columns are in spans: a two-state Markov chain. A low draw begins a span, a high one ends it.

        The shares of both states hold in every column. Independent columns give spans of 1 / (1 - share) on average,
        so the mean cannot be shorter.
        """
        if not self.mask_spans:
            return np.zeros(draw.shape, np.bool_)
        p = self.mask_spans
        end = 1.0 / max(self.span_length, 1.0 / (1.0 - p))
        begin = end * p / (1.0 - p)
        state = np.full(draw.shape, -1, np.int8)
        state[draw < round(begin * _ONE)] = 1
        state[draw >= round((1.0 - end) * _ONE)] = 0
        state[:, 0] = draw[:, 0] < round(p * _ONE)
        columns = np.arange(draw.shape[1])
        last = np.maximum.accumulate(np.where(state >= 0, columns, 0), axis=1)
        return np.take_along_axis(state, last, axis=1) == 1

    def _random_ids(self, keys: Words, columns: Ints) -> Ints:
        """Ids in [0, vocab) without the special ones."""
        special = np.array([token for token in self.special_ids if 0 <= token < self.vocab], np.int64)
        drawn = chain(keys, columns, _TOKEN) % np.uint64(self.vocab - special.size)
        ids = drawn.astype(np.int64)
        return ids + np.searchsorted(special - np.arange(special.size), ids, side="right")


def make_noise(spec: NoiseSpec, seed: int, vocab: int, special: Mapping[str, int]) -> Noise | None:
    """The noise of a spec, or None. `special` are the tokenizer's special tokens with their ids: masks are among them,
    and none is drawn at random."""
    if not (spec.mask_spans or spec.replace or spec.delete):
        return None
    for token in spec.mask:
        if token not in special:
            available = ", ".join(sorted(special)[:8]) or "none"
            raise UserError(
                f"data.noise.mask: the tokenizer has no special token {token!r} (it has {available}): "
                "add it to tokenizer.special"
            )
    return Noise(
        seed,
        vocab,
        mask_spans=spec.mask_spans,
        span_length=spec.span_length,
        replace=spec.replace,
        delete=spec.delete,
        mask_ids=[special[token] for token in spec.mask],
        special_ids=special.values(),
    )


def _may_change(batch: Batch) -> Flags:
    """Columns that follow another of their document; padding at the end of a row stays padding."""
    free = np.zeros(batch.tokens.shape, np.bool_)
    free[:, 1:] = batch.documents[:, 1:] == batch.documents[:, :-1]
    counted = batch.weights > 0
    before_end = np.maximum.accumulate(counted[:, ::-1], axis=1)[:, ::-1]  # this or a later target counts
    return free & before_end


def _delete_columns(batch: Batch, deleted: Flags) -> Batch:
    """The batch without the deleted columns, none of which is the first of its document."""
    rows, columns = deleted.shape
    kept_before = np.maximum.accumulate(np.where(deleted, 0, np.arange(columns)), axis=1)
    cell = np.arange(rows)[:, None] * columns + kept_before
    weights = np.bincount(cell.ravel(), weights=batch.weights.ravel().astype(np.float64), minlength=rows * columns)
    order = np.argsort(deleted, axis=1, kind="stable")
    gone = np.take_along_axis(deleted, order, axis=1)
    moved_weights = np.take_along_axis(weights.reshape(rows, columns), order, axis=1).astype(np.float32)
    return dataclasses.replace(
        batch,
        tokens=np.where(gone, 0, np.take_along_axis(batch.tokens, order, axis=1)),
        targets=np.where(gone, 0, np.take_along_axis(batch.targets, order, axis=1)),
        weights=np.where(gone, np.float32(0), moved_weights),
        documents=np.where(gone, batch.documents[:, -1:], np.take_along_axis(batch.documents, order, axis=1)),
    )
