"""Formats of conversations, recognised from the first rows of a source.

OpenAI's messages (role, content), ShareGPT's (from, value), Alpaca's rows (instruction, input, output), rows with a
prompt and a completion, and plain text. `columns` and `messages_field` of a source name fields that are called
otherwise.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from bessemer.data.read.compression import READ_ERRORS, open_bytes, open_decompressed
from bessemer.data.read.entry import FileEntry
from bessemer.data.read.files import list_files
from bessemer.data.read.tables import is_ipc_file, open_parquet
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

ACCEPTED = (
    "messages: [{role, content}, ...]; conversations: [{from, value}, ...]; instruction, input and output; prompt and "
    "completion; text"
)
FIRST_ROWS = 20
_TURN_FIELDS = ("messages", "conversations", "conversation")
_NO_ROWS = ("text", "source", "html", "warc")  # formats whose files are texts


def recognise_source(name: str, source: SourceSpec) -> SourceSpec:
    """The source with the format and the fields that its first rows have, unless the spec names them. UserError, with
    the columns, if they have none of the formats."""
    if source.names_content:
        return source if source.chat_format else _with(source, chat_format=_named_format(source))
    columns: dict[str, None] = {}
    for file in list_files(source)[:FIRST_ROWS]:
        if file.format in _NO_ROWS:
            return _with(source, chat_format="text")
        try:
            records = list(itertools.islice(_records(file, source), FIRST_ROWS))
        except (*READ_ERRORS, ValueError):  # reading the source reports it, with its place
            continue
        for record in records:
            if fields := recognise_row(record):
                return _with_optional(_with(source, **fields), records)
            columns |= dict.fromkeys(map(str, record))
    if not columns:
        return source
    raise UserError(
        f"data.sources.{name}: the rows have {', '.join(list(columns)[:12])}: none of the formats ({ACCEPTED}); "
        "name the columns, such as columns: {prompt: question, completion: answer}, or messages_field"
    )


def recognise_row(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of a source with such rows; None for an unknown format."""
    more = {"system": "system"} if isinstance(record.get("system"), str) else {}
    if isinstance(record.get("tools"), (list, str)):
        more["tools"] = "tools"
    for field in _TURN_FIELDS:
        turns = record.get(field)
        first = turns[0] if isinstance(turns, list) and turns else None
        if isinstance(first, Mapping) and ("from" in first or "role" in first):
            settings = {"chat_format": "sharegpt" if "from" in first else "messages", "messages_field": field}
            return settings | ({"columns": more} if more else {})
    if "instruction" in record and "output" in record:
        names = ("instruction", *(["input"] if "input" in record else []), "output")
        return {"chat_format": "alpaca", "columns": {name: name for name in names} | more}
    if "prompt" in record and "completion" in record:
        return {"chat_format": "prompt_completion", "columns": {"prompt": "prompt", "completion": "completion"} | more}
    return {"chat_format": "text"} if isinstance(record.get("text"), str) else None


def _with_optional(source: SourceSpec, records: list[dict[str, Any]]) -> SourceSpec:
    """The source with the optional columns that only some of the rows have, and the weights of their messages."""
    columns: dict[str, str] = {}
    for record in records:
        columns |= (recognise_row(record) or {}).get("columns", {})
    turns = (record.get(source.messages_field or "") for record in records)
    messages = (message for some in turns if isinstance(some, list) for message in some if isinstance(message, Mapping))
    weighted = any(message.get("weight") not in (None, 0, 1) for message in messages)
    return _with(source, columns=columns or None, message_weights=weighted or source.message_weights)


def recognise_pairs(source: SourceSpec, more: tuple[str, ...] = ()) -> SourceSpec:
    """The source with the columns of its pairs or labelled answers, if its first rows have TRL's and the spec names
    none. `more` are optional columns of pairs."""
    if source.names_content:
        return source
    for file in list_files(source)[:FIRST_ROWS]:
        try:
            record = next(_records(file, source), {})
        except (*READ_ERRORS, ValueError):  # reading the source reports it, with its place
            continue
        if "chosen" in record and "rejected" in record:
            names = ("prompt", "chosen", "rejected", *more)
            return _with(source, columns={name: name for name in names if name in record})
        if all(name in record for name in ("prompt", "completion", "label")):
            return _with(source, columns={name: name for name in ("prompt", "completion", "label")})
    return source


def describe_format(source: SourceSpec) -> str:
    """For the plan and `data check`: alpaca (instruction, input, output)."""
    fields = [*([source.messages_field] if source.messages_field else []), *(source.columns or {}).values()]
    weights = ", with a weight per message" if source.message_weights else ""
    return f"{source.chat_format or 'text'} ({', '.join(fields) or source.text_field}{weights})"


def _named_format(source: SourceSpec) -> str:
    columns = source.columns or {}
    if "instruction" in columns:
        return "alpaca"
    return "prompt_completion" if source.has_answers else "messages" if source.messages_field else "text"


def _with(source: SourceSpec, **settings: Any) -> SourceSpec:
    return source.model_copy(update=settings)


def _records(file: FileEntry, source: SourceSpec) -> Iterator[dict[str, Any]]:
    """The first rows of a file with all their columns; none where the format has no columns to look at."""
    if file.format == "jsonl":
        with open_decompressed(file, source.storage, None) as opened:
            for line in opened:
                if line.strip():
                    record = json.loads(line.decode("utf-8-sig"))
                    yield record if isinstance(record, dict) else {}
    elif file.format == "csv":
        with open_decompressed(file, source.storage, None) as opened:
            text = io.TextIOWrapper(cast(io.BufferedReader, opened), "utf-8-sig", newline="")
            head = text.read(1 << 16)
            yield from csv.DictReader(io.StringIO(head), dialect=csv.Sniffer().sniff(head, ",\t;|"))
    elif file.format in ("parquet", "arrow", "hf"):
        import pyarrow as pa

        with open_bytes(file, source.storage, None) as opened:
            if file.format == "parquet":
                batches = open_parquet(opened).iter_batches(FIRST_ROWS)
            else:
                batches = iter(pa.ipc.open_stream(opened)) if not is_ipc_file(opened) else _ipc_batches(opened)
            yield from next(batches, pa.RecordBatch.from_pylist([])).slice(0, FIRST_ROWS).to_pylist()


def _ipc_batches(opened: Any) -> Iterator[Any]:
    import pyarrow as pa

    table = pa.ipc.open_file(opened)
    return (table.get_batch(number) for number in range(table.num_record_batches))
