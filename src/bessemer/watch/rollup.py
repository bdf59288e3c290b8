"""Rollup: a columnar cache of one journal, so that a million steps are drawn in milliseconds.

The cache lies outside the run folder: one file of float32 for each number in the records (float64 for steps, tokens,
times and bytes), and `rollup.json` with marks. A mark is a byte offset of the journal, the rows before it, and the CRC
of the bytes just before it. When a rollback cuts the journal, the newest mark that still matches tells where to read
on, and the generation grows. In a column NaN is a missing value and infinity one that was not finite.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from bessemer.run.journal import Record, parse_record, to_number
from bessemer.storage import lock_file, write_atomic

FORMAT = 1
CHUNK_BYTES = 1 << 20  # read at once; a mark follows each full chunk
CRC_BYTES = 256
SAMPLED_BYTES = 64 << 20  # a journal with more unread bytes is shown by a sample of its records meanwhile
MAX_COLUMNS = 4096
MAX_LIST = 1024
WIDE = {"step", "tokens", "time"}  # float64, as is whatever ends with _bytes
LARGEST = float(np.finfo(np.float32).max)

Floats = npt.NDArray[np.float64]
NUMBER, ANYTHING = float | None, Any


def numbers_of(key: str, value: Any) -> dict[str, float | None]:
    """The columns of a record's field: a number, a truth value, or the numbers in a mapping or list by `key.name`."""
    if isinstance(value, bool):
        return {key: float(value)}
    if isinstance(value, dict):
        return {f"{key}.{name}": to_number(item) for name, item in value.items()}
    if isinstance(value, list):
        return {f"{key}.{i}": to_number(item) for i, item in enumerate(value[:MAX_LIST])}
    return {key: to_number(value)}


