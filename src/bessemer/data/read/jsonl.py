"""JSON lines: one object per line, or a range of a file's bytes that begins and ends at lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from bessemer.data.document import BadRow
from bessemer.data.read import rows
from bessemer.data.read.rows import Reading, Row, Rows, parse_json
from bessemer.data.read.whole import wide_encoding


def read_jsonl(reading: Reading) -> Rows:
    """The documents of the piece; rows are line numbers in the file. Memory holds one line."""
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
    """Lines of the next `left` bytes (-1: all); for one that is too long, its length."""
    longest = rows.LONGEST_ROW_BYTES
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


def _document(reading: Reading, row: int, line: bytes) -> Row | None:
    try:
        record = parse_json(line, "utf-8-sig" if row == 1 else "utf-8")
    except (ValueError, RecursionError) as error:
        return _not_json(reading, row, line, error)
    if not isinstance(record, dict):
        field = reading.fields[0]
        reason = f'a {type(record).__name__}; each line must be like {{"{field}": "..."}}'
        return reading.bad(row, reason, line)
    return reading.document(row, record, line)


def _not_json(reading: Reading, row: int, line: bytes, error: Exception) -> BadRow:
    fix = "correct or delete this line"
    if row == 1 and line.lstrip()[:1] == b"[":
        fix = "write one object per line, not an array"
    elif encoding := wide_encoding(line):
        return reading.bad(row, f"the file is in {encoding}, not in UTF-8; convert it, such as with iconv", line)
    return reading.bad(row, f"not valid JSON in UTF-8 ({error}); {fix}", line)
