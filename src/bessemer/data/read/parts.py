"""How a source divides into parts: by its files and their content alone, never by the number of workers. Small files
are put together and large ones are cut where their format allows it, so that parts are of about one size. A cut
file's pieces know the number of their first row, which for JSONL means that its newlines are counted.

The documents of a part, whatever its format: the way from the division of a source into the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from bessemer.data.document import BadRow, Document
from bessemer.data.read.archives import read_warc, read_webdataset
from bessemer.data.read.compression import UNREADABLE, DamagedFile, compression_of, open_bytes
from bessemer.data.read.entry import FileEntry, FilePiece, SourcePart
from bessemer.data.read.records import read_mds, read_tfrecord
from bessemer.data.read.remote import is_url
from bessemer.data.read.rows import Reading, Rows, read_html, read_jsonl, read_text
from bessemer.data.read.secrets import redacted
from bessemer.data.read.tables import is_ipc_file, open_parquet, read_arrow, read_csv, read_parquet
from bessemer.errors import UserError
from bessemer.spec.data import Format, SourceSpec

_MOST_PARTS = 16384  # a huge corpus gets larger parts, not more of them
_MOST_PIECES = 4096  # of one part: files of a few bytes cost their opening
_COUNT_BYTES = 1 << 20

Each = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
_Cut = tuple[FileEntry, SourceSpec, int, Path | None]


def divide(
    name: str,
    files: Sequence[FileEntry],
    source: SourceSpec,
    part_bytes: int = 64 << 20,
    cache: Path | None = None,
    each: Each | None = None,
) -> list[SourcePart]:
    """The parts of the source `name`, in the order of its files; each file and row is in exactly one. Costs one look
    into each file that is larger than a part and can be cut: a reading of all but its end for JSONL (several GB/s
    from memory), of its footer for Parquet and Arrow. `each` may spread that over workers; the parts are the same."""
    total = sum(file.size_bytes for file in files)
    part_bytes = max(part_bytes, -(-total // _MOST_PARTS), 1)
    most_pieces = max(_MOST_PIECES, -(-len(files) // _MOST_PARTS))
    large = [file for file in files if file.size_bytes > part_bytes and file.format in _CUTTERS]
    tasks: list[_Cut] = [(file, source, part_bytes, cache) for file in large]
    found = each(cut, tasks) if each is not None else [cut(task) for task in tasks]
    pieces_of = {file.path: pieces for file, pieces in zip(large, found, strict=True)}
    parts: list[SourcePart] = []
    waiting: list[FilePiece] = []
    waiting_bytes = 0
    for file in files:
        for piece in pieces_of.get(file.path) or [FilePiece(file, file.size_bytes)]:
            full = waiting_bytes + piece.size_bytes > part_bytes or len(waiting) >= most_pieces
            if waiting and full:
                parts.append(SourcePart(name, tuple(waiting)))
                waiting, waiting_bytes = [], 0
            waiting.append(piece)
            waiting_bytes += piece.size_bytes
    if waiting:
        parts.append(SourcePart(name, tuple(waiting)))
    return parts


def cut(task: _Cut) -> list[FilePiece]:
    """The pieces of one file. A damaged file is one piece: its reading will tell what is wrong."""
    file, source, part_bytes, cache = task
    try:
        with open_bytes(file, source.storage, cache) as opened:
            return list(_CUTTERS[file.format](opened, file, part_bytes))
    except (*UNREADABLE, ValueError) as error:  # pyarrow's own errors are ValueErrors
        if is_url(file.path) and isinstance(error, OSError):
            # It may work the next time, and would then divide in another way.
            raise UserError(f"{file.name}: cannot be read ({redacted(error)}); try again") from error
        return [FilePiece(file, file.size_bytes)]


def _cut_lines(opened: IO[bytes], file: FileEntry, part_bytes: int) -> Iterator[FilePiece]:
    """Equal shares of the bytes, each moved on to the next beginning of a line."""
    if compression_of(opened):
        yield FilePiece(file, file.size_bytes)
        return
    shares = -(-file.size_bytes // part_bytes)
    wanted = [file.size_bytes * share // shares for share in range(1, shares)]
    starts = [(0, 1), *line_starts(opened, wanted), (file.size_bytes, 0)]
    for (start, row), (stop, _) in pairwise(starts):
        if start < stop:
            yield FilePiece(file, stop - start, start, stop, row)


def line_starts(file: IO[bytes], wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For each rising offset, the first line that begins there or later, and its number from 1; offsets inside one
    line give one, and those inside the last line none. Reads the file once, to the last of them."""
    import numpy as np

    offsets = iter(wanted)
    offset = next(offsets, None)
    at, row = 0, 1
    buffer = bytearray(_COUNT_BYTES)
    view = np.frombuffer(buffer, np.uint8)
    while offset is not None and (size := file.readinto(buffer)):  # type: ignore[attr-defined]
        counted = 0
        while offset is not None and offset - 1 < at + size:
            # The line that begins at `offset` follows a newline at the byte before it.
            end = buffer.find(b"\n", max(offset - 1 - at, counted, 0), size)
            if end < 0:
                break
            row += int(np.count_nonzero(view[counted : end + 1] == 10))
            counted = end + 1
            yield at + counted, row
            while offset is not None and offset <= at + counted:
                offset = next(offsets, None)
        row += int(np.count_nonzero(view[counted:size] == 10))
        at += size


