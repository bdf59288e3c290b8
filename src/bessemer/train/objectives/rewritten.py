"""What an objective makes of a batch, and what all of them share. Shapes: R rows, T columns.

Objectives are pure: draws are keyed by seed and the row's position in the stream, so a step replays on any number of
ranks, and the next epoch, at other positions, draws anew. None depends on weights: a ban leaves other documents alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.data.order import Ints, Words, chain
from bessemer.data.stream import Batch

Flags = npt.NDArray[np.bool_]
PADDING = -1  # the document number of no document, and the origin of what is not learnt


@dataclass
class Rewritten:
    """Documents are numbered as in the batch. Padding behind a document shares its number where attention is causal
    and never looks there; where it is not, padding has a number of its own."""

    tokens: Ints  # (R, T) inputs; of the decoder where there is an encoder
    targets: Ints
    weights: npt.NDArray[np.float32]
    documents: npt.NDArray[np.int32]
    origin: Ints  # column of the batch that a target came from; PADDING where nothing is learnt
    prefix: Flags | None = None  # columns that all of their document may see, whether ahead or not
    causal: bool = True
    encoder_tokens: Ints | None = None  # (R, S); the decoder looks at the encoder's columns of the same document
    encoder_documents: npt.NDArray[np.int32] | None = None

    @property
    def count(self) -> float:
        """The sum of the weights: not the batch's, which knows of next tokens alone."""
        return float(self.weights.sum(dtype=np.float64))

    @property
    def single_document(self) -> bool:
        return not (self.documents != self.documents[:, :1]).any()

    def home(self, losses: npt.ArrayLike, batch: Batch) -> tuple[Batch, npt.NDArray[np.float64]]:
        """The batch with weights where targets came from, and their losses in these columns: for `blame`."""
        learnt, (rows, columns) = self.weights > 0, batch.tokens.shape
        cells = (np.arange(rows)[:, None] * columns + self.origin)[learnt]
        summed: Any = np.bincount(cells, np.asarray(losses, np.float64)[learnt], rows * columns)
        weights = (np.bincount(cells, minlength=rows * columns) > 0).astype(np.float32)
        return replace(batch, weights=weights.reshape(rows, columns)), summed.reshape(rows, columns)


class Objective(Protocol):
    def rewrite(self, batch: Batch, /) -> Rewritten: ...


@dataclass(frozen=True)
class Pieces:
    """The runs of columns that are one document each, row by row; padding behind them is a run as well."""

    row: Ints
    begin: Ints
    end: Ints
    real: Flags  # no padding
    number: Ints  # (R, T) of the run that a cell belongs to
    padding: Flags  # (R, T)


def pieces(batch: Batch) -> Pieces:
    # Padding has token and target 0 and no weight. The end of a document looks like that only where it has no weight
    # either, and then a few columns less of it do no harm.
    empty = (batch.tokens == 0) & (batch.targets == 0) & (batch.weights == 0)
    padding = np.logical_and.accumulate(empty[:, ::-1], axis=1)[:, ::-1]
    begins = np.ones(padding.shape, np.bool_)
    begins[:, 1:] = (batch.documents[:, 1:] != batch.documents[:, :-1]) | (padding[:, 1:] != padding[:, :-1])
    row, begin = np.nonzero(begins)
    end = np.append(begin[1:], 0)
    end[end == 0] = padding.shape[1]
    return Pieces(row, begin, end, ~padding[row, begin], np.cumsum(begins).reshape(begins.shape) - 1, padding)


def row_keys(batch: Batch, seed: int, purpose: int) -> Words:
    """(R,) A key for each row; rows that only fill up a batch share one."""
    return chain(seed % 2**64, purpose, np.maximum(batch.positions, 0))


def happens(draws: Words, share: float) -> Flags:
    """True for this share of the draws, by their upper half."""
    return (draws >> np.uint64(32)) < round(share * 2**32)


def weights_of(batch: Batch, origin: Ints) -> npt.NDArray[np.float32]:
    """A target weighs what the token it came from weighed."""
    found = np.take_along_axis(batch.weights, np.maximum(origin, 0), axis=1)
    return np.where(origin == PADDING, np.float32(0), found)
