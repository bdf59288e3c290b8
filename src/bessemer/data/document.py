"""A document on its way from a file to the token store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Label = str | float


@dataclass(slots=True)
class Document:
    """One text and where it came from. `row` counts from 1: lines of JSONL, rows of a table; 1 for a whole file.

    `id` and `url` are the values of the source's `id_field` and `url_field`, or empty. `messages` is a conversation
    (mappings with role and content) where the source has one; `text` is then the contents, one after another.
    `labels` are the results of steps (language: "en", quality: 0.83), for later steps and the report.
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
