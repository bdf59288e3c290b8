"""Tokens that a model hardly learned: seen too rarely in its data, or with an embedding like those never seen.

By counts it takes the corpus, by embeddings the weights alone: Land and Bartolo 2024, "Fishing for Magikarp".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def rarely_seen(counts: npt.ArrayLike, at_most: int | None = None) -> Ints:
    """Ids seen at most so often in the corpus, rarest first.

    Without `at_most`, a hundredth of what each id would have if all were equally frequent: text follows Zipf's law,
    so ordinary tokens lie above it.
    """
    seen = np.asarray(counts, np.int64)
    limit = int(seen.sum() / max(1, seen.size) / 100) if at_most is None else at_most
    rare = np.flatnonzero(seen <= limit)
    return rare[np.argsort(seen[rare], kind="stable")]


def indicator(matrix: npt.NDArray[Any], unused: Sequence[int], tied: bool = True) -> Floats:
    """For each row of an embedding matrix, how far it lies from those never trained: the lowest are suspect.

    `tied`, or given the output matrix: the cosine distance to the mean of the `unused` rows, the direction that all
    rows share (the first principal component) taken out before. Not tied, given the input matrix: the row's norm,
    which weight decay shrinks while nothing trains it; `unused` is then not needed. Takes three times the memory of
    the matrix.
    """
    rows = np.asarray(matrix, np.promote_types(matrix.dtype, np.float32))
    if rows.ndim != 2:
        raise ValueError(f"an embedding matrix has rows and columns, not {rows.ndim} axes")
    if not tied:
        return np.linalg.norm(rows, axis=1).astype(np.float64)
    if not len(unused):
        raise UserError(
            "no ids known to be unused: give some, such as those above the tokenizer's vocabulary or its lone bytes"
        )
    centred = rows - rows.mean(axis=0)
    # The eigenvectors of a small square matrix instead of the decomposition of a large one.
    _, vectors = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    shared = vectors[:, -1].astype(rows.dtype)
    rows = rows - np.outer(rows @ shared, shared)
    mean = rows[list(unused)].mean(axis=0)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(mean)
    # A row of zeros has no direction: it counts as being at a right angle, as in the paper's code.
    return 1.0 - (rows @ mean).astype(np.float64) / np.maximum(lengths, 1e-6)


def suspects(values: Floats, unused: Sequence[int], share: float = 0.02) -> Ints:
    """The `share` of ids with the lowest indicator (the paper looks at 2 %), lowest first, known ones left out."""
    order = np.argsort(values, kind="stable")
    order = order[~np.isin(order, np.asarray(unused, np.int64))]
    return order[: max(1, int(share * values.size))]
