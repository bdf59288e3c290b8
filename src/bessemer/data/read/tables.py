"""Tables by column: Parquet, Arrow IPC files and streams, and the Arrow shards of a Hugging Face dataset. Batches are
made of the wanted columns alone, and Parquet is decoded page by page: memory holds a few megabytes or the longest
row, whatever the size of a row group.

Comma- or tab-separated tables with a header line.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

from bessemer.data.read import rows
from bessemer.data.read.compression import DamagedFile, compression_of
from bessemer.data.read.files import extension_of
from bessemer.data.read.remote import is_url
from bessemer.data.read.rows import Reading, Rows, encoding_of
from bessemer.errors import UserError

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 4096
_ARROW_MAGIC = b"ARROW1"


def read_parquet(reading: Reading) -> Rows:
    """The rows of the piece's row groups."""
    with _told(reading, "Parquet"), reading.open_bytes() as opened, open_parquet(opened) as file:
        _check_schema(reading, file.schema_arrow)
        piece, about = reading.piece, file.metadata
        stop = piece.stop if piece.stop != -1 else about.num_row_groups
        bytes_per_row = piece.file.size_bytes // max(about.num_rows, 1)
        batch_rows = min(max(_BATCH_BYTES // max(bytes_per_row, 1), 1), _BATCH_ROWS)
        groups = list(range(piece.start, stop))
        batches = file.iter_batches(batch_rows, row_groups=groups, columns=reading.fields, use_threads=False)
        yield from _read_batches(reading, batches)


def read_arrow(reading: Reading) -> Rows:
    """The rows of an IPC file or stream (feather, too); of a file, those of the piece's record batches."""
    import pyarrow as pa

    piece = reading.piece
    with _told(reading, "Arrow"), reading.open_bytes() as opened, contextlib.ExitStack() as stack:
        _refuse_packed(opened)
        in_ranges = is_ipc_file(opened)
        open_ipc = pa.ipc.open_file if in_ranges else pa.ipc.open_stream
        mapped = None if is_url(piece.file.path) else stack.enter_context(pa.memory_map(piece.file.path))
        file = open_ipc(mapped or opened)
        _check_schema(reading, file.schema)
        if mapped is None or _copies(file, mapped, in_ranges):
            wanted = [file.schema.get_field_index(name) for name in reading.fields]
            options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
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


def _copies(file: Any, mapped: Any, in_ranges: bool) -> bool:
    """Whether batches are copied out of a mapped file, as compressed ones are. Those that are not cost no memory of
    their own, and columns that nobody looks at stay on the disk; but asking for some columns alone makes copies of
    them (a 320 MB batch then took 690 MB instead of 105 MB)."""
    if in_ranges:
        first = file.get_batch(0) if file.num_record_batches else None
    else:
        first = next(iter(file), None)
    mapped.seek(0)
    whole = mapped.read_buffer()
    start, stop = whole.address, whole.address + whole.size
    columns = first.columns if first is not None else []
    buffers = [buffer for column in columns for buffer in column.buffers()]
    return not all(start <= one.address < stop for one in buffers if one is not None and one.size)


def open_parquet(opened: IO[bytes]) -> Any:
    """Buffered and not pre-buffered: a row group is decoded page by page instead of being held whole."""
    import pyarrow.parquet as pq

    _refuse_packed(opened)
    return pq.ParquetFile(opened, buffer_size=1 << 20, pre_buffer=False)


def is_ipc_file(opened: IO[bytes]) -> bool:
    """Whether an Arrow file has a footer to find its batches by; a stream has none."""
    head = opened.read(len(_ARROW_MAGIC))
    opened.seek(0)
    return head == _ARROW_MAGIC


def _refuse_packed(opened: IO[bytes]) -> None:
    if packed := compression_of(opened):
        raise DamagedFile(f"the whole file is compressed ({packed}), but tables are read in ranges; unpack it")


@contextlib.contextmanager
def _told(reading: Reading, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise DamagedFile(f"not readable as {kind} ({str(error).rstrip('. ')})") from error


def _read_batches(reading: Reading, batches: Iterable[Any]) -> Rows:
    row = reading.piece.first_row
    names = reading.fields
    for batch in batches:
        # A batch may be a whole mapped file: only some megabytes of it become Python objects at a time.
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
    """One mapping for each row; the error for one whose bytes are no text."""
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


def _check_schema(reading: Reading, schema: Any) -> None:
    import pyarrow as pa

    reading.check_columns(schema.names)
    if reading.source.messages_field:
        return
    name = reading.source.text_field
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    if kind not in [getattr(pa, text)() for text in texts]:
        fix = reading.choose(schema.names)
        raise UserError(f"{reading.file}: column {name!r} holds {kind}, not text; {fix}")


_DELIMITERS = ",\t;|"


def read_csv(reading: Reading) -> Rows:
    """One document for each row below the header; the first of them is row 1. A quoted field may hold newlines. Where
    the name does not say tabs, the delimiter is the one that gives the header the wanted column."""
    # The library's limit is one number for the whole process, and 128 KiB unless set.
    csv.field_size_limit(max(csv.field_size_limit(), rows.LONGEST_ROW_BYTES))
    with reading.open_unpacked() as file:
        text = _decoded(file)
        lines = iter(lambda: text.readline(rows.LONGEST_ROW_BYTES), "")
        first = next(lines, "")
        if not first.strip():
            return
        # Strict: what a lax reading makes of a stray quote is another text than was written.
        every = itertools.chain([first], lines)
        records = csv.reader(every, delimiter=_delimiter(first, reading), strict=True)
        try:
            header = next(records)
        except csv.Error as error:
            raise DamagedFile(f"the header is not valid CSV ({error})") from error
        reading.check_columns(header)
        yield from _read_rows(reading, records, header)


def _read_rows(reading: Reading, records: Iterator[list[str]], header: list[str]) -> Rows:
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
            yield reading.bad(row, reason, _raw(record))
        elif not all(map(_encodable, record)):
            yield reading.bad(row, "not valid UTF-8; convert the file or delete this row", _raw(record))
        else:
            yield reading.document(row, dict(zip(header, record, strict=True)))


def _decoded(file: IO[bytes]) -> io.TextIOWrapper:
    buffered = cast(io.BufferedReader, file)
    encoding = encoding_of(buffered.peek(4)[:4])
    # Bytes that are no UTF-8 are kept apart, as half surrogates, to be found in their row.
    errors = "surrogateescape" if encoding == "utf-8-sig" else "replace"
    return io.TextIOWrapper(buffered, encoding, errors, newline="")


def _delimiter(header: str, reading: Reading) -> str:
    if extension_of(reading.piece.file.path.partition("?")[0]) in (".tsv", ".tab"):
        return "\t"
    fits = (mark for mark in _DELIMITERS if reading.fields[0] in next(csv.reader([header], delimiter=mark)))
    return next(fits, ",")


def _encodable(field: str) -> bool:
    if field.isascii():
        return True
    try:
        field.encode()
    except UnicodeEncodeError:
        return False
    return True


def _raw(record: list[str]) -> bytes:
    return ",".join(record)[:2000].encode("utf-8", "surrogateescape")
