"""Span denoising (T5): spans of a document become sentinels, and the model writes what stood there.

For an encoder and a decoder, or for a decoder alone, which sees the corrupted document as a prefix (as in UL2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bessemer.data.order import Ints, Words, chain
from bessemer.data.stream import Batch
from bessemer.errors import UserError
from bessemer.spec.objectives import spans_of
from bessemer.train.objectives.rewritten import PADDING, Flags, Rewritten, pieces, row_keys, weights_of

_PURPOSE = 0x64656E6F697365
_MULTIPLE = 64  # encoder and decoder are as wide as their longest row, rounded up so that few shapes occur


@dataclass(frozen=True)
class Denoise:
    """`rate` of each document's tokens lie in spans of `span` tokens on average. The input has a sentinel for a span,
    the target each sentinel with its span, and both end with EOS. As in T5's code, a document begins with a kept token
    and ends with a span. Each begins with the first sentinel.

    The text gets longer by that: a decoder alone drops what no longer fits from the document's end (9 % of it at the
    defaults), an encoder-decoder at most one token. Documents under 3 tokens (6 for a decoder alone) are left out.
    """

    seed: int
    eos_id: int
    sentinels: tuple[int, ...]
    context: int
    rate: float = 0.15
    span: float = 3.0
    encoder: bool = False  # the model has one; else the decoder reads the input as well
    start_id: int = 0  # the decoder's first input; T5 has its padding there

    def __post_init__(self) -> None:
        most = spans_of(self.context, self.rate, self.span)[1]
        if most > len(self.sentinels):
            have = f"has up to {most} spans, and there are {len(self.sentinels)} sentinels"
            fix = "name more in the objective's tokens, raise span or shorten data.context"
            raise UserError(f"denoise: a row of {self.context} tokens {have}: {fix}")

    def rewrite(self, batch: Batch) -> Rewritten:
        runs, (rows, columns) = pieces(batch), batch.tokens.shape
        draws = chain(row_keys(batch, self.seed, _PURPOSE)[:, None], np.arange(columns))
        encoder: list[list[Ints]] = [[] for _ in range(rows)]  # tokens and document numbers, document by document
        decoder: list[list[Ints]] = [[] for _ in range(rows)]  # tokens, targets, origins, document numbers, prefix
        sizes = runs.end - runs.begin - 1 if self.encoder else self._fitting[runs.end - runs.begin]
        for k in np.flatnonzero(runs.real & (sizes > 1)).tolist():
            row, begin, end, size = int(runs.row[k]), int(runs.begin[k]), int(runs.end[k]), int(sizes[k])
            hidden = noise_mask(size, self.rate, self.span, draws[row, begin : begin + size])
            inputs, targets, origin = self._corrupt(batch.targets[row, begin : begin + size], hidden)
            origin = np.append(begin + origin, end - 1)
            first, number, seen = self.start_id, batch.documents[row, begin], 0
            if self.encoder:
                encoder[row].append(np.stack([inputs, np.full(inputs.size, number)]))
            else:
                first, seen = batch.tokens[row, begin], inputs.size + 1
                origin = np.concatenate([np.full(inputs.size, PADDING), origin])
                targets = np.concatenate([inputs, targets])
            tokens, prefix = np.append(first, targets[:-1]), np.arange(targets.size) < seen
            decoder[row].append(np.stack([tokens, targets, origin, np.full(tokens.size, number), prefix]))
        width = None if self.encoder else columns
        tokens, targets, origin, numbers, prefix = _lay(decoder, [0, 0, PADDING, PADDING, 0], width)
        # Padding gets the number of the last document: there too a decoder finds encoder columns to look at.
        documents = np.maximum.accumulate(numbers, axis=1).astype(np.int32)
        found = Rewritten(tokens, targets, weights_of(batch, origin), documents, origin)
        if self.encoder:
            found.encoder_tokens, numbers = _lay(encoder, [0, PADDING])
            found.encoder_documents = numbers.astype(np.int32)
        else:
            found.prefix = prefix.astype(np.bool_)
        return found

    def _corrupt(self, text: Ints, hidden: Flags) -> tuple[Ints, Ints, Ints]:
        """(input, target, where each token of the target was in the text, its end left out)."""
        begins = hidden & ~np.append(False, hidden[:-1])
        first, inside = np.flatnonzero(begins), np.flatnonzero(hidden)
        marks, before = np.array(self.sentinels[: first.size], np.int64), np.searchsorted(inside, first)
        inputs = text.copy()
        inputs[first] = marks
        inputs = np.append(inputs[~hidden | begins], self.eos_id)
        targets = np.append(np.insert(text[inside], before, marks), self.eos_id)
        return inputs, targets, np.insert(inside, before, first)

    @cached_property
    def _fitting(self) -> Ints:
        """For each number of columns, the tokens whose input and target fit into them."""
        need = [size + 2 * spans_of(size, self.rate, self.span)[1] + 2 for size in range(2, self.context + 1)]
        return np.searchsorted(np.array(need), np.arange(self.context + 1), side="right") + 1


def _lay(parts: list[list[Ints]], fill: list[int], width: int | None = None) -> Ints:
    """(fields, R, width): documents of (fields, length) each, one after another in their rows."""
    rows = [np.concatenate([np.empty((len(fill), 0), np.int64), *row], axis=1) for row in parts]
    width = width or -(-max(1, *(row.shape[1] for row in rows)) // _MULTIPLE) * _MULTIPLE
    laid = np.tile(np.array(fill)[:, None, None], (1, len(rows), width))
    for k, row in enumerate(rows):
        laid[:, k, : row.shape[1]] = row
    return laid


def noise_mask(length: int, rate: float, span: float, draws: Words) -> Flags:
    """Which of at least two tokens lie in spans: T5's random_spans_noise_mask, from a draw for each token.

    The tokens in spans and the others are both cut at random into the same number of parts, which then alternate.
    """
    noise, spans = spans_of(length, rate, span)
    hidden, kept = _cut(noise, spans, draws[: noise - 1]), _cut(length - noise, spans, draws[noise - 1 :])
    return np.repeat(np.tile([False, True], spans), np.stack([kept, hidden], axis=1).ravel())


def _cut(items: int, parts: int, draws: Words) -> Ints:
    """Lengths of parts of at least one item, every way to cut being as likely: the draws rank the gaps."""
    gaps = np.sort(np.argsort(draws[: items - 1], kind="stable")[: parts - 1])
    return np.diff(np.concatenate([[0], gaps + 1, [items]]))
