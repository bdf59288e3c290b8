"""Digests of data files in chunks of 128 KiB: written with the file, compared when a chunk is first read.

A reader hashes only the chunks that it uses, each once: a rank that reads a thousandth of a corpus verifies about a
thousandth. One row costs at most two chunks more than it holds, which the kernel's read-ahead fetches anyway.

A `.chunks` file belongs to a group of files with one prefix: uint64 size of a chunk, then the xxh3_64 of every chunk of
every file, ordered by suffix. Its own digest is in the group's `.json`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.storage import sync_file, temporary_path

CHUNK_BYTES = 1 << 17
SUFFIX = "chunks"

_BUFFER_BYTES = 1 << 18
_DIGEST = np.dtype("<u8")

Ints = npt.NDArray[np.int64]
DamageError = Callable[[str, str], Exception]  # (suffix, problem) -> the error to raise
Bytes = npt.NDArray[np.uint8]


class _HashingFile(io.FileIO):
    """A file open for appending that hashes each chunk as it is written."""

    def __init__(self, path: str, out: list[int]) -> None:
        super().__init__(path, "wb")
        self._out, self._state, self._filled = out, xxhash.xxh3_64(), 0

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        view = memoryview(data).cast("B")[:written]
        while len(view):
            taken = view[: CHUNK_BYTES - self._filled]
            self._state.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == CHUNK_BYTES:
                self._end_chunk()
        return written

    def close(self) -> None:
        if not self.closed and self._filled:
            self._end_chunk()
        super().close()

    def _end_chunk(self) -> None:
        self._out.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


class GroupWriter:
    """Writes the files of a group and their digests under temporary names; `finish` gives them their names.

    Two writers of one prefix (an orphan of a killed job, or a file system without locks) write the same bytes:
    whichever finishes last, each file is complete.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix, self.paths = prefix, dict[str, Path]()
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        self._files: dict[str, IO[bytes]] = {}
        self._digests: dict[str, list[int]] = {}

    def open(self, suffix: str) -> IO[bytes]:
        self.paths[suffix], self._digests[suffix] = temporary_path(f"{self.prefix}.{suffix}"), []
        file = io.BufferedWriter(_HashingFile(str(self.paths[suffix]), self._digests[suffix]), _BUFFER_BYTES)
        self._files[suffix] = file
        return file

    def flushed_path(self, suffix: str) -> str:
        """The temporary path of a file, with everything written so far."""
        self._files[suffix].flush()
        return str(self.paths[suffix])

    def finish(self) -> tuple[dict[str, int], str]:
        """The size of each file, by its suffix, and the digest of the `.chunks`. An old `.json` is deleted: the caller
        writes the new one, which is the commit."""
        for file in self._files.values():
            sync_file(file)
            file.close()
        chunks = encode_digests(self._digests)
        self.paths[SUFFIX] = temporary_path(f"{self.prefix}.{SUFFIX}")
        with open(self.paths[SUFFIX], "wb") as file:
            file.write(chunks)
            sync_file(file)
        sizes = {suffix: os.path.getsize(path) for suffix, path in self.paths.items()}
        Path(f"{self.prefix}.json").unlink(missing_ok=True)
        for suffix, path in self.paths.items():
            os.replace(path, f"{self.prefix}.{suffix}")
        return sizes, content_digest(chunks)

    def discard(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk cannot take the rest
                file.close()
        for path in self.paths.values():
            path.unlink(missing_ok=True)


def encode_digests(digests: Mapping[str, list[int]]) -> bytes:
    flat = [digest for suffix in sorted(digests) for digest in digests[suffix]]
    return np.array([CHUNK_BYTES, *flat], _DIGEST).tobytes()


def content_digest(data: bytes | memoryview) -> str:
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


def hash_file(path: str) -> list[int]:
    """The digests of an existing file."""
    with open(path, "rb") as file:
        return [xxhash.xxh3_64_intdigest(block) for block in iter(lambda: file.read(CHUNK_BYTES), b"")]


class GroupDigests:
    """The recorded digests of a group's files. Raises ValueError if they do not fit the sizes."""

    def __init__(self, data: bytes, sizes: Mapping[str, int]) -> None:
        numbers = np.frombuffer(data, _DIGEST)
        self.chunk_bytes = int(numbers[0]) if numbers.size else 0
        if self.chunk_bytes <= 0:
            raise ValueError("names no size of chunks")
        counts = {suffix: -(-sizes[suffix] // self.chunk_bytes) for suffix in sorted(sizes) if suffix != SUFFIX}
        if numbers.size != 1 + sum(counts.values()):
            raise ValueError(f"holds {numbers.size - 1:,} digests instead of {sum(counts.values()):,}")
        ends = np.cumsum([1, *counts.values()]).tolist()
        self._of = {suffix: numbers[ends[i] : ends[i + 1]] for i, suffix in enumerate(counts)}

    def checked(self, suffix: str, data: npt.NDArray[Any], damage_error: DamageError) -> CheckedFile:
        return CheckedFile(suffix, data, self._of[suffix], self.chunk_bytes, damage_error)


class CheckedFile:
    """A mapped file whose chunks are compared with their digests when they are first used; safe for many threads."""

    def __init__(
        self,
        suffix: str,
        data: npt.NDArray[Any],
        digests: npt.NDArray[Any],
        chunk_bytes: int,
        damage_error: DamageError,
    ) -> None:
        self.complete = not digests.size
        self._suffix, self._item, self._damage_error = suffix, data.itemsize, damage_error
        self._data: Bytes = data.reshape(-1).view(np.uint8)
        self._digests, self._chunk_bytes = digests, chunk_bytes
        self._verified = np.zeros(digests.size, np.bool_)

    def check(self, start: int, stop: int) -> None:
        """Verifies items [start, stop) of the mapped array."""
        if self.complete or start >= stop:
            return
        first, last = start * self._item // self._chunk_bytes, (stop * self._item - 1) // self._chunk_bytes
        if not self._verified[first : last + 1].all():
            self._compare(range(first, last + 1))

    def check_runs(self, starts: Ints, lengths: Ints | int) -> None:
        """Verifies the `lengths[i]` items from `starts[i]` on, for every i."""
        if self.complete or not starts.size:
            return
        first = np.minimum(starts * self._item // self._chunk_bytes, self._verified.size - 1)
        last = np.maximum(((starts + lengths) * self._item - 1) // self._chunk_bytes, first)  # empty runs end before
        adjacent = (last - first).max() <= 1
        chunks = np.concatenate([first, last]) if adjacent else _ranges(first, last)
        pending = chunks[~self._verified[chunks]]
        if pending.size:
            self._compare(np.unique(pending).tolist())

    def check_all(self) -> None:
        for _ in self.progress():
            pass

    def progress(self) -> Iterator[int]:
        """Verifies the whole file; yields the bytes compared, some at a time."""
        step = max(1, (1 << 26) // self._chunk_bytes)
        for first in range(0, self._verified.size, step):
            stop = min(first + step, self._verified.size)
            self._compare(range(first, stop))
            yield min(stop * self._chunk_bytes, self._data.size) - first * self._chunk_bytes

    def _compare(self, chunks: Any) -> None:
        for chunk in chunks:
            begin = chunk * self._chunk_bytes
            end = min(begin + self._chunk_bytes, self._data.size)
            if not self._verified[chunk]:
                if xxhash.xxh3_64_intdigest(self._data[begin:end].data) != int(self._digests[chunk]):
                    problem = f"bytes {begin:,} to {end:,} are not those that were written"
                    raise self._damage_error(self._suffix, problem)
                self._verified[chunk] = True
        if self._verified.all():
            self.complete = True


def _ranges(first: Ints, last: Ints) -> Ints:
    counts = last - first + 1
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
