"""What a source gives to the stream: rows of T tokens, numbered, each put together on demand.

`concat` cuts the store into windows, `best_fit` packs whole documents, `pad` gives every document a row of its own and
`lazy` tokenizes when asked. The stream only knows this protocol: `Order` says which row comes when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bessemer.data.store import Origin
    from bessemer.data.stream import Batch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

PADDING = -1  # the document of a span that belongs to none


@dataclass(frozen=True)
class Spans:
    """Runs of columns of one document each, by row and column; together they cover every row.

    A column belongs to the document of its *target*: as an input, the EOS of one document opens the next.
    """

    row: Ints  # index into the rows asked for
    column: Ints
    length: Ints
    document: Ints  # index in the source; PADDING for columns that belong to no document
    weight: npt.NDArray[Any]  # sum of the target weights: the length, less what a mask leaves out; 0 for padding

    @cached_property
    def number(self) -> Ints:
        """Each span's number within its row: 0, 1, 2, ... Padding behind a document shares its number, since causal
        attention never looks there: a padded row of one document then still needs no mask."""
        begins = (self.document != PADDING) & (self.column > 0)
        counted = np.cumsum(begins)
        firsts = np.flatnonzero(self.column == 0)
        spans_per_row = np.diff(firsts, append=self.row.size)
        return counted - np.repeat(counted[firsts], spans_per_row)


@dataclass
class Block:
    """Some rows, put together. Padding has token 0 and target 0."""

    tokens: Ints  # (n, T) inputs
    targets: Ints  # (n, T)
    weights: Floats | None  # (n, T) of the targets; None: 1 everywhere but 0 in padding
    spans: Spans  # where there are `weights`, these count and not the spans' sums


@runtime_checkable
class Rows(Protocol):
    """The rows of one source. Pure: the same number gives the same row, in any company and in any process."""

    @property
    def count(self) -> int:
        """How many rows there are in an epoch: the source's length in the `Order`."""
        ...

    @property
    def length(self) -> int:
        """T, the columns of every row."""
        ...

    @property
    def packing(self) -> str:
        """concat, best_fit, pad, ...: with its settings, if they change a row."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of all that decides the rows besides `packing` and T. Resuming with another one is refused."""
        ...

    @property
    def full(self) -> bool:
        """Every target of every row has weight 1, so a step's count needs no spans."""
        ...

    def spans(self, sequences: Ints, /) -> Spans:
        """The documents in the rows and their weights, without reading tokens where that is possible."""
        ...

    def assemble(self, sequences: Ints, /) -> Block:
        """The rows themselves, one for each number, in their order; arrays that the caller may change."""
        ...

    def origin_of_document(self, document: int, /) -> Origin:
        """Where a document of a span came from."""
        ...


@runtime_checkable
class Expecting(Protocol):
    """Rows that may come from afar: told what will be read soon, they fetch it in the background."""

    @property
    def far(self) -> bool:
        """False: all is at hand, and `expect` does nothing."""
        ...

    def expect(self, sequences: Ints, /) -> None: ...


class Transform(Protocol):
    """A last change to each micro-batch, such as noise on its inputs or cutting off common padding.

    Pure: it may draw only on its settings and the batch's `positions`. It keeps every row's sum of weights, because
    `step_count` is known before the batch is built; and document numbers, because `locate` reports by them.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Entries for the stream's identity: what changes the tokens. Empty when nothing does."""
        ...

    def __call__(self, batch: Batch, /) -> Batch: ...


def token_arrays(rows: int, length: int) -> tuple[Ints, Ints]:
    """Two uninitialised (rows, length) arrays for tokens and targets."""
    return np.empty((rows, length), np.int64), np.empty((rows, length), np.int64)
