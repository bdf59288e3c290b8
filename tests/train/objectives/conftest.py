"""Batches as a packed stream gives them, in which a token tells the column it stood in."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st

from bessemer.data.stream.batches import Batch

EOS, FIRST = 1, 1000  # the text of column c is the token FIRST + c


def make_packed(
    rows: Sequence[Sequence[int]], columns: int, ended: bool = True, positions: Sequence[int] = ()
) -> Batch:
    """Rows of documents of the given lengths, each ending with EOS (the last of a full row only if `ended`), and
    padding behind them. The input of a column is the target before it, or EOS."""
    targets, documents = np.zeros((2, len(rows), columns), np.int64)
    weights = np.zeros((len(rows), columns), np.float32)
    for r, lengths in enumerate(rows):
        filled = sum(lengths)
        targets[r, :filled] = FIRST + np.arange(filled)
        ends = np.cumsum(lengths, dtype=np.int64) - 1
        targets[r, ends if ended or filled < columns else ends[:-1]] = EOS
        documents[r, :filled] = np.repeat(np.arange(len(lengths)), np.array(lengths, np.int64))
        documents[r, filled:] = max(0, len(lengths) - 1)
        weights[r, :filled] = 1
    tokens = np.concatenate([np.full((len(rows), 1), EOS), targets[:, :-1]], axis=1)
    tokens[weights == 0] = 0
    at = np.array(positions or range(len(rows)), np.int64)
    return Batch(tokens, targets, weights, documents.astype(np.int32), at, np.zeros_like(at), at)


@st.composite
def any_batch(draw: Callable, most_columns: int = 60) -> Batch:
    columns = draw(st.integers(2, most_columns))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        lengths, left = [], columns
        while left:
            lengths.append(draw(st.integers(1, left)))
            left -= lengths[-1]
        if len(lengths) > 1 and draw(st.booleans()):
            lengths.pop()  # padding instead
        rows.append(lengths)
    first = draw(st.integers(0, 2**40))
    batch = make_packed(rows, columns, draw(st.booleans()), range(first, first + len(rows)))
    if draw(st.booleans()):  # a document that is banned
        batch.weights[0, batch.documents[0] == draw(st.integers(0, batch.documents[0, -1]))] = 0
    return batch


@pytest.fixture(scope="session")
def packed() -> Callable[..., Batch]:
    return make_packed


@pytest.fixture(scope="session")
def batches() -> st.SearchStrategy[Batch]:
    """Any packed batch; to be drawn with `st.data()`."""
    return any_batch()
