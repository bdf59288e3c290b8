"""Readers of tables: Parquet, Arrow IPC files and streams, Arrow shards of a Hugging Face dataset, CSV and TSV. Only
the needed columns are read, and Parquet is decoded page by page: memory holds a few megabytes or the longest row,
whatever the size of a row group."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

from bessemer.data.read import rows
from bessemer.data.read.compression import DamagedFile, detect_compression
from bessemer.data.read.files import extension_of
from bessemer.data.read.remote import is_url
from bessemer.data.read.rows import PieceReader, Rows, encoding_of
from bessemer.errors import UserError

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 4096
_ARROW_MAGIC = b"ARROW1"


def read_parquet(reading: PieceReader) -> Rows:
    with _translate_errors(reading, "Parquet"), reading.open_bytes() as opened, open_parquet(opened) as file:
        _check_schema(reading, file.schema_arrow)
        piece, metadata = reading.piece, file.metadata
        stop = piece.stop if piece.stop != -1 else metadata.num_row_groups
        bytes_per_row = piece.file.size_bytes // max(metadata.num_rows, 1)
        batch_rows = min(max(_BATCH_BYTES // max(bytes_per_row, 1), 1), _BATCH_ROWS)
        groups = list(range(piece.start, stop))
        batches = file.iter_batches(batch_rows, row_groups=groups, columns=reading.fields, use_threads=False)
        yield from _read_batches(reading, batches)


def read_arrow(reading: PieceReader) -> Rows:
    """The rows of an IPC file or stream (also Feather); of a file, those of the piece's record batches."""
    import pyarrow as pa

    piece = reading.piece
    with _translate_errors(reading, "Arrow"), reading.open_bytes() as opened, contextlib.ExitStack() as stack:
        _refuse_compressed(opened)
        in_ranges = is_ipc_file(opened)
        open_ipc = pa.ipc.open_file if in_ranges else pa.ipc.open_stream
        mapped = None if is_url(piece.file.path) else stack.enter_context(pa.memory_map(piece.file.path))
        file = open_ipc(mapped or opened)
        _check_schema(reading, file.schema)
        if mapped is None or _copies_batches(file, mapped, in_ranges):
            columns = [file.schema.get_field_index(name) for name in reading.fields]
            options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
            opened.seek(0)
            file = open_ipc(opened, options=options)
        elif not in_ranges:
            mapped.seek(0)
            file = open_ipc(mapped)
        batches: Iterable[Any] = file
        if in_ranges:
            stop = piece.stop if piece.stop != -1 else file.num_record_batches
            batches = map(file.get_batch, range(piece.start, stop))
        yield from _read_batches(reading, batches)


def _copies_batches(file: Any, mapped: Any, in_ranges: bool) -> bool:
    """Whether reading batches copies them out of the mapped file, as for compressed ones. Uncopied batches cost no
    memory, and unused columns stay on disk; but selecting columns copies (a 320 MB batch took 690 MB instead of 105
    MB)."""
    if in_ranges:
        first = file.get_batch(0) if file.num_record_batches else None
    else:
        first = next(iter(file), None)
    mapped.seek(0)
    mapping = mapped.read_buffer()
    start, stop = mapping.address, mapping.address + mapping.size
    columns = first.columns if first is not None else []
    buffers = [buffer for column in columns for buffer in column.buffers()]
    return not all(start <= buffer.address < stop for buffer in buffers if buffer is not None and buffer.size)


def open_parquet(opened: IO[bytes]) -> Any:
    """Buffered and not pre-buffered, so that a row group is decoded page by page."""
    import pyarrow.parquet as pq

    _refuse_compressed(opened)
    return pq.ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)


def is_ipc_file(opened: IO[bytes]) -> bool:
    """Whether an Arrow file has a footer that locates its batches; a stream has none."""
    head = opened.read(len(_ARROW_MAGIC))
    opened.seek(0)
    return head == _ARROW_MAGIC


def _refuse_compressed(opened: IO[bytes]) -> None:
    if packed := detect_compression(opened):
        raise DamagedFile(f"the whole file is compressed ({packed}), but tables are read in ranges; decompress it")


