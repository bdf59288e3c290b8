"""Objectives whose rows keep their documents where they are: causal, prefix-LM, masked (BERT) and infill (code)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bessemer.data.order import chain
from bessemer.data.stream import Batch
from bessemer.train.objectives.rewritten import PADDING, Rewritten, happens, pieces, row_keys, weights_of

_PREFIX, _MASKED, _INFILL = 0x707265666978, 0x6D61736B6564, 0x696E66696C6C  # keep uses of the seed apart
_HOW, _TOKEN = 1, 2  # further draws of a masked column
_WHETHER, _ORDER, _CUTS = 0, 1, slice(2, 4)  # the draws of a document for infill
_SHORTEST = 6  # tokens of a document for infill, its end not counted; what is shorter is left alone


@dataclass(frozen=True)
class Causal:
    def rewrite(self, batch: Batch) -> Rewritten:
        columns = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
        return Rewritten(batch.tokens, batch.targets, batch.weights, batch.documents, columns)


@dataclass(frozen=True)
class Prefix:
    """Of a document's n tokens 1 to n - 1 are its prefix, each number as likely (as T5 has it), with the input before
    them. The last column of the prefix is the first that predicts."""

    seed: int

    def rewrite(self, batch: Batch) -> Rewritten:
        runs = pieces(batch)
        length = runs.end - runs.begin
        draws = chain(row_keys(batch, self.seed, _PREFIX)[runs.row], runs.begin)
        seen = np.where(length > 1, 2 + (draws % np.maximum(length - 1, 1).astype(np.uint64)).astype(np.int64), 1)
        columns = np.arange(batch.tokens.shape[1])
        left = (runs.begin + seen)[runs.number] - columns  # of the prefix, this column counted
        origin = np.where((left <= 1) & ~runs.padding, columns, PADDING)
        prefix = (left > 0) & ~runs.padding
        return Rewritten(batch.tokens, batch.targets, weights_of(batch, origin), batch.documents, origin, prefix)


@dataclass(frozen=True)
class Masked:
    """`rate` of the tokens are to be restored, at least one in a row, never a special one. Of them, `mask` become
    `mask_id`, `random` any token that is not special, and the rest stay. An input stands in its own target's column."""

    seed: int
    vocab: int
    mask_id: int
    special_ids: tuple[int, ...]  # the end of a document among them
    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1

    def rewrite(self, batch: Batch) -> Rewritten:
        special, padding = [*self.special_ids, self.mask_id], pieces(batch).padding
        keys = row_keys(batch, self.seed, _MASKED)[:, None]
        columns = np.broadcast_to(np.arange(padding.shape[1]), padding.shape)
        draws, free = chain(keys, columns), ~padding & ~np.isin(batch.targets, special)
        chosen = free & happens(draws, self.rate)
        (without,) = np.nonzero(free.any(axis=1) & ~chosen.any(axis=1))
        chosen[without, np.where(free, draws, np.iinfo(np.uint64).max)[without].argmin(axis=1)] = True
        how = chain(np.broadcast_to(keys, chosen.shape)[chosen], columns[chosen], _HOW)
        ordinary = np.delete(np.arange(self.vocab), special)
        drawn = ordinary[(chain(how, _TOKEN) % np.uint64(max(1, ordinary.size))).astype(np.int64)]
        hidden, changed = happens(how, self.mask), happens(how, self.mask + self.random)
        tokens = batch.targets.copy()
        tokens[chosen] = np.where(hidden, self.mask_id, np.where(changed, drawn, tokens[chosen]))
        origin = np.where(chosen, columns, PADDING)
        documents = np.where(padding, np.int32(PADDING), batch.documents)
        return Rewritten(tokens, batch.targets, weights_of(batch, origin), documents, origin, causal=False)


@dataclass(frozen=True)
class Infill:
    """Fill-in-the-middle (Bavarian et al. 2022): `rate` of the documents are cut at two random tokens. They read PRE
    prefix SUF suffix MID middle or, for `suffix_first` of them, PRE SUF suffix MID prefix middle (PSM and SPM).

    A document keeps its columns: its last three tokens before its end are dropped, and the marks take over their
    origins and weights. So a row's weights sum to what they did. What a row has of a document counts as a document.
    """

    seed: int
    eos_id: int
    marks: tuple[int, int, int]  # ids of prefix, middle and suffix
    rate: float = 0.5
    suffix_first: float = 0.5

    def rewrite(self, batch: Batch) -> Rewritten:
        runs = pieces(batch)
        draws = chain(row_keys(batch, self.seed, _INFILL)[runs.row, None], runs.begin[:, None], np.arange(4))
        length = runs.end - runs.begin - (batch.targets[runs.row, runs.end - 1] == self.eos_id)
        chosen = runs.real & (length >= _SHORTEST) & happens(draws[:, _WHETHER], self.rate)
        suffix_first = happens(draws[:, _ORDER], self.suffix_first)
        tokens, targets = batch.tokens.copy(), batch.targets.copy()
        origin = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
        for k in np.flatnonzero(chosen).tolist():
            row, begin, stop, end = runs.row[k], runs.begin[k], runs.begin[k] + length[k], runs.end[k]
            kept, (pre, mid, suf) = np.arange(begin, stop - 3), np.arange(stop - 3, stop)[:, None]
            cuts = np.sort(draws[k, _CUTS] % np.uint64(kept.size + 1)).astype(np.int64)
            prefix, middle, suffix = np.split(kept, cuts)
            parts = (pre, suf, suffix, mid, prefix) if suffix_first[k] else (pre, prefix, suf, suffix, mid)
            origin[row, begin:stop] = order = np.concatenate([*parts, middle])
            targets[row, stop - 3 : stop] = self.marks
            targets[row, begin:stop] = targets[row, order]
            tokens[row, begin + 1 : end] = targets[row, begin : end - 1]
        return Rewritten(tokens, targets, weights_of(batch, origin), batch.documents, origin)
