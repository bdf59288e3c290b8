"""Bringing records with equal keys together, on disk: the out-of-core half of every deduplication step. A part's
records are sorted by key into a run. The range of keys is cut into buckets, so that a bucket's records from all runs
fit in memory; what a bucket holds is then grouped on its own, by any worker. Keys are hashes, so buckets are even.
The number of buckets follows from the number of documents, never from the number of workers.

From a document's number in the corpus back to FILE:ROW, for the messages and reports of steps that compare. Rows
mostly run on from one document to the next, so what is noted is where they do not: one record for a batch of a JSONL
file, one for each file of a source tree. The table lies on disk; looking up costs no memory of its own.
"""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.ledger import open_arrays
from bessemer.data.curate.step import Arrays, Collected, Ints
from bessemer.data.document import Document
from bessemer.errors import UserError
from bessemer.storage import atomic_file

Records = npt.NDArray[Any]  # structured; the field `key` is what they are brought together by
Words = npt.NDArray[np.uint64]

BUCKET_BYTES = 8 << 20  # grouping takes some four times as much
_MOST_BUCKETS = 1 << 16
_RECORD_BITS = 40  # of a position: a part has fewer than 10^12 records, a corpus fewer than 8 million parts
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class PartTask(Generic[Shared]):
    """What is to be done with one part, and what all such tasks are told."""

    what: str
    shared: Shared
    part: Collected
    first: int  # number of the part's first document

    @property
    def name(self) -> str:
        return f"{self.what} of part {self.part.part}"


@dataclass(frozen=True)
class BucketTask(Generic[Shared]):
    what: str
    shared: Shared
    bucket: int

    @property
    def name(self) -> str:
        return f"{self.what}, bucket {self.bucket}"


def for_parts(what: str, shared: Shared, collected: Sequence[Collected]) -> list[PartTask[Shared]]:
    numbers = numbering(collected)
    return [PartTask(what, shared, part, int(numbers[part.part])) for part in collected]


def for_buckets(what: str, shared: Shared, buckets: int) -> list[BucketTask[Shared]]:
    return [BucketTask(what, shared, bucket) for bucket in range(buckets)]


