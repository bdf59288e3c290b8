"""Opens a file's bytes, local or remote, compressed or not. Everything streams."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from bessemer.data.read.entry import FileEntry
from bessemer.data.read.remote import CHANGED, RemoteFileChanged, is_url
from bessemer.errors import UserError

_BUFFER_BYTES = 256 << 10
_ZSTD_INPUT_BYTES = (256, 32 << 10)  # smallest and largest read
_ZSTD_OUTPUT_BYTES = 1 << 20
_ZSTD_WINDOW_BYTES = 1 << 31  # needed for `zstd --long=31`, which large forum dumps use
_MAGIC_BYTES = 10


class DamagedFile(Exception):
    """The file does not follow its format or ends early; the message says what is wrong."""


# The errors that reading a damaged, missing or unreachable file may raise.
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, DamagedFile)


def open_bytes(file: FileEntry, storage: Mapping[str, Any], cache: Path | None) -> IO[bytes]:
    """The stored bytes of a file, seekable. Raises where size or time differ from the listing: cached results are keyed
    by what the listing said."""
    if is_url(file.path):
        from bessemer.data.read.remote import open_remote

        return open_remote(file, storage, cache)
    opened = open(file.path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115 (the caller closes it)
    stat = os.fstat(opened.fileno())
    if (stat.st_size, stat.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        opened.close()
        raise RemoteFileChanged(CHANGED)
    return opened


def open_decompressed(file: FileEntry, storage: Mapping[str, Any], cache: Path | None) -> IO[bytes]:
    """The decompressed content; the first bytes tell the compression. Closing it closes the file."""
    opened = open_bytes(file, storage, cache)
    try:
        return decompress(opened, detect_compression(opened))
    except BaseException:
        opened.close()
        raise


def detect_compression(opened: IO[bytes]) -> str:
    """gz, zst, bz2, xz or an empty string. The first bytes decide, because servers and browsers may decompress a file
    and keep its name."""
    head = opened.read(_MAGIC_BYTES)
    opened.seek(0)
    if head.startswith(b"\x1f\x8b\x08"):
        return "gz"
    # Parallel compressors write a skippable frame first.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return "zst"
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return "bz2"
    return "xz" if head.startswith(b"\xfd7zXZ\x00") else ""


def decompress(opened: IO[bytes], compression: str) -> IO[bytes]:
    """The decompressed content of a stream, which may hold several compressed streams in a row. A truncated stream
    raises EOFError."""
    if not compression:
        return opened
    inner: Any
    if compression == "gz":
        inner = _Closing(gzip.GzipFile(fileobj=opened, mode="rb"), opened)
    elif compression == "bz2":
        inner = _Closing(bz2.BZ2File(opened), opened)
    elif compression == "xz":
        inner = _Closing(lzma.LZMAFile(opened), opened)  # noqa: SIM115
    else:
        inner = _Zstandard(opened)
    return cast(IO[bytes], io.BufferedReader(inner, _BUFFER_BYTES))


def read_exactly(file: IO[bytes], length: int, problem: str) -> bytes:
    """Exactly `length` bytes; EOFError where the file has fewer."""
    data = file.read(length)
    if len(data) < length:
        raise EOFError(problem)
    return data


def skip(file: IO[bytes], length: int, problem: str) -> None:
    while length:
        length -= len(read_exactly(file, min(length, 1 << 20), problem))


class _Unpacked(io.RawIOBase):
    """Closes the underlying file, which Python's decompressors leave open."""

    _opened: IO[bytes]

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._opened.close()
        super().close()


class _Closing(_Unpacked):
    def __init__(self, inner: Any, opened: IO[bytes]) -> None:
        self._inner, self._opened = inner, opened

    def readinto(self, buffer: Any) -> int:
        return int(self._inner.readinto(buffer))

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Zstandard(_Unpacked):
    """Raises on a truncated file; the library's own stream reader treats it as a normal end."""

    def __init__(self, opened: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError("reading .zst files: pip install 'bessemer[data]'") from error
        self._opened = opened
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._unused = b""
        self._input_bytes = _ZSTD_INPUT_BYTES[0]

    def readinto(self, buffer: Any) -> int:
        while not len(self._ready):
            data = self._unused or self._opened.read(self._input_bytes)
            self._unused = b""
            if data:
                self._decompress(data)
            elif self._frame is None:
                return 0
            else:
                raise EOFError("the compressed data ends before its end marker")
        chunk = self._ready[: len(buffer)]
        buffer[: len(chunk)] = chunk
        self._ready = self._ready[len(chunk) :]
        return len(chunk)

    def _decompress(self, data: bytes) -> None:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            content = self._frame.decompress(data)
        except self._error as error:
            raise DamagedFile(f"not readable as Zstandard ({error})") from error
        # A call returns all the content of its input, up to 32,000 times its size: read highly compressed data in
        # small steps.
        least, most = _ZSTD_INPUT_BYTES
        larger = len(content) < _ZSTD_OUTPUT_BYTES
        self._input_bytes = min(self._input_bytes * 2, most) if larger else max(self._input_bytes // 2, least)
        if self._frame.eof:
            self._unused = self._frame.unused_data
            self._frame = None
        self._ready = memoryview(content)
