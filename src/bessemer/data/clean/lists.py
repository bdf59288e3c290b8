"""Lists that steps are told to use: files with a word, domain, id or hash a line, and sets of millions of such lines.

A file is read once in a process, however many parts of a corpus it works on.
"""

from __future__ import annotations

import gzip
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.errors import UserError

_GZIP = b"\x1f\x8b"
_BLOCK_BYTES = 1 << 20


class ListFile(NamedTuple):
    """A file as it stands now. Another content is another ListFile, so what is made of one can be kept."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, key: str) -> ListFile:
        """`key` is the setting that names the file, for the message where there is none."""
        full = os.path.expanduser(path)
        try:
            stat = os.stat(full)
        except OSError as error:
            raise UserError(
                f"{key}: {path} cannot be read ({error.strerror}); give a file that exists"
            ) from None
        if not os.path.isfile(full):
            raise UserError(f"{key}: {path} is no file; give a file with one entry a line")
        return cls(full, stat.st_size, stat.st_mtime_ns)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Row and line, without empty lines and lines that begin with #. A .gz is unpacked."""
        with open(self.path, "rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(self.path, "rb") if packed else open(self.path, "rb") as file:
            try:
                for row, line in enumerate(file, 1):
                    text = line.decode("utf-8", "replace").removeprefix("\ufeff").strip()
                    if text and not text.startswith("#"):
                        yield row, text
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(f"{self.path}: damaged gzip ({error}); fetch the file again") from None

    def content(self) -> str:
        """A hash of the file's bytes, for the key of the cache."""
        return _content(self)


@lru_cache(maxsize=256)
def _content(file: ListFile) -> str:
    found = xxhash.xxh3_128()
    with open(file.path, "rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


class Names:
    """A set of strings at 8 bytes each: their 64-bit hashes, sorted.

    Of 10^12 lookups in a set of five million, less than one finds what is not there.
    """

    def __init__(self, hashes: array[int]) -> None:
        self._hashes: npt.NDArray[np.uint64] = np.unique(np.frombuffer(hashes, dtype=np.uint64))

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        return cls(array("Q", map(name_hash, names)))

    def __len__(self) -> int:
        return len(self._hashes)

    def holds(self, names: Sequence[str]) -> list[bool]:
        """Which of the names are in the set. One call for many costs less than many calls."""
        if not len(self._hashes) or not names:
            return [False] * len(names)
        wanted = np.fromiter(map(name_hash, names), dtype=np.uint64, count=len(names))
        places = np.searchsorted(self._hashes, wanted).clip(max=len(self._hashes) - 1)
        held: list[bool] = (self._hashes[places] == wanted).tolist()
        return held


def name_hash(name: str) -> int:
    return int(xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")))
