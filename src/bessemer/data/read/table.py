"""Comma- or tab-separated tables with a header line."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator
from typing import IO, cast

from bessemer.data.read import rows
from bessemer.data.read.names import extension_of
from bessemer.data.read.rows import Reading, Rows
from bessemer.data.read.unpack import Damaged
from bessemer.data.read.whole import encoding_of

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
            raise Damaged(f"the header is not valid CSV ({error})") from error
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
