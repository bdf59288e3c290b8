"""Append-only JSON lines that survive a kill.

One record is one write() of one line, so a killed writer leaves at most one torn last line. Readers ignore it, and the
next writer cuts it off. Records are not fsynced one by one (a million steps would pay for it): `sync()` is called when
a checkpoint commits, and a resume cuts everything past its checkpoint anyway. A power cut can leave a line of zeros;
what is no record is passed over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def json_ready(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become the strings 'nan', 'inf', '-inf'."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


def number(value: Any) -> float | None:
    """A number out of a record, 'nan' and 'inf' among them; None where there is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _record(line: bytes) -> Record | None:
    """The record of a line, or None for what is none."""
    try:
        record = json.loads(line)
    except ValueError:  # also of broken UTF-8
        return None
    return record if isinstance(record, dict) else None


class Journal:
    """The writing end. One process holds it (the run's lock sees to that)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._cut_torn_line()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            kept = end
            while kept > 0:  # step back to the last newline
                start = max(0, kept - 4096)
                file.seek(start)
                newline = file.read(kept - start).rfind(b"\n")
                if newline >= 0:
                    kept = start + newline + 1
                    break
                kept = start
            if kept < end:
                file.truncate(kept)

    def append(self, record: Record) -> None:
        """One line. If the disk takes only a part of it, that part is taken back and OSError says why."""
        line = json.dumps(json_ready(record), ensure_ascii=False, default=str) + "\n"
        # A file name that is no UTF-8 has lone surrogates; their \udcXX is JSON's own escape for them.
        data = line.encode("utf-8", "backslashreplace")
        written = os.write(self._fd, data)
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def cut(self, keep: Callable[[Record], bool]) -> int:
        """Truncate before the first record that `keep` refuses; the number of records removed."""
        offset, removed, cut_at = 0, 0, None
        with self.path.open("rb") as file:
            for line in file:
                record = _record(line)
                if cut_at is None and record is not None and not keep(record):
                    cut_at = offset
                removed += cut_at is not None and record is not None
                offset += len(line)
        if cut_at is not None:
            os.ftruncate(self._fd, cut_at)
            os.fsync(self._fd)
        return removed

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_records(path: Path) -> Iterator[Record]:
    """Complete records, oldest first. Safe while another process appends."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (record := _record(line)) is not None:
                yield record


def last_record(path: Path) -> Record | None:
    """The newest complete record, found from the end: cheap on a file of any length."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        tail, chunk = b"", 8192
        while position > 0:
            start = max(0, position - chunk)
            file.seek(start)
            tail = file.read(position - start) + tail
            position, chunk = start, 2 * chunk
            complete = tail[: tail.rfind(b"\n") + 1].split(b"\n")
            # The first piece may have begun further back.
            for line in reversed(complete if position == 0 else complete[1:]):
                if (record := _record(line)) is not None:
                    return record
    return None
