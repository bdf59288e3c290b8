"""Rankings for curricula and length buckets: the rows of a source, sorted by a measure of their documents.

A ranking is computed once, by a radix sort on disk in constant memory, and stored in a file. The order over it
(`order.CurriculumRanking`) stays a pure function with O(1) seek.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.ledger import read_cached, write_json
from bessemer.data.store.format import file_digest
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.order import CurriculumRanking
from bessemer.data.stream.rows import PADDING, Ints, Rows
from bessemer.errors import UserError
from bessemer.storage import commit_file

# Of documents, by their index in the source; NaN where there is none.
Score = Callable[[Ints], npt.NDArray[Any]]
# Of rows, by their number in the source; -inf where there is none.
Measure = Callable[[Ints], npt.NDArray[Any]]

_VERSION = 1  # raise it when the same rows and scores would be ranked differently
_COLUMNS = 1 << 22  # columns read together: 160 MB of spans if every document had one token
_CHUNK = 1 << 20  # keys sorted together
_DIGIT_BITS = 16
_ALL_BITS = (1 << 32) - 1
_NO_SCORE = ~0xFF800000 & _ALL_BITS  # the key of -inf: the smallest there is


def rank_rows(
    rows: Rows, by: str, measure: Measure, folder: Path, groups: int, descending: bool = False, run: int = 0
) -> CurriculumRanking:
    """Ranks a source's rows by a measure that `by` names (length, or a label); stored in a file of `folder`.

    Rows of equal measure keep their order; rows without one come first. An existing ranking is used if it matches its
    digest. Costs one pass over the documents' boundaries, 4 bytes of disk per row (14 meanwhile) and up to 300 MB of
    memory.
    """
    path = folder / ranking_name(rows, by, descending)
    if find_ranking_damage(path):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f"{path.name}.partial-{uuid.uuid4().hex[:12]}"
        try:
            keys = _write_keys(rows, measure, Path(f"{scratch}.keys"))
            if int(keys.max()) == _NO_SCORE:
                raise UserError(
                    f"data.curriculum: no document has a {by!r} to go by: add the step that gives it, or choose length"
                )
            _sort(keys, scratch, descending)
            digest_path(path).unlink(missing_ok=True)
            commit_file(scratch, path)
            write_json(digest_path(path), {"sum": file_digest(str(path))})
        finally:
            for leftover in folder.glob(f"{scratch.name}*"):
                leftover.unlink()
    return open_ranking(path, rows.count, groups, run)


def ranking_name(rows: Rows, by: str, descending: bool) -> str:
    """The name of the file with the ranking of these rows."""
    what = "\0".join([str(_VERSION), rows.fingerprint, rows.packing, str(rows.length), by, str(descending)])
    return f"ranking-{xxhash.xxh3_128_hexdigest(what.encode())}.bin"


def digest_path(path: Path) -> Path:
    return path.with_suffix(".json")


def find_ranking_damage(path: Path) -> str | None:
    """Why a ranking cannot be used, or None. Rankings of earlier versions have no digest."""
    if not path.exists():
        return f"{path}: missing"
    if not digest_path(path).exists():
        return None
    if read_cached(digest_path(path)) != {"sum": file_digest(str(path))}:
        return f"{path}: damaged (its content is not what was written)"
    return None


def open_ranking(path: Path, rows: int, groups: int, run: int = 0) -> CurriculumRanking:
    """A stored ranking, mapped from its file; the fingerprint is of its content."""
    dtype = _rank_type(rows)
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: the ranking is gone ({error}); run again to compute it") from error
    if size_bytes != rows * dtype.itemsize:
        raise UserError(f"{path}: {size_bytes:,} bytes instead of {rows * dtype.itemsize:,}; delete it and run again")
    mapped = np.memmap(path, dtype=dtype, mode="r", shape=(rows,)).view(np.ndarray)
    return CurriculumRanking(mapped, groups, file_digest(str(path)), run)


def curriculum_note(rows: int, read: int, by: str, descending: bool) -> str | None:
    """The plan's note on a curriculum that the run does not finish; None if it sees every group."""
    if read >= rows:
        return None
    unseen = "lowest" if descending else "highest"
    return (
        f"the curriculum by {by} takes a whole epoch and the run reads {read / rows:.0%} of one: it never sees the "
        f"{1 - read / rows:.0%} of the {unseen} {by}"
    )


