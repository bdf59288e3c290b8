"""What a source consists of: files, the pieces they are cut into, and the parts that workers take. All three are
plain values, which pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from bessemer.data.read.secrets import shown
from bessemer.spec.data import Format

_KEY_VERSION = 1  # raise it when the same pieces would give other documents
_UNITS = {"parquet": "row groups", "arrow": "batches"}  # what a range counts; else bytes


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a source. `path` is absolute, or a URL as it is opened (`shown(path)` is for printing). `version`
    is what a remote file system gives to tell contents apart, such as an ETag; empty for local files."""

    path: str
    size_bytes: int
    format: Format
    mtime_ns: int
    version: str = ""

    @property
    def name(self) -> str:
        """The path as it may be printed and stored: a signed URL loses its signature, and bytes of a local name that
        are no text are written out."""
        return shown(self.path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    @property
    def identity(self) -> list[Any]:
        """Changes whenever the content does, as far as the file system can tell."""
        return [self.name, self.size_bytes, self.format, self.version or self.mtime_ns]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A file, or a range [start, stop) of it in bytes, row groups or record batches; stop -1 is the file's end."""

    file: FileEntry
    size_bytes: int
    start: int = 0
    stop: int = -1
    first_row: int = 1  # the number of its first row in the file

    @property
    def name(self) -> str:
        if self.start == 0 and self.stop == -1:
            return self.file.name
        unit = _UNITS.get(self.file.format, "bytes")
        return f"{self.file.name} {unit} {self.start}-{self.stop if self.stop != -1 else 'end'}"


@dataclass(frozen=True)
class SourcePart:
    """Some pieces of one source, in order: the unit of work, and what a cached result is kept for."""

    source: str
    pieces: tuple[FilePiece, ...]

    @cached_property
    def key(self) -> str:
        """A hash of what is read (paths, sizes, times or versions, formats, ranges), not of how: a cache has to add
        the settings of the source."""
        what = [[*piece.file.identity, piece.start, piece.stop, piece.first_row] for piece in self.pieces]
        return str(xxhash.xxh3_128_hexdigest(json.dumps([_KEY_VERSION, what]).encode()))

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def name(self) -> str:
        """For messages: the first file, its range, and how many more."""
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return (self.pieces[0].name if self.pieces else "nothing") + more
