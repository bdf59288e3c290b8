"""The files of a source, the pieces they are cut into, and the parts that workers process. All three are plain,
picklable values.

A document on its way from a file to the token store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from bessemer.data.read.secrets import redact
from bessemer.spec.data import Format

_KEY_VERSION = 1  # increase when the same pieces would give different documents
_UNITS = {"parquet": "row groups", "arrow": "batches"}  # the unit of a range; bytes for other formats


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a source. `path` is absolute, or a URL as it is opened (print `name` instead: a URL may hold
    credentials). `version` identifies the content of a remote file, such as an ETag; empty for local files."""

    path: str
    size_bytes: int
    format: Format
    mtime_ns: int
    version: str = ""

    @property
    def name(self) -> str:
        """The path without credentials, for messages and stored results. Undecodable bytes are escaped."""
        return redact(self.path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

    @property
    def identity(self) -> list[Any]:
        """Values that change with the content, as far as the file system can tell."""
        return [self.name, self.size_bytes, self.format, self.version or self.mtime_ns]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A file, or a range [start, stop) of it in bytes, row groups or record batches; stop -1 means the file's end."""

    file: FileEntry
    size_bytes: int
    start: int = 0
    stop: int = -1
    first_row: int = 1  # number of the piece's first row in the file

    @property
    def name(self) -> str:
        if self.start == 0 and self.stop == -1:
            return self.file.name
        unit = _UNITS.get(self.file.format, "bytes")
        return f"{self.file.name} {unit} {self.start}-{self.stop if self.stop != -1 else 'end'}"


@dataclass(frozen=True)
class SourcePart:
    """Consecutive pieces of one source: the unit of work and of caching."""

    source: str
    pieces: tuple[FilePiece, ...]

    @cached_property
    def key(self) -> str:
        """A hash of the pieces (paths, sizes, times or versions, formats, ranges). It does not cover the source's
        settings: a cache key must add them."""
        identities = [[*piece.file.identity, piece.start, piece.stop, piece.first_row] for piece in self.pieces]
        return str(xxhash.xxh3_128_hexdigest(json.dumps([_KEY_VERSION, identities]).encode()))

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def name(self) -> str:
        """The first file, its range, and how many more pieces follow. Used in messages."""
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return (self.pieces[0].name if self.pieces else "nothing") + more


Label = str | float


@dataclass(slots=True)
class Document:
    """One text and where it came from. `row` counts from 1: lines of JSONL, rows of a table; 1 for a whole file.

    `id` and `url` are the values of the source's `id_field` and `url_field`, or empty. `messages` is a conversation
    (mappings with role and content) where the source has one; `text` is then the contents, one after another.
    `labels` are the results of steps (language: "en", quality: 0.83), for later steps and the report.
    `fields` are the values of the source's `columns` besides the text, such as a label.
    `decode_error` says which byte of the file was not valid in its encoding; `text` then has U+FFFD in such places.
    """

    text: str
    file: str
    row: int
    id: str = ""
    url: str = ""
    messages: list[dict[str, Any]] | None = None
    labels: dict[str, Label] = field(default_factory=dict)
    decode_error: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.file}:{self.row}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no document: it is set aside with its reason, never dropped in silence."""

    file: str
    row: int
    reason: str  # what is wrong and the fix, without the place
    raw: str = ""  # the beginning of the row as it stands in the file