@contextlib.contextmanager
def _translate_errors(reading: PieceReader, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise DamagedFile(f"not readable as {kind} ({str(error).rstrip('. ')})") from error


def _read_batches(reading: PieceReader, batches: Iterable[Any]) -> Rows:
    row = reading.piece.first_row
    names = reading.fields
    for batch in batches:
        # A batch may be a whole mapped file: convert only a few megabytes to Python objects at a time.
        rows_at_once = max(min(_BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1), _BATCH_ROWS), 1)
        for start in range(0, batch.num_rows, rows_at_once):
            for record in _records(batch.slice(start, rows_at_once).select(names), names):
                if isinstance(record, UnicodeDecodeError):
                    reason = f"not valid UTF-8 ({record.reason}); convert the table or delete this row"
                    yield reading.bad(row, reason, record.object[:2000])
                else:
                    yield reading.document(row, record)
                row += 1


def _records(batch: Any, names: list[str]) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """One mapping per row; the error for a row whose bytes are not UTF-8."""
    try:
        columns = [batch.column(index).to_pylist() for index in range(len(names))]
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield {name: column[index].as_py() for name, column in zip(names, batch.columns, strict=True)}
            except UnicodeDecodeError as error:
                yield error
        return
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _check_schema(reading: PieceReader, schema: Any) -> None:
    import pyarrow as pa

    reading.check_columns(schema.names)
    if reading.source.is_chat:
        return
    name = reading.source.text_field
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    if kind not in [getattr(pa, text)() for text in texts]:
        fix = reading.choose(schema.names)
        raise UserError(f"{reading.file}: column {name!r} holds {kind}, not text; {fix}")


_DELIMITERS = ",\t;|"


def read_csv(reading: PieceReader) -> Rows:
    """One document per row below the header, numbered from 1. Quoted fields may hold newlines. Unless the name says
    tabs, the delimiter is the one that gives the header the needed column."""
    # The limit is process-wide and 128 KiB by default.
    csv.field_size_limit(max(csv.field_size_limit(), rows.LONGEST_ROW_BYTES))
    with reading.open_unpacked() as file:
        buffered = cast(io.BufferedReader, file)
        encoding = encoding_of(buffered.peek(4)[:4])
        # Invalid bytes become surrogates, so that they can be reported with their row.
        errors = "surrogateescape" if encoding == "utf-8-sig" else "replace"
        text = io.TextIOWrapper(buffered, encoding, errors, newline="")
        lines = iter(lambda: text.readline(rows.LONGEST_ROW_BYTES), "")
        first = next(lines, "")
        if not first.strip():
            return
        # Strict, because lax parsing alters the text after a stray quote.
        every = itertools.chain([first], lines)
        records = csv.reader(every, delimiter=_delimiter(first, reading), strict=True)
        try:
            header = next(records)
        except csv.Error as error:
            raise DamagedFile(f"the header is not valid CSV ({error})") from error
        reading.check_columns(header)
        yield from _read_rows(reading, records, header)


def _read_rows(reading: PieceReader, records: Iterator[list[str]], header: list[str]) -> Rows:
    for row in itertools.count(1):
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            yield reading.bad(row, f"not valid CSV ({error}); correct or delete this row")
            continue
        if not record:  # an empty line: in a table of one column, an empty field
            reading.tally["empty"] += 1
        elif len(record) != len(header):
            reason = f"{len(record)} columns, but the header has {len(header)}; correct or delete this row"
            yield reading.bad(row, reason, _join_fields(record))
        elif not all(map(_is_encodable, record)):
            yield reading.bad(row, "not valid UTF-8; convert the file or delete this row", _join_fields(record))
        else:
            yield reading.document(row, dict(zip(header, record, strict=True)))


def _delimiter(header: str, reading: PieceReader) -> str:
    if extension_of(reading.piece.file.path.partition("?")[0]) in (".tsv", ".tab"):
        return "\t"
    fits = (mark for mark in _DELIMITERS if reading.fields[0] in next(csv.reader([header], delimiter=mark)))
    return next(fits, ",")


def _is_encodable(field: str) -> bool:
    try:
        return field.isascii() or bool(field.encode())
    except UnicodeEncodeError:
        return False


def _join_fields(record: list[str]) -> bytes:
    return ",".join(record)[:2000].encode("utf-8", "surrogateescape")
