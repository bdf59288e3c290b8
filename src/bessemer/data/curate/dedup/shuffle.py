"""Groups records with equal keys, out of core: the disk half of every deduplication step. Each part's records are
sorted by key into a run. The key range is divided into buckets small enough for memory, and any worker can group a
bucket from all runs. Keys are hashes, so buckets are even. Their number depends on the number of documents, never on
the number of workers.

`Places` maps document numbers back to FILE:ROW for messages and reports. Rows mostly continue from one document to the
next, so only breaks are stored, on disk: one record per batch of a JSONL file, one per file of a source tree.
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
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.storage import atomic_file

Records = npt.NDArray[Any]  # structured, with a field `key` to group by
Words = npt.NDArray[np.uint64]

BUCKET_BYTES = 8 << 20  # grouping takes about four times as much memory
_MOST_BUCKETS = 1 << 16
_RECORD_BITS = 40  # of a position: up to 10^12 records per part and 8 million parts
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class PartTask(Generic[Shared]):
    """A task on one part, and what all such tasks share."""

    label: str
    shared: Shared
    part: Collected
    first: int  # number of the part's first document

    @property
    def name(self) -> str:
        return f"{self.label} of part {self.part.part}"


@dataclass(frozen=True)
class BucketTask(Generic[Shared]):
    label: str
    shared: Shared
    bucket: int

    @property
    def name(self) -> str:
        return f"{self.label}, bucket {self.bucket}"


def for_parts(label: str, shared: Shared, collected: Sequence[Collected]) -> list[PartTask[Shared]]:
    numbers = numbering(collected)
    return [PartTask(label, shared, part, int(numbers[part.part])) for part in collected]


def for_buckets(label: str, shared: Shared, buckets: int) -> list[BucketTask[Shared]]:
    return [BucketTask(label, shared, bucket) for bucket in range(buckets)]


def begins(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Marks where a run of equal records begins, in columns sorted together."""
    new = np.zeros(columns[0].size, bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def load(part: Collected, names: Sequence[str]) -> Arrays:
    """Some arrays collected from a part; empty where no document was left to collect from."""
    try:
        with open_arrays(part.path) as arrays:
            columns = {name: arrays[name] for name in names} if arrays.files else {}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(part, f"cannot be read ({error})") from error
    ordinals = columns.get("ordinal", np.empty(0, np.int64))
    in_range = not ordinals.size or (int(ordinals[0]) >= 0 and int(ordinals[-1]) < part.documents)
    if not in_range or (np.diff(ordinals) < 1).any():
        raise _damaged(part, f"numbers its documents otherwise than the {part.documents:,} of the part")
    return columns


def load_columns(part: Collected, names: Sequence[str]) -> Arrays:
    """As `load`, for arrays with one record per document."""
    columns = load(part, names)
    if len({array.shape[0] for array in columns.values()}) > 1:
        sizes = ", ".join(f"{name} {array.shape[0]:,}" for name, array in columns.items())
        raise _damaged(part, f"is cut short ({sizes} records)")
    return columns


def count_records(collected: Sequence[Collected], name: str) -> int:
    """The length of an array summed over all parts; reads only the headers."""
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


def _damaged(part: Collected, problem: str) -> UserError:
    subject = f"what was collected of part {part.part} of source {part.source!r}"
    return UserError(f"{part.path}: {subject} {problem}; delete this file and run again")


def numbering(collected: Sequence[Collected]) -> Ints:
    """The corpus-wide number of each part's first document, and the total."""
    return np.cumsum([0, *(part.documents for part in collected)], dtype=np.int64)


def bucket_count(records: int, dtype: np.dtype[Any]) -> int:
    return min(max(1, -(-records * dtype.itemsize // BUCKET_BYTES)), _MOST_BUCKETS)


def hash_bounds(buckets: int) -> Words:
    """The lower bounds of even buckets of hashes, without the first."""
    return np.array([-(-(bucket << 32) // buckets) << 32 for bucket in range(1, buckets)], np.uint64)


def position(part: int) -> int:
    """The position of a part's first record; record i has this + i. Positions follow the order of the corpus."""
    return part << _RECORD_BITS


def part_bounds(parts: int) -> Words:
    """Buckets for keys that are positions: one per part."""
    return np.array([position(part) for part in range(1, parts)], np.uint64)


def write_run(folder: Path, run: int, records: Records, bounds: Words) -> None:
    """Writes records sorted by key, and the offset of each bucket."""
    ordered = records[np.argsort(records["key"])]
    write_sorted(folder, run, ordered["key"], [ordered], bounds)


def write_sorted(folder: Path, run: int, keys: Words, blocks: Iterable[Records], bounds: Words) -> None:
    """As `write_run`, for records that arrive sorted, block by block. Files appear atomically, so a task can be
    rerun."""
    index = np.concatenate([[0], np.searchsorted(keys, bounds), [keys.size]]).astype(np.int64)
    write_blocks(_run_path(folder, run, "index"), [index])
    write_blocks(_run_path(folder, run, "run"), blocks)


def bucket_size(folder: Path, runs: int, bucket: int) -> int:
    """How many records a bucket has."""
    return sum(stop - start for start, stop in _segments(folder, runs, bucket))


def read_bucket(folder: Path, runs: int, bucket: int, dtype: np.dtype[Any]) -> Iterator[Records]:
    """A bucket's records, run after run, in pieces of at most 2 * BUCKET_BYTES or one run's share. Usually one piece,
    unless very many records share one key."""
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


def _segments(folder: Path, runs: int, bucket: int) -> list[list[int]]:
    """The start and stop of a bucket in each run."""
    dtype = np.dtype(np.int64)
    return [read_items(_run_path(folder, run, "index"), dtype, bucket, 2).tolist() for run in range(runs)]


def _read(folder: Path, piece: Sequence[tuple[int, int, int]], size: int, dtype: np.dtype[Any]) -> Records:
    records = np.empty(size, dtype)
    at = 0
    for run, start, stop in piece:
        records[at : at + stop - start] = read_items(_run_path(folder, run, "run"), dtype, start, stop - start)
        at += stop - start
    return records


def write_blocks(path: Path, blocks: Iterable[npt.NDArray[Any]]) -> None:
    with atomic_file(path, parents=True, durable=False) as file:
        for block in blocks:
            block.tofile(file)


def read_items(path: Path, dtype: np.dtype[Any], start: int, count: int) -> npt.NDArray[Any]:
    """`count` items of a file; an error where it has fewer."""
    items = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    if items.size != count:
        raise UserError(f"{path}: cut short at item {start + items.size:,}; see that the disk has space, run again")
    return items


def _run_path(folder: Path, run: int, kind: str) -> Path:
    return folder / f"{run:06d}.{kind}"


_COLUMNS = ("number", "row", "end", "name")
PLACE_ARRAYS = ("place_ordinal", "place_row", "place_length", "place_name")


def note_places(documents: Sequence[Document], ordinals: Ints) -> dict[str, npt.NDArray[Any]]:
    """The arrays that `collect` must store so that `Places` can locate these documents."""
    breaks: list[tuple[int, int, bytes]] = []
    file, shift = None, 0
    for document, ordinal in zip(documents, ordinals.tolist(), strict=True):
        if document.file != file or document.row - ordinal != shift:
            file, shift = document.file, document.row - ordinal
            breaks.append((ordinal, document.row, file.encode()))
    return {
        "place_ordinal": np.array([entry[0] for entry in breaks], np.int64),
        "place_row": np.array([entry[1] for entry in breaks], np.int64),
        "place_length": np.array([len(entry[2]) for entry in breaks], np.int64),
        "place_name": np.frombuffer(b"".join(entry[2] for entry in breaks), np.uint8),
    }


class Places:
    """The locations of all documents of a corpus, from each part's arrays and first document number."""

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
                    values_by_column = arrays["place_ordinal"] + first, arrays["place_row"], ends, arrays["place_name"]
                    for name, values in zip(_COLUMNS, values_by_column, strict=True):
                        columns[name].write(values.tobytes())
        self._number, self._row, self._end = (_mapped(folder / name, np.int64) for name in _COLUMNS[:3])
        self._name = _mapped(folder / "name", np.uint8)

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The stored record and the row of each document."""
        run = np.searchsorted(self._number, numbers, side="right") - 1
        return run, self._row[run] + (numbers - self._number[run])

    def file_name(self, record: int) -> bytes:
        start = int(self._end[record - 1]) if record else 0
        return self._name[start : int(self._end[record])].tobytes()

    def place(self, number: int) -> str:
        record, row = self.find(np.array([number], np.int64))
        return f"{self.file_name(int(record[0])).decode()}:{row[0]}"

    def pack(self, numbers: Ints) -> dict[str, npt.NDArray[Any]]:
        """The places of some documents as arrays for a step's decisions; `unpack` reads them."""
        record, row = self.find(numbers)
        different, which = np.unique(record, return_inverse=True)
        file_names = [self.file_name(number) for number in different.tolist()]
        names = {name: file for file, name in enumerate(dict.fromkeys(file_names))}
        return {
            "of_file": np.array([names[name] for name in file_names], np.int32)[which],
            "of_row": row,
            "file_end": np.cumsum([len(name) for name in names], dtype=np.int64),
            "file_name": np.frombuffer(b"".join(names), np.uint8),
        }


def unpack(decisions: Arrays, record: int) -> str:
    """The place of one record of a step's decisions."""
    file = int(decisions["of_file"][record])
    start = int(decisions["file_end"][file - 1]) if file else 0
    name = decisions["file_name"][start : int(decisions["file_end"][file])].tobytes().decode()
    return f"{name}:{decisions['of_row'][record]}"


def _mapped(path: Path, dtype: type[Any]) -> npt.NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