class RecordParser:
    """Turns lines into columns. Fields that only held numbers are decoded by a typed struct, four times as fast as
    json; a line that does not fit is read alone, and what it holds is known from then on."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}
        self._decoder = self._build()

    def _build(self) -> Any:
        fields = [(f"f{i}", kind, None) for i, kind in enumerate(self.types.values())]
        names = {f"f{i}": key for i, key in enumerate(self.types)}
        struct = msgspec.defstruct("Line", fields, rename=names, forbid_unknown_fields=True, gc=False)
        return msgspec.json.Decoder(struct, strict=False)

    def _learn(self, record: Record) -> None:
        for key, value in record.items():
            known, number = self.types.get(key), isinstance(value, (int, float, str)) and not isinstance(value, bool)
            if len(self.types) < MAX_COLUMNS and known is not ANYTHING and value is not None:
                self.types[key] = NUMBER if number and to_number(value) is not None else ANYTHING
            else:
                self.types.setdefault(key, type(None))
        self._decoder = self._build()

    def columns(self, data: bytes) -> tuple[int, dict[str, list[float | None]]]:
        """The number of records in complete lines, and their columns."""
        try:
            lines = self._decoder.decode_lines(data)
        except (msgspec.MsgspecError, ValueError):
            return self._one_by_one(data)
        rows: dict[str, list[Any]] = {}
        for i, (key, kind) in enumerate(self.types.items()):
            values = [getattr(line, f"f{i}") for line in lines]
            if kind is NUMBER:
                rows[key] = values
            elif kind is ANYTHING:
                _spread(rows, key, values)
        return len(lines), rows

    def _one_by_one(self, data: bytes) -> tuple[int, dict[str, list[float | None]]]:
        count, rows = 0, dict[str, list[float | None]]()
        lines, start = data.split(b"\n")[:-1], 0
        while start < len(lines):
            record = parse_record(lines[start])
            if record is not None:
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    self._decoder.decode(lines[start])
                    # The lines up to the next one that does not fit are read together.
                    stop = start + 1
                    while stop < len(lines) and self._fits(lines[stop]):
                        stop += 1
                    number, parsed = self.columns(b"\n".join(lines[start:stop]) + b"\n")
                    _extend(rows, parsed, count)
                    count, start = count + number, stop
                    continue
                self._learn(record)
                values = {name: [v] for key, value in record.items() for name, v in numbers_of(key, value).items()}
                _extend(rows, values, count)
                count += 1
            start += 1
        for column in rows.values():
            column += [None] * (count - len(column))
        return count, rows

    def _fits(self, line: bytes) -> bool:
        try:
            self._decoder.decode(line)
        except (msgspec.MsgspecError, ValueError):
            return False
        return True


def _extend(rows: dict[str, list[float | None]], more: Mapping[str, Sequence[float | None]], before: int) -> None:
    for name, values in more.items():
        column = rows.setdefault(name, [])
        column += [None] * (before - len(column))
        column += values


def _spread(rows: dict[str, list[float | None]], key: str, values: Sequence[Any]) -> None:
    for row, value in enumerate(values):
        if value is not None:
            _extend(rows, {name: [number] for name, number in numbers_of(key, value).items()}, row)
    for name, column in rows.items():
        if name == key or name.startswith(f"{key}."):
            column += [None] * (len(values) - len(column))


def encode(values: Sequence[float | None]) -> Floats:
    """NaN where a value is missing, infinity where it is not finite."""
    array = np.array(values, dtype=np.float64)
    not_finite = np.flatnonzero(~np.isfinite(array))
    array[[i for i in not_finite.tolist() if values[i] is not None]] = np.inf
    return array


@dataclass(frozen=True)
class Bins:
    """A column over ranges of rows. `bad` counts the values that were not finite."""

    low: Floats
    mean: Floats
    high: Floats
    bad: npt.NDArray[np.int64]


def bin_edges(start: int, stop: int, count: int) -> npt.NDArray[np.int64]:
    """Where at most `count` bins of equally many rows begin, and the end."""
    if stop <= start:
        return np.zeros(1, np.int64)
    bins = min(count, stop - start)
    return start + np.arange(bins + 1, dtype=np.int64) * (stop - start) // bins


def bin_column(values: Floats, edges: npt.NDArray[np.int64]) -> Bins:
    """Minimum, mean and maximum of the finite values of each bin; NaN for a bin without any. `values[0]` belongs to row
    `edges[0]`."""
    if len(edges) < 2:
        return Bins(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    starts = edges[:-1] - edges[0]
    if np.isfinite(values).all():  # the usual column: 3 ms a million values instead of 22
        mean = np.add.reduceat(values, starts, dtype=np.float64) / np.diff(edges)
        none = np.zeros(len(starts), np.int64)
        return Bins(np.minimum.reduceat(values, starts), mean, np.maximum.reduceat(values, starts), none)
    bad = np.isinf(values)
    finite = np.where(bad, np.nan, values)
    numbers = np.add.reduceat(~np.isnan(finite), starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.add.reduceat(np.nan_to_num(finite, nan=0.0), starts, dtype=np.float64) / numbers
    low, high = np.fmin.reduceat(finite, starts), np.fmax.reduceat(finite, starts)
    return Bins(low, mean, high, np.add.reduceat(bad, starts, dtype=np.int64))


class Rollup:
    """The cached columns of one journal. `refresh` reads what was appended; threads may share it."""

    def __init__(self, journal: Path, cache: Path) -> None:
        self.journal, self.cache = journal, cache
        self.generation, self.rows, self.consumed = int(time.time()), 0, 0
        self._crc = 0
        self._marks: list[tuple[int, int, int]] = []  # offset, rows, CRC
        self._files: dict[str, tuple[int, np.dtype[Any]]] = {}
        self._order: list[str] = []  # column names; the file of the i-th is named by i
        self._parser, self._lock = RecordParser(), threading.RLock()
        cache.mkdir(parents=True, exist_ok=True)
        self._owner = (cache / "lock").open("w")
        if not lock_file(self._owner, wait=False):
            raise BlockingIOError(f"{cache}: is used by another process")
        self._load()

    def _load(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads((self.cache / "rollup.json").read_bytes())
            if saved["format"] == FORMAT and saved["marks"]:
                sizes = [(self.cache / f"{i}").stat().st_size for i in range(len(saved["columns"]))]
                rows = saved["marks"][-1][1]
                if all(
                    size >= rows * _dtype(name).itemsize for size, name in zip(sizes, saved["columns"], strict=True)
                ):
                    self._marks, self.generation = [tuple(mark) for mark in saved["marks"]], saved["generation"]
                    for name in saved["columns"]:
                        self._column_file(name)
        self._return_to(len(self._marks))

    def _save(self) -> None:
        state = {"format": FORMAT, "journal": str(self.journal), "generation": self.generation}
        content = json.dumps({**state, "columns": self._order, "marks": self._marks})
        write_atomic(self.cache / "rollup.json", content, durable=False)

    def _column_file(self, name: str) -> tuple[int, np.dtype[Any]]:
        if name not in self._files:
            path = self.cache / str(len(self._order))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._files[name] = descriptor, _dtype(name)
            self._order.append(name)
        return self._files[name]

    def _return_to(self, marks: int) -> None:
        """Keep the rows up to the n-th mark."""
        del self._marks[marks:]
        self.consumed, self.rows, self._crc = self._marks[-1] if self._marks else (0, 0, 0)
        for descriptor, dtype in self._files.values():
            os.ftruncate(descriptor, self.rows * dtype.itemsize)

    def refresh(self, limit_bytes: int = 1 << 62) -> bool:
        """Read what was appended since, at most about `limit_bytes`; whether rows came or went."""
        with self._lock:
            try:
                file = self.journal.open("rb")
            except OSError:  # not written yet, or deleted
                return False
            with file:
                before, marks = (self.generation, self.rows), len(self._marks)
                size = os.fstat(file.fileno()).st_size
                if size < self.consumed or _crc_before(file, self.consumed) != self._crc:
                    self._follow_cut(file, size)
                end = min(size, self.consumed + limit_bytes)
                while self.consumed < end and self._read_chunk(file, size):
                    pass
            if len(self._marks) != marks or before[0] != self.generation:
                self._save()
            return before != (self.generation, self.rows)

    def _follow_cut(self, file: IO[bytes], size: int) -> None:
        """The journal was cut: return to the newest mark that it still agrees with. A cut leaves the part before it
        alone, so bisection finds it."""
        low, high = 0, len(self._marks)
        while low < high:
            middle = (low + high) // 2
            offset, _, crc = self._marks[middle]
            agrees = offset <= size and _crc_before(file, offset) == crc
            low, high = (middle + 1, high) if agrees else (low, middle)
        self._return_to(low)
        self.generation += 1

    def _read_chunk(self, file: IO[bytes], size: int) -> bool:
        """Append the rows of the next complete lines; False if there is none yet."""
        length = CHUNK_BYTES
        while True:
            data = os.pread(file.fileno(), min(length, size - self.consumed), self.consumed)
            end = data.rfind(b"\n") + 1
            if end or len(data) < length:
                break
            length *= 2  # a line longer than a chunk
        if not end:
            return False
        count, rows = self._parser.columns(data[:end])
        for name, values in rows.items():
            if name in self._files or (len(self._files) < MAX_COLUMNS and any(v is not None for v in values)):
                self._write(name, encode(values))
        self.consumed, self.rows = self.consumed + end, self.rows + count
        self._crc = _crc_before(file, self.consumed)
        if self.consumed - (self._marks[-1][0] if self._marks else 0) >= CHUNK_BYTES // 2:
            for name in self._files:  # so that all columns are as long as the mark says
                self._fill(name, self.rows)
            self._marks.append((self.consumed, self.rows, self._crc))
        return True

    def _write(self, name: str, values: Floats) -> None:
        descriptor, dtype = self._column_file(name)
        self._fill(name, self.rows)
        if dtype == np.float32:
            values = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)
        os.pwrite(descriptor, values.astype(dtype).tobytes(), self.rows * dtype.itemsize)

    def _fill(self, name: str, rows: int) -> None:
        """Missing values up to a row, for a column that began late or was absent from the last records."""
        descriptor, dtype = self._files[name]
        missing = rows - os.fstat(descriptor).st_size // dtype.itemsize
        if missing > 0:
            os.pwrite(descriptor, np.full(missing, np.nan, dtype).tobytes(), (rows - missing) * dtype.itemsize)

    @property
    def names(self) -> list[str]:
        """The columns, in the order in which they appeared."""
        with self._lock:
            return list(self._order)

    @property
    def unread_bytes(self) -> int:
        try:
            return max(0, self.journal.stat().st_size - self.consumed)
        except OSError:
            return 0

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """The values of some rows, float64; all missing for an unknown name."""
        with self._lock:
            stop = self.rows if stop is None else min(stop, self.rows)
            count = max(0, stop - start)
            if name not in self._files or not count:
                return np.full(count, np.nan)
            descriptor, dtype = self._files[name]
            data = os.pread(descriptor, count * dtype.itemsize, start * dtype.itemsize)
            values = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype).astype(np.float64)
            return values if len(values) == count else np.append(values, np.full(count - len(values), np.nan))

    def sample(self, count: int = 1000) -> list[Record]:
        """Records at evenly spaced places of the journal, for a first view of one that is not read yet."""
        records: list[Record] = []
        with contextlib.suppress(OSError), self.journal.open("rb") as file:
            size, length = os.fstat(file.fileno()).st_size, 16 << 10
            for place in np.linspace(0, max(0, size - length), count, dtype=np.int64).tolist():
                lines = os.pread(file.fileno(), length, place).split(b"\n")
                record = parse_record(lines[0] if place == 0 else lines[1]) if len(lines) > 2 else None
                if record is not None and (not records or record.get("step") != records[-1].get("step")):
                    records.append(record)
        return records

    def close(self) -> None:
        with self._lock:
            for descriptor, _ in self._files.values():
                os.close(descriptor)
            self._files.clear()
            self._owner.close()


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.float64 if name in WIDE or name.endswith("_bytes") else np.float32)


def _crc_before(file: IO[bytes], offset: int) -> int:
    start = max(0, offset - CRC_BYTES)
    return zlib.crc32(os.pread(file.fileno(), offset - start, start))