def _cut_row_groups(opened: IO[bytes], file: FileEntry, part_bytes: int) -> Iterator[FilePiece]:
    about = open_parquet(opened).metadata
    sizes, counts = [], []
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        sizes.append(sum(group.column(index).total_compressed_size for index in range(group.num_columns)))
        counts.append(group.num_rows)
    yield from _runs(file, sizes, counts, part_bytes)


def _cut_batches(opened: IO[bytes], file: FileEntry, part_bytes: int) -> Iterator[FilePiece]:
    """A remote file would have to be fetched whole to count the rows of its batches: it stays one piece."""
    import pyarrow as pa

    if is_url(file.path) or compression_of(opened) or not is_ipc_file(opened):
        yield FilePiece(file, file.size_bytes)
        return
    with pa.memory_map(file.path) as mapped:
        reader = pa.ipc.open_file(mapped)
        counts = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
    rows = max(sum(counts), 1)
    yield from _runs(file, [file.size_bytes * count // rows for count in counts], counts, part_bytes)


def _runs(file: FileEntry, sizes: list[int], rows: list[int], part_bytes: int) -> Iterator[FilePiece]:
    """Neighbouring units together up to the size of a part."""
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


_READERS: dict[Format, Callable[[Reading], Rows]] = {
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
    part: SourcePart, source: SourceSpec, cache: Path | None = None, tally: Counter[str] | None = None
) -> Iterator[Document | BadRow]:
    """The documents of a part in order, and a BadRow for each row that is none. Rows without text give nothing, but
    count in their file's row numbers and in `tally["empty"]`; so do records of web archives that hold no text, in
    `tally["not text"]`. Memory is bounded by the largest document. `cache` is a folder that keeps what was fetched of
    remote files. A file that cannot be read to its end is a UserError: what came before it of this part should not be
    used."""
    counts: Counter[str] = tally if tally is not None else Counter()
    for piece in part.pieces:
        try:
            rows = _READERS[piece.file.format](Reading(piece, source, cache, counts))
            yield from (row for row in rows if row is not None)
        except UNREADABLE as error:
            whole = "" if part.name == piece.file.name else f" ({part.name})"
            raise UserError(f"{_problem(piece, error)}; its part{whole} was not used") from error


def read_documents(files: Iterable[FileEntry], source: SourceSpec) -> Iterator[Document]:
    """The documents of whole files in order. A row that cannot be used raises UserError with its file and row."""
    for file in files:
        for row in read_part(SourcePart("", (FilePiece(file, file.size_bytes),)), source):
            if isinstance(row, BadRow):
                raise UserError(f"{row.file}:{row.row}: {row.reason}")
            yield row


def _problem(piece: FilePiece, error: BaseException) -> str:
    fix = "restore it or leave it out"
    if isinstance(error, DamagedFile):
        return f"{piece.file.name}: {redacted(error)}; {fix}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{piece.file.name}: cannot be read ({redacted(text) or type(error).__name__}); {fix}"
