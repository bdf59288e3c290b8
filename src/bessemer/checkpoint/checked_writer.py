"""torch's DCP writer, checked: what reached the disk is read back and compared with what left the memory.

A hash that is first taken from the file would vouch for whatever a bad disk, cable or file server made of it. Here each
file is hashed on its way out; after fsync the kernel's copy is dropped (POSIX_FADV_DONTNEED: O_DIRECT has alignment
rules that differ between file systems) and the file is hashed again, as the disk or the server gives it back. That is
one read of what was written, and none of it stands in the loop's way when the save is asynchronous.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from bessemer.checkpoint.manifest import hash_file


class _HashedStream:
    """A file being written that knows the hash of what was written to it. Whoever opened the file closes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self.bytes = file, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        count = self._file.write(data)
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        """For fsync. DCP calls it with the whole index still in Python's buffer, so that goes out first."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.flush()

    def hash(self) -> str:
        return str(self._digest.hexdigest())


class _HashedFiles(FileSystem):
    """The local file system under a DCP writer; notes size and hash of every file by its name."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open("wb") as file:
            stream = _HashedStream(file)
            yield stream
        self.written[Path(path).name] = {"bytes": stream.bytes, "xxh3_128": stream.hash()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class CheckedWriter(FileSystemWriter):
    """One file a rank, each hashed while it is written.

    `copy_ahead_bytes` is how far tensors are fetched from the device ahead of the disk. For tensors in host memory it
    must be 0: DCP would wait for the device's current stream, which belongs to the training.
    """

    def __init__(self, folder: Path, copy_ahead_bytes: int) -> None:
        super().__init__(folder, single_file_per_rank=True, per_thread_copy_ahead=copy_ahead_bytes)
        self._files = _HashedFiles()
        self.fs = self._files

    def add(self, name: str, content: bytes) -> None:
        """One more file in the folder, which holds no tensor."""
        with self._files.create_stream(Path(str(self.path)) / name, "wb") as stream:
            stream.write(content)
            os.fsync(stream.fileno())

    def read_back(self) -> dict[str, dict[str, Any]]:
        """Size and hash of every file, compared with what the disk holds; OSError names one that differs."""
        for name, written in self._files.written.items():
            path = Path(str(self.path)) / name
            if path.stat().st_size != written["bytes"] or hash_file(path, from_disk=True) != written["xxh3_128"]:
                raise OSError(errno.EIO, "what was read back differs from what was written", str(path))
        return dict(sorted(self._files.written.items()))
