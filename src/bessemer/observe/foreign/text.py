"""Lines and numbers of text files, read in blocks: a log of any size needs the memory of one block."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

BLOCK_BYTES = 1 << 20
LINE_BYTES = 1 << 16  # the rest of a longer line is not looked at; metrics lines have a few hundred bytes
ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
# Called for each block with the file and the share of it that has been read.
progress: ContextVar[Callable[[Path, float], None] | None] = ContextVar("progress", default=None)
# All repetitions are bounded, so that no line, however long, takes more than linear time.
NUMBER = (
    r"[-+]?(?:\d[\d,]{0,30}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,4})?|\.\d{1,40}(?:[eE][-+]?\d{1,4})?"
    r"|nan|NaN|NAN|inf(?:inity)?|Inf(?:inity)?)"
)
UNITS = {
    "ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "m": 60.0, "%": 0.01,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30,
}  # fmt: skip
UNIT = r"(?:ms|sec|us|[KMGT]iB|[KMG]B|[sm%])(?![\w/])|%"


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without colours. Progress bars overwrite a line by carriage returns: each version of it comes
    alone, under the number of the line."""
    number, rest = 1, b""
    with path.open("rb") as file:
        size, report = os.fstat(file.fileno()).st_size, progress.get()
        while block := file.read(BLOCK_BYTES):
            if report:
                report(path, file.tell() / max(size, 1))
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if b"\r" in line or b"\x1b" in line:
                    yield from _pieces(number, line)
                else:
                    yield number, line[:LINE_BYTES]
                number += 1
            if len(rest) > LINE_BYTES:  # a bar that never ends its line
                *bars, rest = rest.split(b"\r")
                for bar in bars:
                    yield from _pieces(number, bar)
                rest = rest[-LINE_BYTES:]
    if rest:
        yield from _pieces(number, rest)


def _pieces(number: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    if b"\x1b" in line:
        line = ANSI.sub(b"", line)
    if b"\r" not in line:
        yield number, line[:LINE_BYTES]
        return
    for piece in line.split(b"\r"):
        if piece:
            yield number, piece[:LINE_BYTES]


def read_number(text: str) -> float:
    """The value of what NUMBER matched; NaN if it is not a number after all."""
    try:
        return float(text.replace(",", "") if "," in text else text)
    except ValueError:
        return math.nan
