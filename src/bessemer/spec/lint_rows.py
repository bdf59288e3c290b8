"""A look at the first rows of a source, where its files lie on this machine: how many repeat an earlier one."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO

from bessemer.spec.data import SourceSpec

ROWS = 2000
LONGEST_ROW = 1 << 20
_FEWEST = 20  # below it a share says nothing


def repeated_share(folder: Path, source: SourceSpec) -> tuple[float, int]:
    """(share of rows that were there before, rows looked at) among the first rows of a source's JSONL files; (0, 0)
    where there are none to look at."""
    seen: set[bytes] = set()
    rows = repeated = 0
    with suppress(OSError, ValueError, EOFError, zlib.error):  # a file that cannot be read is reported by other checks
        for text in islice(_texts(folder, source), ROWS):
            key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            repeated += key in seen
            seen.add(key)
            rows += 1
    return (repeated / rows, rows) if rows >= _FEWEST else (0.0, 0)


def _texts(folder: Path, source: SourceSpec) -> Iterator[str]:
    if source.format not in ("auto", "jsonl"):
        return
    for path in source.path:
        if "://" in path or any(mark in path for mark in "*?["):
            continue
        place = folder / os.path.expanduser(path)  # an absolute path replaces the folder
        files = sorted(islice(place.glob("*.jsonl*"), 20)) if place.is_dir() else [place]
        for file in files:
            if file.is_file() and file.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _rows(file, source.text_field)


def _rows(file: Path, field: str) -> Iterator[str]:
    """Texts of a file."""
    opened: Callable[..., IO[str]] = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(LONGEST_ROW):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get(field), str):
                yield row[field]