def begins(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where a run of equal records begins, in columns that are sorted together."""
    new = np.zeros(columns[0].size, bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def load(part: Collected, names: Sequence[str]) -> Arrays:
    """Some arrays of what was collected of a part; empty where no document of it was left to collect from."""
    try:
        with open_arrays(part.path) as arrays:
            found = {name: arrays[name] for name in names} if arrays.files else {}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(part, f"cannot be read ({error})") from error
    ordinals = found.get("ordinal", np.empty(0, np.int64))
    inside = not ordinals.size or (int(ordinals[0]) >= 0 and int(ordinals[-1]) < part.documents)
    if not inside or (np.diff(ordinals) < 1).any():
        raise _damaged(part, f"numbers its documents otherwise than the {part.documents:,} of the part")
    return found


def load_columns(part: Collected, names: Sequence[str]) -> Arrays:
    """As `load`, of arrays that have a record for each document."""
    found = load(part, names)
    if len({array.shape[0] for array in found.values()}) > 1:
        sizes = ", ".join(f"{name} {array.shape[0]:,}" for name, array in found.items())
        raise _damaged(part, f"is cut short ({sizes} records)")
    return found


def count_records(collected: Sequence[Collected], name: str) -> int:
    """The length of an array over all parts; only its header is read."""
    total = 0
    for part in collected:
        try:
            with zipfile.ZipFile(part.path) as archive:
                if f"{name}.npy" not in archive.namelist():
                    continue
                with archive.open(f"{name}.npy") as file:
                    np.lib.format.read_magic(file)
                    total += np.lib.format.read_array_header_1_0(file)[0][0]
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise _damaged(part, f"cannot be read ({error})") from error
    return total


def _damaged(part: Collected, what: str) -> UserError:
    collected = f"what was collected of part {part.part} of source {part.source!r}"
    return UserError(f"{part.path}: {collected} {what}; delete this file and run again")


def numbering(collected: Sequence[Collected]) -> Ints:
    """The number of each part's first document in the corpus, and the number of all."""
    return np.cumsum([0, *(part.documents for part in collected)], dtype=np.int64)


def bucket_count(records: int, dtype: np.dtype[Any]) -> int:
    return min(max(1, -(-records * dtype.itemsize // BUCKET_BYTES)), _MOST_BUCKETS)


def hash_bounds(buckets: int) -> Words:
    """Where even buckets of hashes begin, but for the first."""
    return np.array([-(-(bucket << 32) // buckets) << 32 for bucket in range(1, buckets)], np.uint64)


def position(part: int) -> int:
    """The first of the positions of a part's records: of record i, this + i. Positions follow the corpus's order."""
    return part << _RECORD_BITS


def part_bounds(parts: int) -> Words:
    """Buckets for keys that are positions: one for each part."""
    return np.array([position(part) for part in range(1, parts)], np.uint64)


def write_run(folder: Path, run: int, records: Records, bounds: Words) -> None:
    """Sorted by key, with the place where each bucket begins."""
    ordered = records[np.argsort(records["key"])]
    write_sorted(folder, run, ordered["key"], [ordered], bounds)


def write_sorted(folder: Path, run: int, keys: Words, blocks: Iterable[Records], bounds: Words) -> None:
    """As `write_run`, of records that come in order, block by block. Files appear at once, so that a worker may die and
    its task be done again."""
    index = np.concatenate([[0], np.searchsorted(keys, bounds), [keys.size]]).astype(np.int64)
    write_whole(_run(folder, run, "index"), [index])
    write_whole(_run(folder, run, "run"), blocks)


def bucket_size(folder: Path, runs: int, bucket: int) -> int:
    """How many records a bucket has."""
    return sum(stop - start for start, stop in _segments(folder, runs, bucket))


def read_bucket(folder: Path, runs: int, bucket: int, dtype: np.dtype[Any]) -> Iterator[Records]:
    """A bucket's records, run after run, in pieces of at most 2 * BUCKET_BYTES or one run's share: one piece, where a
    bucket has its usual size, as it has unless very many records share one key."""
    piece: list[tuple[int, int, int]] = []
    size = 0
    for run, (start, stop) in enumerate(_segments(folder, runs, bucket)):
        if piece and (size + stop - start) * dtype.itemsize > 2 * BUCKET_BYTES:
            yield _read(folder, piece, size, dtype)
            piece, size = [], 0
        if stop > start:
            piece.append((run, start, stop))
            size += stop - start
    if piece:
        yield _read(folder, piece, size, dtype)


def _segments(folder: Path, runs: int, bucket: int) -> list[tuple[int, int]]:
    """Where a bucket begins and ends in each run."""
    kind = np.dtype(np.int64)
    found = [read_items(_run(folder, run, "index"), kind, bucket, 2).tolist() for run in range(runs)]
    return [(start, stop) for start, stop in found]


def _read(folder: Path, piece: Sequence[tuple[int, int, int]], size: int, dtype: np.dtype[Any]) -> Records:
    records = np.empty(size, dtype)
    at = 0
    for run, start, stop in piece:
        records[at : at + stop - start] = read_items(_run(folder, run, "run"), dtype, start, stop - start)
        at += stop - start
    return records


def write_whole(path: Path, blocks: Iterable[npt.NDArray[Any]]) -> None:
    with atomic_file(path, parents=True, durable=False) as file:
        for block in blocks:
            block.tofile(file)


def read_items(path: Path, dtype: np.dtype[Any], start: int, count: int) -> npt.NDArray[Any]:
    """So many items of a file; fewer than asked for is an error, never a shorter answer."""
    items = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    if items.size != count:
        what = f"{path}: cut short at item {start + items.size:,}"
        raise UserError(f"{what}; see that the disk has space, run again")
    return items


def _run(folder: Path, run: int, kind: str) -> Path:
    return folder / f"{run:06d}.{kind}"


_COLUMNS = ("number", "row", "end", "name")
PLACE_ARRAYS = ("place_ordinal", "place_row", "place_length", "place_name")


def note_places(documents: Sequence[Document], ordinals: Ints) -> dict[str, npt.NDArray[Any]]:
    """What `collect` has to keep so that the places of these documents can be found."""
    found: list[tuple[int, int, bytes]] = []
    file, shift = None, 0
    for document, ordinal in zip(documents, ordinals.tolist(), strict=True):
        if document.file != file or document.row - ordinal != shift:
            file, shift = document.file, document.row - ordinal
            found.append((ordinal, document.row, file.encode()))
    return {
        "place_ordinal": np.array([one[0] for one in found], np.int64),
        "place_row": np.array([one[1] for one in found], np.int64),
        "place_length": np.array([len(one[2]) for one in found], np.int64),
        "place_name": np.frombuffer(b"".join(one[2] for one in found), np.uint8),
    }


class Places:
    """The table of a whole corpus, made from what was noted of each part and that part's first document number."""

    @classmethod
    def of(cls, collected: Sequence[Collected], scratch: Path) -> Self:
        numbers = numbering(collected).tolist()
        return cls(scratch / "places", ((numbers[part.part], load(part, PLACE_ARRAYS)) for part in collected))

    def __init__(self, folder: Path, parts: Iterable[tuple[int, Arrays]]) -> None:
        folder.mkdir()
        end = 0
        with contextlib.ExitStack() as stack:
            columns = {name: stack.enter_context(open(folder / name, "wb")) for name in _COLUMNS}
            for first, arrays in parts:
                if arrays:
                    ends = np.cumsum(arrays["place_length"]) + end
                    end = int(ends[-1]) if ends.size else end
                    written = arrays["place_ordinal"] + first, arrays["place_row"], ends, arrays["place_name"]
                    for name, values in zip(_COLUMNS, written, strict=True):
                        columns[name].write(values.tobytes())
        self._number, self._row, self._end = (_mapped(folder / name, np.int64) for name in _COLUMNS[:3])
        self._name = _mapped(folder / "name", np.uint8)

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The record (of those noted) and row of each document."""
        run = np.searchsorted(self._number, numbers, side="right") - 1
        return run, self._row[run] + (numbers - self._number[run])

    def file_name(self, record: int) -> bytes:
        start = int(self._end[record - 1]) if record else 0
        return self._name[start : int(self._end[record])].tobytes()

    def place(self, number: int) -> str:
        record, row = self.find(np.array([number], np.int64))
        return f"{self.file_name(int(record[0])).decode()}:{row[0]}"

    def pack(self, numbers: Ints) -> dict[str, npt.NDArray[Any]]:
        """The places of some documents as arrays for a ruling; `unpack` reads them."""
        record, row = self.find(numbers)
        different, which = np.unique(record, return_inverse=True)
        own = [self.file_name(one) for one in different.tolist()]
        names = {name: file for file, name in enumerate(dict.fromkeys(own))}
        return {
            "of_file": np.array([names[name] for name in own], np.int32)[which],
            "of_row": row,
            "file_end": np.cumsum([len(name) for name in names], dtype=np.int64),
            "file_name": np.frombuffer(b"".join(names), np.uint8),
        }


def unpack(ruling: Arrays, record: int) -> str:
    """The place of one record of a ruling."""
    file = int(ruling["of_file"][record])
    start = int(ruling["file_end"][file - 1]) if file else 0
    name = ruling["file_name"][start : int(ruling["file_end"][file])].tobytes().decode()
    return f"{name}:{ruling['of_row'][record]}"


def _mapped(path: Path, dtype: type[Any]) -> npt.NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
