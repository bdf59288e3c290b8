"""Append-only JSON lines that survive a kill.

One record is one write() of one line, so a killed writer leaves at most one torn last line. Readers ignore it, and the
next writer cuts it off. Records are not fsynced one by one (a million steps would pay for it): `sync()` is called when a
checkpoint commits, and a resume cuts everything past its checkpoint anyway.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def _plain(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become the strings 'nan', 'inf', '-inf'."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


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
        line = json.dumps(_plain(record), ensure_ascii=False, separators=(", ", ": ")) + "\n"
        os.write(self._fd, line.encode())

    def cut(self, keep: Callable[[Record], bool]) -> int:
        """Truncate before the first record that `keep` refuses; the number of records removed."""
        offset, removed, cut_at = 0, 0, None
        with self.path.open("rb") as file:
            for line in file:
                if cut_at is None and not keep(json.loads(line)):
                    cut_at = offset
                removed += cut_at is not None
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
            if line.endswith(b"\n"):
                yield json.loads(line)


def last_record(path: Path) -> Record | None:
    """The newest complete record, found from the end: cheap on a file of any length."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""
        while position > 0:
            start = max(0, position - 8192)
            file.seek(start)
            tail = file.read(position - start) + tail
            position = start
            complete = tail[: tail.rfind(b"\n") + 1]
            lines = complete.rstrip(b"\n").split(b"\n")
            if complete and (len(lines) > 1 or position == 0):
                return dict(json.loads(lines[-1]))
    return None