def measure_by_score(rows: Rows, score: Score) -> Measure:
    """The mean of the documents' scores in a row, weighted by tokens; -inf where none of them has one.

    Sums are in span order and double precision, so every machine gets the same bits.
    """

    def measure(sequences: Ints) -> npt.NDArray[np.float64]:
        spans = rows.spans(sequences)
        real = np.flatnonzero(spans.document != PADDING)
        scores = np.asarray(score(spans.document[real]), dtype=np.float64)
        known = np.flatnonzero(~np.isnan(scores))
        row, tokens = spans.row[real][known], spans.length[real][known].astype(np.float64)
        total = np.bincount(row, weights=tokens, minlength=sequences.size)
        summed = np.bincount(row, weights=tokens * scores[known], minlength=sequences.size)
        return np.where(total > 0, summed / np.maximum(total, 1.0), -np.inf)

    return measure


def length_score(store: TokenStore) -> Score:
    """The tokens of each document, for a curriculum by length; `store.scores` is the counterpart for a label."""

    def score(documents: Ints) -> npt.NDArray[Any]:
        start, stop = store.extents(documents)
        return stop - start

    return score


def _write_keys(rows: Rows, measure: Measure, path: Path) -> npt.NDArray[np.uint32]:
    """Each row's measure as an integer in the order of the measures."""
    if rows.count == 0:
        raise UserError("data.curriculum: a source without one row cannot be ranked: add data or shorten data.context")
    keys = np.memmap(path, dtype=np.uint32, mode="w+", shape=(rows.count,))
    step = max(1, _COLUMNS // max(1, rows.length))
    for first in range(0, rows.count, step):
        at = np.arange(first, min(first + step, rows.count), dtype=np.int64)
        keys[first : first + step] = _sortable(np.asarray(measure(at), dtype=np.float64))
    return keys


def _sortable(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    """Unsigned integers that sort like the values in single precision; both zeros are equal."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)
    negative = (bits >> np.uint32(31)).astype(bool)
    return np.where(negative, ~bits, bits | np.uint32(1 << 31))


def _sort(keys: npt.NDArray[np.uint32], out: Path, descending: bool) -> None:
    """Writes the indices of the sorted keys: two stable radix passes of 16 bits."""
    n, mask = keys.size, np.uint32((1 << _DIGIT_BITS) - 1)
    low, high = (np.zeros(1 << _DIGIT_BITS, np.int64) for _ in range(2))
    for first in range(0, n, _CHUNK):
        keys[first : first + _CHUNK] ^= np.uint32(_ALL_BITS if descending else 0)
        chunk = np.asarray(keys[first : first + _CHUNK])
        low += np.bincount(chunk & mask, minlength=low.size)
        high += np.bincount(chunk >> np.uint32(_DIGIT_BITS), minlength=high.size)
    halfway = np.memmap(f"{out}.halfway", dtype=_rank_type(n), mode="w+", shape=(n,))
    digits = np.memmap(f"{out}.digits", dtype=np.uint16, mode="w+", shape=(n,))
    places = np.cumsum(low) - low
    for first in range(0, n, _CHUNK):
        chunk = np.asarray(keys[first : first + _CHUNK])
        to, order = _scatter((chunk & mask).astype(np.uint16), places)  # two bytes sort by radix
        halfway[to], digits[to] = first + order, (chunk >> np.uint32(_DIGIT_BITS))[order]
    ranked = np.memmap(out, dtype=_rank_type(n), mode="w+", shape=(n,))
    places = np.cumsum(high) - high
    for first in range(0, n, _CHUNK):
        to, order = _scatter(np.asarray(digits[first : first + _CHUNK]), places)
        ranked[to] = halfway[first : first + _CHUNK][order]
    ranked.flush()


def _scatter(digits: npt.NDArray[Any], places: Ints) -> tuple[Ints, Ints]:
    """(targets, order) for a chunk of digits; advances the next free `places`."""
    order = np.argsort(digits, kind="stable")
    taken = digits[order]
    counts = np.bincount(taken, minlength=places.size)
    begin = np.cumsum(counts) - counts
    to = places[taken] + np.arange(taken.size) - begin[taken]
    places += counts
    return to, order


def _rank_type(rows: int) -> np.dtype[Any]:
    return np.dtype("<i4") if rows <= 1 << 31 else np.dtype("<i8")
