"""Divides a source into parts and reads their documents. Parts depend on the files alone, never on the number of
workers: small files are grouped and large ones cut where their format allows it, so that parts have similar sizes. Each
piece of a cut file knows the number of its first row, so newlines of JSONL files are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from bessemer.data.read.compression import READ_ERRORS, DamagedFile, detect_compression, open_bytes
from bessemer.data.read.entry import BadRow, Document, FileEntry, FilePiece, SourcePart
from bessemer.data.read.records import read_mds, read_tfrecord, read_warc, read_webdataset
from bessemer.data.read.remote import is_url
from bessemer.data.read.rows import PieceReader, Rows, read_html, read_jsonl, read_text
from bessemer.data.read.secrets import redact_message
from bessemer.data.read.tables import is_ipc_file, open_parquet, read_arrow, read_csv, read_parquet
from bessemer.errors import UserError
from bessemer.spec.data import Format, SourceSpec

_MAX_PARTS = 16384  # a larger corpus gets larger parts instead
_MAX_PIECES = 4096  # per part: opening a file has a fixed cost
_READ_BYTES = 1 << 20

Each = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
_CutTask = tuple[FileEntry, SourceSpec, int, Path | None]


def divide_source(
    name: str,
    files: Sequence[FileEntry],
    source: SourceSpec,
    part_bytes: int = 64 << 20,
    cache: Path | None = None,
    each: Each | None = None,
) -> list[SourcePart]:
    """The parts of the source `name`, in file order; each row is in exactly one. Looks once into each file that is
    larger than a part and can be cut: reads JSONL files almost entirely (several GB/s from memory), only the footer of
    Parquet and Arrow. `run_all` may spread that over workers without changing the result."""
    total = sum(file.size_bytes for file in files)
    part_bytes = max(part_bytes, -(-total // _MAX_PARTS), 1)
    max_pieces = max(_MAX_PIECES, -(-len(files) // _MAX_PARTS))
    large = [file for file in files if file.size_bytes > part_bytes and file.format in _CUTTERS]
    tasks: list[_CutTask] = [(file, source, part_bytes, cache) for file in large]
    cut_pieces = each(cut_file, tasks) if each is not None else [cut_file(task) for task in tasks]
    pieces_of = {file.path: pieces for file, pieces in zip(large, cut_pieces, strict=True)}
    parts: list[SourcePart] = []
    pending: list[FilePiece] = []
    pending_bytes = 0
    for file in files:
        for piece in pieces_of.get(file.path) or [FilePiece(file, file.size_bytes)]:
            is_full = pending_bytes + piece.size_bytes > part_bytes or len(pending) >= max_pieces
            if pending and is_full:
                parts.append(SourcePart(name, tuple(pending)))
                pending, pending_bytes = [], 0
            pending.append(piece)
            pending_bytes += piece.size_bytes
    if pending:
        parts.append(SourcePart(name, tuple(pending)))
    return parts


def cut_file(task: _CutTask) -> list[FilePiece]:
    """The pieces of one file. A damaged file is one piece: reading it reports the damage."""
    file, source, part_bytes, cache = task
    try:
        with open_bytes(file, source.storage, cache) as opened:
            return list(_CUTTERS[file.format](opened, file, part_bytes))
    except (*READ_ERRORS, ValueError) as error:  # pyarrow's errors are ValueErrors
        if is_url(file.path) and isinstance(error, OSError):
            # A retry may succeed and would then divide the file differently.
            raise UserError(f"{file.name}: cannot be read ({redact_message(error)}); try again") from error
        return [FilePiece(file, file.size_bytes)]


def _cut_lines(opened: IO[bytes], file: FileEntry, part_bytes: int) -> Iterator[FilePiece]:
    """Equal shares of the bytes, each moved to the next line start."""
    if detect_compression(opened):
        yield FilePiece(file, file.size_bytes)
        return
    shares = -(-file.size_bytes // part_bytes)
    offsets = [file.size_bytes * share // shares for share in range(1, shares)]
    starts = [(0, 1), *find_line_starts(opened, offsets), (file.size_bytes, 0)]
    for (start, row), (stop, _) in pairwise(starts):
        if start < stop:
            yield FilePiece(file, stop - start, start, stop, row)


def find_line_starts(file: IO[bytes], rising_offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For each of the ascending offsets, yields the start of the first line at or after it and its row number from 1.
    Offsets in one line yield one start, offsets in the last line none. Reads the file once, up to the last offset."""
    import numpy as np

    offsets = iter(rising_offsets)
    offset = next(offsets, None)
    position, row = 0, 1
    buffer = bytearray(_READ_BYTES)
    view = np.frombuffer(buffer, np.uint8)
    while offset is not None and (size := file.readinto(buffer)):  # type: ignore[attr-defined]
        counted = 0
        while offset is not None and offset - 1 < position + size:
            # The line that begins at `offset` follows a newline at the byte before it.
            end = buffer.find(b"\n", max(offset - 1 - position, counted, 0), size)
            if end < 0:
                break
            row += int(np.count_nonzero(view[counted : end + 1] == 10))
            counted = end + 1
            yield position + counted, row
            while offset is not None and offset <= position + counted:
                offset = next(offsets, None)
        row += int(np.count_nonzero(view[counted:size] == 10))
        position += size


