"""A remote file as a file: read in blocks, so that a range of it costs no more than that range. Blocks that were
fetched once can be kept in a folder on the local disk, where they serve any later reading of the same version by any
process. A server that gives no ranges is copied to disk first."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import xxhash

from bessemer.data.curate.files import replacing
from bessemer.data.read.entry import FileEntry
from bessemer.data.read.remote import CHANGED, Changed, RemoteError, file_system, is_web, told, version_of
from bessemer.data.store_format import file_sum

BLOCK_BYTES = 4 << 20
_BLOCKS_IN_MEMORY = 8  # Parquet alternates between its columns and its footer
_TRIES = 4
_PAUSE_S = 0.5  # before the second try; doubles each time
_CHECKSUM_BYTES = 8


def open_remote(file: FileEntry, storage: Mapping[str, Any], cache: Path | None) -> IO[bytes]:
    """The file's bytes, seekable. Nothing is fetched before it is read, and nothing at all that the cache holds."""
    kept = _folder(file, cache)
    if is_web(file.path) and not _has_ranges(file, storage, kept):
        return _copied(file, storage, kept)
    return cast(IO[bytes], io.BufferedReader(RemoteFile(file, storage, kept), 256 << 10))


class RemoteFile(io.RawIOBase):
    """Reads by blocks; `folder` keeps them. Holds at most 32 MiB."""

    def __init__(self, file: FileEntry, storage: Mapping[str, Any], folder: Path | None = None) -> None:
        self._file = file
        self._storage = storage
        self._folder = folder
        self._opened: Any = None
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size_bytes}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._file.size_bytes or not len(buffer):
            return 0
        number, offset = divmod(self._position, BLOCK_BYTES)
        data = memoryview(self._block(number))[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._drop()
        self._blocks.clear()
        super().close()

    def _drop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self._file.size_bytes - start)
        data = self._load(number, length)
        if data is None:
            data = self._fetch(start, length)
            self._keep(number, data)
        self._blocks[number] = data
        if len(self._blocks) > _BLOCKS_IN_MEMORY:
            self._blocks.popitem(last=False)
        return data

    def _fetch(self, start: int, length: int) -> bytes:
        """From the server, tried again when the connection fails: a job of days meets every kind of hiccup."""
        for left in reversed(range(_TRIES)):
            try:
                with told(self._file.path):
                    if self._opened is None:
                        self._opened = self._open()
                    self._opened.seek(start)
                    data: bytes = self._opened.read(length)
                if len(data) == length:
                    return data
                problem = RemoteError(f"{len(data)} of {length} bytes came from offset {start}")
            except Changed:
                raise
            except RemoteError as error:
                if isinstance(error.__cause__, ValueError):  # the server's answer, not the connection
                    raise
                problem = error
            self._drop()
            if left:
                time.sleep(_PAUSE_S * 2 ** (_TRIES - 1 - left))
        raise problem

    def _open(self) -> Any:
        fs, path = file_system(self._file.path, self._storage)
        known = {"size": self._file.size_bytes} if is_web(self._file.path) else {}
        opened = fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none", **known)
        details = getattr(opened, "details", None)
        now = version_of(details) if isinstance(details, Mapping) else ""
        if now and self._file.version and now != self._file.version:
            raise Changed(CHANGED)
        return opened

    def _load(self, number: int, length: int) -> bytes | None:
        """A block from the folder, unless it is not there or damaged."""
        try:
            if self._folder is None:
                return None
            path = self._folder / f"{number:08d}"
            data = path.read_bytes()
        except OSError:
            return None
        whole = len(data) == length + _CHECKSUM_BYTES and data[length:] == _checksum(path, data[:length])
        return data[:length] if whole else None

    def _keep(self, number: int, data: bytes) -> None:
        if self._folder is None:
            return
        try:
            path = self._folder / f"{number:08d}"
            with replacing(path) as partial:
                partial.write_bytes(data + _checksum(path, data))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._folder = None  # the disk is full: the reading goes on without keeping


def _checksum(path: Path, data: bytes) -> bytes:
    """Of a block and its place: a block that was put in another's place is not taken for it."""
    return xxhash.xxh3_64_digest(data, seed=xxhash.xxh3_64_intdigest(f"{path.parent.name}/{path.name}".encode()))


def _folder(file: FileEntry, cache: Path | None) -> Path | None:
    """Where a file's blocks are kept: a folder for each version, and none for a file whose version cannot be told."""
    if cache is None or not (file.version or file.mtime_ns):
        return None
    name = xxhash.xxh3_128_hexdigest(repr([BLOCK_BYTES, *file.identity]).encode())
    return cache / name[:2] / name


def _has_ranges(file: FileEntry, storage: Mapping[str, Any], folder: Path | None) -> bool:
    """Whether an HTTP server gives the end of a file alone. Not asked again for a file that is in the cache."""
    if folder is not None and (folder / "whole").exists():
        return False
    if folder is not None and any(folder.glob("[0-9]*")):
        return True
    with contextlib.closing(RemoteFile(file, storage)) as probe:
        try:
            return bool(file.size_bytes and probe._fetch(file.size_bytes - 1, 1))
        except RemoteError as error:
            if isinstance(error.__cause__, ValueError):  # fsspec's word for it
                return False
            raise


def _copied(file: FileEntry, storage: Mapping[str, Any], folder: Path | None) -> IO[bytes]:
    """The whole file on the local disk: in the cache, or in a temporary file that goes when it is closed."""
    if folder is not None and _is_whole(folder):
        return open(folder / "whole", "rb")
    fs, path = file_system(file.path, storage)
    if folder is None:
        target = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115 (the caller closes it)
        _download(fs, path, file, target)
        target.seek(0)
        return target
    with replacing(folder / "whole") as partial, open(partial, "wb") as kept:
        _download(fs, path, file, kept)
    with replacing(folder / "whole.sum") as partial:
        partial.write_text(file_sum(str(folder / "whole")))
    return open(folder / "whole", "rb")


def _is_whole(folder: Path) -> bool:
    """A copy is there, and is what was fetched."""
    try:
        return file_sum(str(folder / "whole")) == (folder / "whole.sum").read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _download(fs: Any, path: str, file: FileEntry, target: IO[bytes]) -> None:
    with told(file.path), fs.open(path, "rb", block_size=0) as stream:
        shutil.copyfileobj(stream, target, 1 << 20)
    if file.size_bytes and target.tell() != file.size_bytes:
        raise RemoteError(f"{target.tell()} bytes came instead of {file.size_bytes}")
