"""Turns a row of any format into a document, or into a bad row with its reason. Every reader gets a `Reading`: the
piece to read, access to its bytes, and the rules that map a row's values to a document. The readers here are of JSON
lines and of files that are one document each: text, source code, HTML."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bessemer.data.read.answers import UnusableAnswer, answer_fields, answer_messages
from bessemer.data.read.chat_turns import join_parts, normalise_turns, with_tools
from bessemer.data.read.compression import open_bytes, open_decompressed
from bessemer.data.read.entry import BadRow, Document, FilePiece
from bessemer.errors import UserError
from bessemer.spec.data import OPTIONAL_ROLES, SourceSpec

LONGEST_ROW_BYTES = 1 << 30
_RAW_CHARS = 500
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's role names

Row = Document | BadRow
Rows = Iterator[Row | None]  # a reader's output; None for a row without text, which is counted in `tally`


class _Unusable(Exception):
    """The reason why a row cannot be used."""


@dataclass
class PieceReader:
    """One piece to read. `tally` counts rows that give no document: "empty" ones, and records that are "not text"."""

    piece: FilePiece
    source: SourceSpec
    cache: Path | None = None
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.file = self.piece.file.name
        self._key = "messages_field" if self.source.messages_field else "text_field"
        self._content_field = getattr(self.source, self._key)
        self._columns = {role: name for role, name in (self.source.columns or {}).items() if role != "text"}

    def open_bytes(self) -> IO[bytes]:
        return open_bytes(self.piece.file, self.source.storage, self.cache)

    def open_unpacked(self) -> IO[bytes]:
        return open_decompressed(self.piece.file, self.source.storage, self.cache)

    @property
    def fields(self) -> list[str]:
        """The columns to read from a table, the one with the text or messages first."""
        content = None if self.source.has_answers else self._content_field
        names = [content, self.source.id_field, self.source.url_field, *self._columns.values()]
        return list(dict.fromkeys(name for name in names if name))

    def document(self, row: int, record: Mapping[str, Any], raw: bytes | str | None = None) -> Row | None:
        """The document of a record; None, counted in `tally`, where it holds no text. `raw` is the row as stored."""
        try:
            text, messages = self._content(record, row)
            more = answer_fields(record, self._columns, self.source.ranked) if self.source.has_answers else {}
            document_id = _identifier(record, self.source.id_field)
            url = _identifier(record, self.source.url_field)
        except (_Unusable, UnusableAnswer) as error:
            return self.bad(row, str(error), raw if raw is not None else _dump_record(record))
        document = self.text(row, text, document_id, url, messages)
        if document is not None and self.source.has_answers:
            document.fields = more
        elif document is not None and self._columns:
            document.fields = {role: record[name] for role, name in self._columns.items() if role not in OPTIONAL_ROLES}
        return document

    def _content(self, record: Mapping[str, Any], row: int) -> tuple[str, list[dict[str, Any]] | None]:
        """The text, and the messages if it is a conversation."""
        answers = self.source.has_answers
        if not answers and self._content_field not in record:
            raise _Unusable(f"no field {self._content_field!r}; {self.choose(record)}")
        required = [name for role, name in self._columns.items() if role not in OPTIONAL_ROLES]
        if missing := [name for name in required if name not in record]:
            raise _Unusable(f"no field {missing[0]!r}; it has {list_names(record)}: correct columns of the source")
        if answers:
            messages = answer_messages(record, self._columns, _messages)
        elif self.source.messages_field:
            turns = record[self._content_field]
            messages = _messages(join_parts(turns) if self.source.chat_format else turns, self.source.messages_field)
            system = record.get(self._columns["system"]) if "system" in self._columns else None
            if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
        else:
            return _text(record[self._content_field], self._content_field, record, self), None
        if self.source.chat_format:
            try:
                messages = normalise_turns(messages, f"{self.file}:{row}", self.source.message_weights)
            except ValueError as error:
                raise _Unusable(str(error)) from error
        if "tools" in self._columns:
            try:
                messages = with_tools(messages, record.get(self._columns["tools"]))
            except ValueError as error:
                raise _Unusable(f"{self._columns['tools']!r} holds {error}; correct it") from error
        return "\n\n".join(message["content"] for message in messages if message["content"]), messages

    def text(self, row: int, text: str, document_id: str = "", url: str = "", messages: Any = None) -> Document | None:
        """The document of a text; None, counted in `tally`, where it is empty or white space."""
        if not text or text.isspace():
            self.tally["empty"] += 1
            return None
        return Document(text, self.file, row, document_id, url, messages)

    def bad(self, row: int, reason: str, raw: bytes | str = "") -> BadRow:
        start = raw[: 4 * _RAW_CHARS]
        text = start.decode("utf-8", "replace") if isinstance(start, bytes) else start
        encodable = text[:_RAW_CHARS].encode("utf-8", "replace").decode()
        return BadRow(self.file, row, reason, encodable)

    def choose(self, names: Iterable[str]) -> str:
        """The end of a message about a missing or wrong field: which setting to change."""
        content, names = self._key.partition("_")[0], list(names)
        alternatives = [name for name in names if name != self._content_field]
        if content == "text" and (advice := _chat_columns(names)):
            return f"it has {list_names(names)}: for conversations {advice}"
        if not alternatives:
            return f"there is no other: write the {content} into it, or leave the file out"
        return f"it has {list_names(alternatives)}: set {self._key} to the one that holds the {content}"

    def check_columns(self, names: Iterable[str]) -> None:
        """UserError where a table lacks a column that the source names: no row could be used."""
        names = list(names)
        for key in (() if self.source.has_answers else (self._key,)) + ("id_field", "url_field"):
            column = getattr(self.source, key)
            if column and column not in names:
                content = {"id_field": "document's id", "url_field": "URL"}.get(key, key.partition("_")[0])
                fix = f"set {key} to the one that holds the {content}"
                raise UserError(f"{self.file}: no column {column!r}; it has {list_names(names)}: {fix}")
        for role, column in self._columns.items():
            if column not in names:
                fix = f"correct columns.{role} of the source"
                raise UserError(f"{self.file}: no column {column!r}; it has {list_names(names)}: {fix}")


def _chat_columns(names: Sequence[str]) -> str:
    """The setting for columns with the usual names of conversations; empty if there are none."""
    if chats := [name for name in names if name in ("messages", "conversations", "conversation")]:
        return f"set messages_field: {chats[0]}"
    if "instruction" in names and "output" in names:
        roles = [name for name in ("instruction", "input", "output") if name in names]
        return f"set columns: {{{', '.join(f'{name}: {name}' for name in roles)}}}"
    if prompts := [name for name in names if name in ("prompt", "question", "instruction")]:
        answers = [name for name in names if name in ("completion", "answer", "response", "output", "chosen")]
        if answers and answers[0] != "chosen":
            return f"set columns: {{prompt: {prompts[0]}, completion: {answers[0]}}}"
        if answers:
            return f"set columns: {{prompt: {prompts[0]}, chosen: chosen, rejected: rejected}}"
    return ""


def list_names(names: Iterable[str]) -> str:
    """Up to 12 names for a message, each cut to 40 characters."""
    all_names = [str(name) for name in names]
    shown_names = ", ".join(repr(name if len(name) <= 40 else name[:39] + "…") for name in all_names[:12])
    return (shown_names + (f" and {len(all_names) - 12} more" if len(all_names) > 12 else "")) or "none"


def repair_surrogates(value: Any) -> Any:
    """Replaces unpaired surrogates, which JSON can spell but UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [repair_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {repair_surrogates(key): repair_surrogates(item) for key, item in value.items()}
    return value


def parse_json(data: bytes, encoding: str = "utf-8") -> Any:
    """A JSON value whose strings are all encodable. ValueError or RecursionError for invalid JSON."""
    value = json.loads(data.decode(encoding))
    return repair_surrogates(value) if b"\\ud" in data or b"\\uD" in data else value


def _text(value: Any, name: str, record: Mapping[str, Any], reading: PieceReader) -> str:
    if value is None:
        return ""
    if "words" in (reading.source.columns or {}) and isinstance(value, list) and all(isinstance(w, str) for w in value):
        return " ".join(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise _Unusable(f"{name!r} is not valid UTF-8 ({error.reason} at byte {error.start})") from error
    if not isinstance(value, str):
        raise _Unusable(f"{name!r} holds a {type(value).__name__}, not text; {reading.choose(record)}")
    return value


def _identifier(record: Mapping[str, Any], key: str | None) -> str:
    """An id or URL, empty where the row has none; numbers, dates and the like are converted to text."""
    value = record.get(key) if key else None
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, dict)):
        raise _Unusable(f"{key!r} holds a {type(value).__name__}, not a name or number")
    return str(value)


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    """A conversation as a list of role and content, from that form, from ShareGPT's from and value, or from JSON of
    either."""
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
    # Tables store absent fields as null.
    present = {key: item for key, item in message.items() if item is not None}
    role_key = "role" if "role" in present or "from" not in present else "from"
    text_key = "content" if "content" in message or "value" not in message else "value"
    role, content = present.pop(role_key, None), present.pop(text_key, None)
    if content is None and text_key in message and present:
        content = ""  # a turn with only tool calls
    for name, item in ((role_key, role), (text_key, content)):
        if item is None:
            raise _Unusable(f"{place} has no {name}; each message needs a role and a content")
        if not isinstance(item, str):
            raise _Unusable(f"{place}: {name} holds a {type(item).__name__}, not text")
    role = _ROLES.get(role, role) if role_key == "from" else role
    return {"role": role, "content": content, **present}


