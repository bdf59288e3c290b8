"""Rows that are one short pattern over and over: the classic poison that a mean loss does not always show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bessemer.data.stream import Batch

PERIODS = 8  # longest pattern, in tokens
SHARE = 0.95  # of a row's tokens that equal the one a period before
COLUMNS = 512  # of a row that are looked at, from its middle
SHORTEST = 64  # columns: shorter rows of spaces or of a ruled line are too common in code


def repeated_rows(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which rows are a repeated pattern. 64 rows of 4,096 tokens take about 0.3 ms."""
    length = batch.tokens.shape[1]
    if length < SHORTEST:
        return np.zeros(len(batch.tokens), np.bool_)
    start = max(0, (length - COLUMNS) // 2)
    tokens = batch.targets[:, start : start + COLUMNS]
    counted = batch.weights[:, start : start + COLUMNS].astype(np.bool_)
    found = np.zeros(len(tokens), np.bool_)
    for period in range(1, PERIODS + 1):
        both = counted[:, period:]
        same = (tokens[:, period:] == tokens[:, :-period]) & both
        found |= same.sum(1) >= np.maximum(SHARE * both.sum(1), SHORTEST // 2)
    return found


def repeated_rows_of(batches: Sequence[Batch]) -> tuple[int, int]:
    """How many rows of micro-batches are a repeated pattern, and how many rows there are, padding among them."""
    rows = [repeated_rows(batch) for batch in batches]
    return sum(int(found.sum()) for found in rows), sum(found.size for found in rows)


def mostly_repeated(batches: Sequence[Batch], share: float) -> bool:
    """Whether at least two rows of a step, and at least this share of them, are a repeated pattern.

    One such row is nothing unusual: 18 of 122,017 rows of 128 tokens of Python's standard library are. Two in one step
    of eight rows come once in a million steps.
    """
    count, rows = repeated_rows_of(batches)
    return count >= 2 and count >= share * rows
