"""The documents of a part, whatever its format: the way from the division of a source into the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bessemer.data.document import BadRow, Document
from bessemer.data.read.columns import read_arrow, read_parquet
from bessemer.data.read.entry import FileEntry, Part, Piece
from bessemer.data.read.jsonl import read_jsonl
from bessemer.data.read.mds import read_mds
from bessemer.data.read.rows import Reading, Rows
from bessemer.data.read.secrets import redacted
from bessemer.data.read.table import read_csv
from bessemer.data.read.tfrecord import read_tfrecord
from bessemer.data.read.unpack import UNREADABLE, Damaged
from bessemer.data.read.warc import read_warc
from bessemer.data.read.webdataset import read_webdataset
from bessemer.data.read.whole import read_html, read_text
from bessemer.errors import UserError
from bessemer.spec.data import Format, SourceSpec

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
    part: Part, source: SourceSpec, cache: Path | None = None, tally: Counter[str] | None = None
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
        for row in read_part(Part("", (Piece(file, file.size_bytes),)), source):
            if isinstance(row, BadRow):
                raise UserError(f"{row.file}:{row.row}: {row.reason}")
            yield row


def _problem(piece: Piece, error: BaseException) -> str:
    fix = "restore it or leave it out"
    if isinstance(error, Damaged):
        return f"{piece.file.name}: {redacted(error)}; {fix}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{piece.file.name}: cannot be read ({redacted(text) or type(error).__name__}); {fix}"