def _dump_record(record: Mapping[str, Any]) -> str:
    """The first fields of a record as JSON, with long values cut."""
    values: dict[str, Any] = {}
    for key, item in list(record.items())[:20]:
        if isinstance(item, bytes):
            item = item[: 4 * _RAW_CHARS].decode("utf-8", "replace")
        if not isinstance(item, (str, int, float, bool, type(None))):
            item = repr(item)
        values[str(key)] = item[:_RAW_CHARS] if isinstance(item, str) else item
    return json.dumps(values, ensure_ascii=False, default=str)


def read_jsonl(reading: PieceReader) -> Rows:
    """The documents of the piece; rows are line numbers in the file. Holds one line in memory."""
    piece = reading.piece
    ranged = piece.start > 0 or piece.stop != -1
    with reading.open_bytes() if ranged else reading.open_unpacked() as file:
        if ranged:
            file.seek(piece.start)
        left = piece.stop - piece.start if piece.stop != -1 else -1
        row = piece.first_row
        for line in _lines(file, left):
            if isinstance(line, int):
                yield reading.bad(row, f"the line has {line:,} bytes; split it or delete it")
            elif not line.isspace():
                yield _document(reading, row, line)
            row += 1


def _lines(file: IO[bytes], left: int) -> Iterator[bytes | int]:
    """Lines of the next `left` bytes (-1: all); for a line that is too long, its length."""
    longest = LONGEST_ROW_BYTES
    while left:
        line = file.readline(longest + 1)
        if not line:
            return
        length = len(line)
        left -= length if left > 0 else 0
        if length <= longest:
            yield line
            continue
        while not line.endswith(b"\n"):
            line = file.readline(1 << 20)
            if not line:
                break
            length += len(line)
            left -= len(line) if left > 0 else 0
        yield length


