"""Reads on in a run's journals from a saved position, also after a rollback has cut them.

A position is a list of marks: byte offset, CRC of the bytes before it, and the next step. When a rollback cuts a
journal, the newest mark that still agrees tells where to read on. Costs one fstat and 256 bytes per look.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from bessemer.run.journal import Record, find_end, parse_record, to_number

CHUNK_BYTES = 1 << 20
CRC_BYTES = 256
MOST_MARKS = 256

Mark = tuple[int, int, int]  # offset, CRC of the bytes before, steps that are read


class JournalTail:
    """The records of a journal after its position. `advance` moves the position behind what `read` returned."""

    def __init__(self, path: Path, marks: list[Mark] | None = None) -> None:
        self.path = path
        self.marks: list[Mark] = [(int(a), int(b), int(c)) for a, b, c in marks or []]
        self._next: Mark | None = None

    @property
    def offset(self) -> int:
        return self.marks[-1][0] if self.marks else 0

    @property
    def steps(self) -> int:
        """Steps that were read: all before this one."""
        return self.marks[-1][2] if self.marks else 0

    @property
    def unread(self) -> bool:
        """Whether anything may have been appended."""
        return self.path.exists() and self.path.stat().st_size > self.offset

    def was_cut(self) -> bool:
        """Whether the journal no longer continues what was read. The position then goes back to where they agree."""
        if not self.marks:
            return False
        size = self.path.stat().st_size if self.path.exists() else 0
        if not size:
            self.marks = []
            return True
        count = len(self.marks)
        with self.path.open("rb") as file:
            while self.marks and not _agrees(file.fileno(), size, self.marks[-1]):
                self.marks.pop()
        return len(self.marks) < count

    def go_to(self, keep: Callable[[Record], bool]) -> None:
        """Go back to before the first record for which `keep` is false."""
        offset, removed = find_end(self.path, keep)
        if removed and offset < self.offset:
            self.marks = [mark for mark in self.marks if mark[0] <= offset]
            self.marks.append((offset, self._crc(offset), self.steps))

    def read(self) -> list[Record]:
        """The next records, about CHUNK_BYTES of them; none if all are read."""
        self._next = None
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(CHUNK_BYTES)
            if len(data) == CHUNK_BYTES:
                data += file.readline()
        complete = data[: data.rfind(b"\n") + 1]
        if not complete:
            return []
        records = [record for line in complete.splitlines() if (record := parse_record(line)) is not None]
        last = max((int(step) for record in records if (step := _step(record)) is not None), default=self.steps - 1)
        end = self.offset + len(complete)
        self._next = end, self._crc(end), last + 1
        return records

    def advance(self) -> None:
        """The records that `read` returned were delivered."""
        if self._next:
            self.marks.append(self._next)
            self._next = None
        if len(self.marks) > MOST_MARKS:  # thin out the older half
            half = MOST_MARKS // 2
            self.marks = [*self.marks[:half:2], *self.marks[half:]]

    def _crc(self, offset: int) -> int:
        with self.path.open("rb") as file:
            return _crc_before(file.fileno(), offset)


def _crc_before(descriptor: int, offset: int) -> int:
    start = max(0, offset - CRC_BYTES)
    return zlib.crc32(os.pread(descriptor, offset - start, start))


def _agrees(descriptor: int, size: int, mark: Mark) -> bool:
    return mark[0] <= size and _crc_before(descriptor, mark[0]) == mark[1]


def _step(record: Record) -> float | None:
    step = to_number(record.get("step"))
    return step if step is not None and abs(step) < 1 << 60 else None
