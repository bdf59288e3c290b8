"""Journal: append-only JSON lines that survive a kill.

One record is one write() of one line, so a killed writer leaves at most one torn last line. Readers ignore it, and the
next writer removes it. Records are not fsynced one by one, which would slow down training: `sync()` is called when a
checkpoint commits, and a resume removes everything after its checkpoint. A power cut can leave a line of zeros; lines
that are not records are skipped. Lines that a full disk refuses wait in memory until they can be written.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from bessemer.storage import write_atomic

Record = dict[str, Any]
IN_ORDER = 1000  # records of ascending steps, after which a search from the end stops


def json_ready(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become the strings 'nan', 'inf', '-inf'."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


def to_number(value: Any) -> float | None:
    """The number in a field of a record, including 'nan' and 'inf'; None if it is not a number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def parse_record(line: bytes) -> Record | None:
    """The record in a line, or None if it is not a record."""
    try:
        record = json.loads(line)
    except ValueError:  # also invalid UTF-8
        return None
    return record if isinstance(record, dict) else None


class Journal:
    """Writes a journal. The run's lock makes sure that only one process does; its threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fault = ""  # why the last write was refused
        self._unwritten: deque[bytes] = deque()
        self._lock = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._cut_torn_line()
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            complete = end
            while complete > 0:  # go back to the last newline
                start = max(0, complete - 4096)
                file.seek(start)
                newline = file.read(complete - start).rfind(b"\n")
                if newline >= 0:
                    complete = start + newline + 1
                    break
                complete = start
            if complete < end:
                file.truncate(complete)

    @property
    def size_bytes(self) -> int:
        """Size of all records, including those that wait in memory."""
        with self._lock:
            return os.fstat(self._fd).st_size + sum(map(len, self._unwritten))

    def read(self, size_bytes: int) -> bytes:
        """The first bytes, also of a file that was deleted behind the writer's back."""
        pieces, at = [], 0
        while at < size_bytes and (piece := os.pread(self._fd, min(size_bytes - at, 1 << 24), at)):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def append(self, record: Record) -> None:
        """Write one line. If the disk refuses it, the line waits in memory, and OSError gives the reason."""
        line = json.dumps(json_ready(record), ensure_ascii=False, default=str) + "\n"
        with self._lock:
            # A file name that is not UTF-8 has lone surrogates; \udcXX is JSON's escape for them.
            self._unwritten.append(line.encode("utf-8", "backslashreplace"))
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait in memory. OSError, with the file's name, if the disk still refuses them."""
        with self._lock:
            try:
                while self._unwritten:
                    self._write(self._unwritten[0])
                    self._unwritten.popleft()
                self.fault = ""
            except OSError as error:
                self.fault = f"{self.path}: {error.strerror}"
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _write(self, data: bytes) -> None:
        """Write all of a line or nothing: a partial write is undone."""
        written = os.write(self._fd, data)
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def cut(self, keep: Callable[[Record], bool]) -> int:
        """Truncate before the first record for which `keep` is false; the number of removed records. Reads only the end
        of the file, see `find_end`: to parse a million steps takes 20 s."""
        with self._lock:
            waiting = list(self._unwritten)
            cut_at, removed = find_end(self.path, keep)
            kept_lines = 0
            while not removed and kept_lines < len(waiting) and keep(parse_record(waiting[kept_lines]) or {}):
                kept_lines += 1
            if removed:
                self.truncate(cut_at)
            self._unwritten = deque(waiting[:kept_lines])
        return removed + len(waiting) - kept_lines

    def truncate(self, size_bytes: int) -> None:
        """Keep the first bytes of the file, and no line that waits in memory."""
        self._unwritten.clear()
        os.ftruncate(self._fd, size_bytes)
        os.fsync(self._fd)

    def replace(self, content: bytes) -> None:
        """Replace the content of the file; a crash leaves the old or the new one."""
        with self._lock:
            write_atomic(self.path, content)
            os.close(self._fd)
            self._open()

    def sync(self) -> None:
        """Make all records survive a power cut. OSError if one cannot be written."""
        self.flush()
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):  # was reported at the first refusal
                self.flush()
            os.close(self._fd)
            self._fd = -1


def read_records(path: Path) -> Iterator[Record]:
    """Complete records, oldest first. Safe while another process appends."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (record := parse_record(line)) is not None:
                yield record


def last_record(path: Path) -> Record | None:
    """The newest complete record."""
    return next(iter(last_records(path, 1)), None)


def last_records(path: Path, count: int) -> list[Record]:
    """The newest complete records, oldest first. Reads from the end, so it is cheap on long files."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [record for _, record in islice(_records_backwards(file), count)][::-1]


def find_end(path: Path, keep: Callable[[Record], bool]) -> tuple[int, int]:
    """Where the first record begins for which `keep` is false, and how many records follow from there. Records are in
    order but for damage, so the search goes back from the end until IN_ORDER records in a row are kept."""
    if not path.exists():
        return 0, 0
    removed = seen = 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        for offset, record in _records_backwards(file):
            seen += 1
            if not keep(record):
                end, removed = offset, seen
            elif seen - removed >= IN_ORDER:
                break
    return end, removed


def _records_backwards(file: BinaryIO) -> Iterator[tuple[int, Record]]:
    """Complete records with their offsets, newest first."""
    position = file.seek(0, os.SEEK_END)
    pieces: list[bytes] = []  # of a line whose beginning is not read yet, last piece first
    is_torn, chunk = True, 8192  # what follows the last newline is not complete
    while position > 0:
        start = max(0, position - chunk)
        file.seek(start)
        first, *lines = file.read(position - start).split(b"\n")
        position, chunk = start, min(2 * chunk, 1 << 20)
        if not lines:
            pieces.append(first)
            continue
        offset = start + len(first) + 1 + sum(map(len, lines)) + len(lines)
        for i in reversed(range(len(lines))):
            line = lines[i] + b"".join(reversed(pieces)) if pieces else lines[i]
            pieces = []
            offset -= len(lines[i]) + 1
            if not is_torn and (record := parse_record(line)) is not None:
                yield offset, record
            is_torn = False
        pieces = [first]
    if pieces and not is_torn and (record := parse_record(b"".join(reversed(pieces)))) is not None:
        yield 0, record