def _document(reading: PieceReader, row: int, line: bytes) -> Row | None:
    try:
        record = parse_json(line, "utf-8-sig" if row == 1 else "utf-8")
    except (ValueError, RecursionError) as error:
        fix = "correct or delete this line"
        if row == 1 and line.lstrip()[:1] == b"[":
            fix = "write one object per line, not an array"
        elif encoding := detect_wide_encoding(line):
            return reading.bad(row, f"the file is in {encoding}, not in UTF-8; convert it, such as with iconv", line)
        return reading.bad(row, f"not valid JSON in UTF-8 ({error}); {fix}", line)
    if not isinstance(record, dict):
        reason = f'a {type(record).__name__}; each line must be like {{"{reading.fields[0]}": "..."}}'
        return reading.bad(row, reason, line)
    return reading.document(row, record, line)


_UTF16_ZEROS, _UTF32_ZEROS = 0.3, 0.6  # of ASCII text, 1/2 of UTF-16 and 3/4 of UTF-32 are zero bytes


def encoding_of(head: bytes) -> str:
    """UTF-8 unless a byte-order mark says otherwise; the codec removes the mark."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"  # first: its little-endian mark begins with UTF-16's
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def detect_wide_encoding(text: bytes) -> str:
    """UTF-32 or UTF-16 where a byte-order mark or the zero bytes of ASCII text indicate it, else an empty string."""
    encoding = encoding_of(text)
    if encoding != "utf-8-sig":
        return encoding.upper()
    zeros = text.count(0) / max(len(text), 1)
    return "UTF-32" if zeros > _UTF32_ZEROS else "UTF-16" if zeros > _UTF16_ZEROS else ""


def read_text(reading: PieceReader) -> Rows:
    """The file as one document. Invalid UTF-8 becomes U+FFFD, and `decode_error` names the first invalid byte."""
    with reading.open_unpacked() as file:
        data = file.read()
    text, decode_error = decode_text(data)
    document = reading.text(1, text)
    if document is not None:
        document.decode_error = decode_error
    yield document


def decode_text(data: bytes) -> tuple[str, str]:
    """The text, and "not UTF-8 (byte N)" for the first invalid byte (counted from 0) or an empty string."""
    encoding = encoding_of(data)
    try:
        return data.decode(encoding), ""
    except UnicodeDecodeError as error:
        # The codec `utf-8-sig` counts from after the byte-order mark.
        start = error.start + (len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0)
        return data.decode(encoding, "replace"), f"not {encoding.removesuffix('-sig').upper()} (byte {start:,})"


def read_html(reading: PieceReader) -> Rows:
    """The page as stored, labelled for the `extract` step."""
    with reading.open_unpacked() as file:
        data = file.read()
    document = reading.text(1, decode_html(data))
    if document is not None:
        document.labels["type"] = "html"
    yield document


_META = re.compile(rb"<meta[^>]{0,500}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]{2,40})", re.IGNORECASE)
_XML = re.compile(rb"^\s*<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9_:.+-]{2,40})", re.IGNORECASE)
_HEAD_BYTES = 4096  # browsers look at 1024; real pages put scripts first
# The superset that browsers use for each charset, as Python spells it.
_SUPERSETS = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),  # first: one starts like UTF-16's
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_PLAIN = re.compile(
    r"utf-8|utf-16(-le|-be)?|cp125\d|cp866|cp874|cp932|cp949|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)|gb18030"
    r"|big5hkscs|euc_jp|iso2022_jp"
)


def decode_html(data: bytes, declared: str = "") -> str:
    """A page's text. `declared` is the charset of the HTTP header. A byte-order mark wins. Otherwise valid UTF-8 is
    read as UTF-8 whatever the page declares, since other encodings are hardly ever valid UTF-8 by chance; then the
    declared encoding applies, then Windows-1252."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace")
    declaration = _XML.search(data[:_HEAD_BYTES]) or _META.search(data[:_HEAD_BYTES])
    header_codec = _codec(declared)
    # A declaration inside the page cannot be UTF-16, or it would not have been readable.
    page_codec = _codec(declaration.group(1).decode("ascii")) if declaration else ""
    codec = header_codec or ("" if page_codec.startswith("utf-16") else page_codec)
    if codec.startswith("utf-16") or codec == "iso2022_jp":  # may also be valid UTF-8
        return data.decode(codec, "replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode(codec or "cp1252", "replace")


def _codec(name: str) -> str:
    """Python's codec for a charset name, or an empty string for an unknown or non-text one."""
    try:
        codec = codecs.lookup(name.strip(" \t\"'")).name if name else ""
    except (LookupError, ValueError):
        return ""
    codec = _SUPERSETS.get(codec, codec)
    return codec if _PLAIN.fullmatch(codec) else ""
