"""From a row of any format to a document, or to a bad row with its reason. Every reader gets a `Reading`: the piece
it has to read, the way to its bytes, and the rules that turn the values of a row into a document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bessemer.data.document import BadRow, Document
from bessemer.data.read.entry import Piece
from bessemer.data.read.unpack import open_bytes, open_unpacked
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

LONGEST_ROW_BYTES = 1 << 30
_RAW_CHARS = 500
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names

Row = Document | BadRow
Rows = Iterator[Row | None]  # what a reader gives; None, which counts in the tally, for a row without text


class _Unusable(Exception):
    """Why a row cannot be used."""


@dataclass
class Reading:
    """One piece to read. `tally` counts what gives no document: "empty" rows, and records that are "not text"."""

    piece: Piece
    source: SourceSpec
    cache: Path | None = None
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.file = self.piece.file.name
        self._key = "messages_field" if self.source.messages_field else "text_field"
        self._wanted = getattr(self.source, self._key)

    def open_bytes(self) -> IO[bytes]:
        return open_bytes(self.piece.file, self.source.storage, self.cache)

    def open_unpacked(self) -> IO[bytes]:
        return open_unpacked(self.piece.file, self.source.storage, self.cache)

    @property
    def fields(self) -> list[str]:
        """The columns that a table is asked for, the one with the text or messages first."""
        named = [self._wanted, self.source.id_field, self.source.url_field]
        return list(dict.fromkeys(name for name in named if name))

    def document(self, row: int, record: Mapping[str, Any], raw: bytes | str | None = None) -> Row | None:
        """What a record says; None, and counted, where it holds no text. `raw` is the row as it stands in the file."""
        try:
            if self._wanted not in record:
                raise _Unusable(f"no field {self._wanted!r}; {self.choose(record)}")
            value = record[self._wanted]
            messages = None
            if self.source.messages_field:
                messages = _messages(value, self.source.messages_field)
                text = "\n\n".join(message["content"] for message in messages if message["content"])
            else:
                text = _text(value, self._wanted, record, self)
            own_id = _name(record, self.source.id_field)
            url = _name(record, self.source.url_field)
        except _Unusable as error:
            return self.bad(row, str(error), raw if raw is not None else _written(record))
        return self.text(row, text, own_id, url, messages)

    def text(self, row: int, text: str, own_id: str = "", url: str = "", messages: Any = None) -> Document | None:
        """The document of a text; None, and counted, where it is empty or only white space."""
        if not text or text.isspace():
            self.tally["empty"] += 1
            return None
        return Document(text, self.file, row, own_id, url, messages)

    def bad(self, row: int, reason: str, raw: bytes | str = "") -> BadRow:
        start = raw[: 4 * _RAW_CHARS]
        text = start.decode("utf-8", "replace") if isinstance(start, bytes) else start
        encodable = text[:_RAW_CHARS].encode("utf-8", "replace").decode()
        return BadRow(self.file, row, reason, encodable)

    def choose(self, names: Iterable[str]) -> str:
        """The end of a message about a missing or wrong field."""
        what = self._key.partition("_")[0]
        others = [name for name in names if name != self._wanted]
        if not others:
            return f"there is no other: write the {what} into it, or leave the file out"
        return f"it has {listed(others)}: set {self._key} to the one that holds the {what}"

    def check_columns(self, names: Iterable[str]) -> None:
        """UserError where a table lacks a column that the source asks for: no row of it could be used."""
        names = list(names)
        for key in (self._key, "id_field", "url_field"):
            wanted = getattr(self.source, key)
            if wanted and wanted not in names:
                what = {"id_field": "document's id", "url_field": "URL"}.get(key, key.partition("_")[0])
                fix = f"set {key} to the one that holds the {what}"
                raise UserError(f"{self.file}: no column {wanted!r}; it has {listed(names)}: {fix}")


def listed(names: Iterable[str]) -> str:
    """Names for a message: a dozen of them, each cut to 40 characters."""
    all_names = [str(name) for name in names]
    some = ", ".join(repr(name if len(name) <= 40 else name[:39] + "…") for name in all_names[:12])
    return (some + (f" and {len(all_names) - 12} more" if len(all_names) > 12 else "")) or "none"


def repaired(value: Any) -> Any:
    """With half surrogate pairs replaced: JSON can spell them, but they are no characters and cannot be encoded."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [repaired(item) for item in value]
    if isinstance(value, dict):
        return {repaired(key): repaired(item) for key, item in value.items()}
    return value


def parse_json(data: bytes, encoding: str = "utf-8") -> Any:
    """A JSON value with every string encodable. ValueError or RecursionError where it is none."""
    value = json.loads(data.decode(encoding))
    return repaired(value) if b"\\ud" in data or b"\\uD" in data else value


def _text(value: Any, name: str, record: Mapping[str, Any], reading: Reading) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise _Unusable(f"{name!r} is not valid UTF-8 ({error.reason} at byte {error.start})") from error
    if not isinstance(value, str):
        raise _Unusable(f"{name!r} holds a {type(value).__name__}, not text; {reading.choose(record)}")
    return value


def _name(record: Mapping[str, Any], key: str | None) -> str:
    """An id or URL. A row may lack it; numbers, dates and the like are written out."""
    value = record.get(key) if key else None
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, dict)):
        raise _Unusable(f"{key!r} holds a {type(value).__name__}, not a name or number")
    return str(value)


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    """A conversation as role and content, from that form, from ShareGPT's from and value, or from either in JSON."""
    if isinstance(value, (str, bytes)):
        try:
            value = parse_json(value.encode() if isinstance(value, str) else value)
        except (ValueError, RecursionError) as error:
            raise _Unusable(f"{key!r} holds text that is no JSON list of messages ({error})") from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Unusable(f"{key!r} holds a {type(value).__name__}, not a list of messages")
    return [_message(message, f"{key!r}, message {number}") for number, message in enumerate(value, start=1)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _Unusable(f"{place} is a {type(message).__name__}, not role and content")
    # Tables fill absent fields with null.
    given = {key: item for key, item in message.items() if item is not None}
    role_key = "role" if "role" in given or "from" not in given else "from"
    text_key = "content" if "content" in message or "value" not in message else "value"
    role, content = given.pop(role_key, None), given.pop(text_key, None)
    if content is None and text_key in message and given:
        content = ""  # a turn that only calls tools
    for name, item in ((role_key, role), (text_key, content)):
        if item is None:
            raise _Unusable(f"{place} has no {name}; each message needs a role and a content")
        if not isinstance(item, str):
            raise _Unusable(f"{place}: {name} holds a {type(item).__name__}, not text")
    role = _ROLES.get(role, role) if role_key == "from" else role
    return {"role": role, "content": content, **given}


def _written(record: Mapping[str, Any]) -> str:
    short = {str(key): _short(item) for key, item in list(record.items())[:20]}
    return json.dumps(short, ensure_ascii=False, default=str)


def _short(item: Any) -> Any:
    if isinstance(item, bytes):
        item = item[: 4 * _RAW_CHARS].decode("utf-8", "replace")
    if isinstance(item, str):
        return item[:_RAW_CHARS]
    return item if isinstance(item, (int, float, bool, type(None))) else repr(item)[:_RAW_CHARS]