def _cut_row_groups(opened: IO[bytes], file: FileEntry, part_bytes: int) -> Iterator[FilePiece]:
    metadata = open_parquet(opened).metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [[group.column(index) for index in range(group.num_columns)] for group in groups]
    sizes = [sum(column.total_compressed_size for column in group) for group in columns]
    yield from _group_units(file, sizes, [group.num_rows for group in groups], part_bytes)


def _cut_batches(opened: IO[bytes], file: FileEntry, part_bytes: int) -> Iterator[FilePiece]:
    """A remote file stays one piece: counting the rows of its batches would fetch all of it."""
    import pyarrow as pa

    if is_url(file.path) or detect_compression(opened) or not is_ipc_file(opened):
        yield FilePiece(file, file.size_bytes)
        return
    with pa.memory_map(file.path) as mapped:
        reader = pa.ipc.open_file(mapped)
        counts = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
    rows = max(sum(counts), 1)
    yield from _group_units(file, [file.size_bytes * count // rows for count in counts], counts, part_bytes)


def _group_units(file: FileEntry, sizes: list[int], rows: list[int], part_bytes: int) -> Iterator[FilePiece]:
    """Groups neighbouring units up to the size of a part."""
    if not sizes:
        yield FilePiece(file, file.size_bytes)
        return
    start, row = 0, 1
    size, count = sizes[0], rows[0]
    for number in range(1, len(sizes)):
        if size + sizes[number] > part_bytes:
            yield FilePiece(file, size, start, number, row)
            start, row = number, row + count
            size, count = 0, 0
        size, count = size + sizes[number], count + rows[number]
    yield FilePiece(file, size, start, len(sizes), row)


_CUTTERS: dict[str, Callable[[IO[bytes], FileEntry, int], Iterator[FilePiece]]] = {
    "jsonl": _cut_lines,
    "parquet": _cut_row_groups,
    "arrow": _cut_batches,
}


_READERS: dict[Format, Callable[[PieceReader], Rows]] = {
    "text": read_text,
    "source": read_text,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "hf": read_arrow,
    "webdataset": read_webdataset,
    "mds": read_mds,
    "tfrecord": read_tfrecord,
    "warc": read_warc,
    "html": read_html,
}


def read_part(
    part: SourcePart, source: SourceSpec, cache: Path | None = None, tally: Counter[str] | None = None,
    reader: type[PieceReader] = PieceReader,
) -> Iterator[Document | BadRow]:  # fmt: skip
    """The documents of a part in order, and a BadRow for each unusable row. Rows without text yield nothing but count
    as rows and in `tally["empty"]`; records of web archives without text count in `tally["not text"]`. Memory is
    bounded by the largest document. `cache` is a folder for fetched remote data; `reader` turns rows into documents. A
    file that cannot be read to its end raises UserError: discard the documents read from the part before."""
    counts: Counter[str] = tally if tally is not None else Counter()
    for piece in part.pieces:
        try:
            rows = _READERS[piece.file.format](reader(piece, source, cache, counts))
            yield from (row for row in rows if row is not None)
        except READ_ERRORS as error:
            reason = redact_message(getattr(error, "strerror", None) or error) or type(error).__name__
            problem = reason if isinstance(error, DamagedFile) else f"cannot be read ({reason})"
            part_name = "" if part.name == piece.file.name else f" ({part.name})"
            fix = f"restore it or leave it out; its part{part_name} was not used"
            raise UserError(f"{piece.file.name}: {problem}; {fix}") from error


def read_documents(files: Iterable[FileEntry], source: SourceSpec) -> Iterator[Document]:
    """The documents of whole files in order. An unusable row raises UserError with its file and row."""
    for file in files:
        for row in read_part(SourcePart("", (FilePiece(file, file.size_bytes),)), source):
            if isinstance(row, BadRow):
                raise UserError(f"{row.file}:{row.row}: {row.reason}")
            yield row
