"""Lines and numbers of text files, read in blocks: a log of any size needs the memory of one block."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 20
LINE_BYTES = 1 << 16  # the rest of a longer line is not looked at; metrics lines have a few hundred bytes
ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|NAN|inf(?:inity)?|Inf(?:inity)?)"
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
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield from _pieces(number, line)
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
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan
