"""Tables by column: Parquet, Arrow IPC files and streams, and the Arrow shards of a Hugging Face dataset. Batches are
made of the wanted columns alone, and Parquet is decoded page by page: memory holds a few megabytes or the longest
row, whatever the size of a row group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from bessemer.data.read.remote import is_url
from bessemer.data.read.rows import Reading, Rows
from bessemer.data.read.unpack import Damaged, compression_of
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
        raise Damaged(f"the whole file is compressed ({packed}), but tables are read in ranges; unpack it")


@contextlib.contextmanager
def _told(reading: Reading, kind: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise Damaged(f"not readable as {kind} ({str(error).rstrip('. ')})") from error


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
