"""Files behind a URL, through fsspec: which there are, what tells their versions apart, and how one is opened.
Whatever a file system's library raises comes out as an OSError whose text holds no credentials.

A remote file as a file: read in blocks, so that a range of it costs no more than that range. Blocks that were
fetched once can be kept in a folder on the local disk, where they serve any later reading of the same version by any
process. A server that gives no ranges is copied to disk first.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import io
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self, cast
from urllib.parse import urlsplit

import xxhash

from bessemer.data.read.entry import FileEntry
from bessemer.data.read.secrets import environment_for, redacted, shown
from bessemer.data.store.format import file_sum
from bessemer.errors import UserError
from bessemer.storage import atomic_file, retry, write_atomic

_INSTALL = {
    "s3": "'bessemer[s3]'", "s3a": "'bessemer[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub",
}  # fmt: skip
# In order of what they tell: a hash or number of the content first, a time that is given as text last.
_VERSION_KEYS = (
    "ETag", "etag", "generation", "VersionId", "version_id", "blob_id", "sha", "md5Hash", "Content-MD5", "Digest",
    "Last-Modified",
)  # fmt: skip
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created", "Last-Modified")
_HEAD_FILES = 1000  # beginnings asked for at once
CHANGED = "it has changed since it was listed; run again when it is complete"


class RemoteError(OSError):
    """A remote file could not be listed or read; the text is safe to show."""


class RemoteFileChanged(RemoteError):
    """The file is another one than was listed: what was derived from the listing no longer holds."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file as a listing tells it."""

    path: str
    size_bytes: int
    mtime_ns: int
    version: str = ""


def is_url(path: str) -> bool:
    return "://" in path


def protocol_of(url: str) -> str:
    return urlsplit(url).scheme.lower()


def is_web(url: str) -> bool:
    return protocol_of(url) in ("http", "https")


def file_system(url: str, storage: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the URL as that file system names it."""
    protocol = protocol_of(url)
    if "::" in url.replace("[::", ""):  # but http://[::1]/ is an address
        raise UserError(f"{shown(url)}: chained URLs are not read; give the address of the file itself")
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url, **storage)
    except ImportError as error:
        package = _INSTALL.get(protocol)
        fix = f"pip install {package}" if package else "install its package"
        raise UserError(f"{shown(url)}: {redacted(error)}; {fix}") from error
    except (ValueError, TypeError) as error:
        fix = "correct the address" + (" or storage" if storage else "")
        raise UserError(f"{shown(url)}: {redacted(error)}; {fix}") from error


@contextlib.contextmanager
def told(url: str) -> Iterator[None]:
    """Turns what a remote library raises into FileNotFoundError, PermissionError or RemoteError, without secrets."""
    try:
        yield
    except (UserError, RemoteError):
        raise
    except Exception as error:  # every library has its own: botocore's, aiohttp's, Google's
        cause: BaseException = error
        if isinstance(error, FileNotFoundError):
            # fsspec calls a page missing whatever went wrong, and says in the cause what that was.
            web = type(error.__cause__).__module__.startswith("aiohttp")
            if not web or getattr(error.__cause__, "status", 0) in (404, 410):
                raise FileNotFoundError("no such file") from error
            cause = error.__cause__ or error
        raise _safe(cause, url) from error


def _safe(error: BaseException, url: str) -> OSError:
    name = type(error).__name__
    text = redacted(error) or name
    about = text if name in text or isinstance(error, OSError) else f"{name}: {text}"
    if name == "FileExpired":  # s3fs: the ETag is no longer the one of the listing
        return RemoteFileChanged(CHANGED)
    refused = isinstance(error, PermissionError) or getattr(error, "status", 0) in (401, 403)
    if refused or "Credential" in name:
        where = environment_for(protocol_of(url))
        return PermissionError(f"{about}; access comes from the environment: {where}")
    return RemoteError(about)


@dataclass(frozen=True)
class RemoteLocation:
    """A URL to list: its file system, its path there, and what makes a URL of such a path again."""

    url: str
    fs: Any
    path: str
    prefix: str

    @classmethod
    def of(cls, url: str, storage: Mapping[str, Any]) -> Self:
        fs, path = file_system(url, storage)
        fs.invalidate_cache()  # a listing of minutes ago may be another
        short = url.rstrip("/")
        # With the host, which some file systems leave out of their paths.
        prefix = short.removesuffix(path) if path and short.endswith(path) else f"{protocol_of(url)}://"
        return cls(url, fs, path, "" if path.startswith(("http://", "https://")) else prefix)

    def describe(self) -> RemoteEntry | None:
        """The file at this place, or None where it is a folder. FileNotFoundError where there is neither."""
        with told(self.url):
            return self._entry(self.path, self.fs.info(self.path))

    def _entry(self, path: str, info: Mapping[str, Any]) -> RemoteEntry | None:
        """The file that a listing tells of; a size that is not told counts as 0."""
        if info.get("type") == "directory":
            return None
        mtime_ns = next((_nanoseconds(info[key]) for key in _TIME_KEYS if info.get(key)), 0)
        return RemoteEntry(self.prefix + path, int(info.get("size") or 0), mtime_ns, version_of(info))

    def expand(self) -> dict[str, RemoteEntry | None]:
        """What the place matches as a glob, by path; None stands for a folder."""
        with told(self.url):
            infos = self.fs.glob(self.path, detail=True)
        return {path: self._entry(path, infos[path]) for path in sorted(infos)}

    def walk(self, path: str) -> dict[str, RemoteEntry]:
        """Every file below a folder, by its path inside the folder."""
        root = path.rstrip("/") + "/"
        with told(self.url):
            infos = self.fs.find(path, detail=True)
        return {
            inner.removeprefix(root): found
            for inner, info in infos.items()
            if not inner.endswith("/") and (found := self._entry(inner, info))  # some stores have keys for folders
        }

    def names_in(self, path: str) -> list[str]:
        """What lies directly in a folder, for a message; empty where that cannot be told."""
        try:
            with told(self.url):
                inside = self.fs.ls(path, detail=False)
            return sorted(inner.rstrip("/").rpartition("/")[2] for inner in inside)
        except OSError:
            return []

    def read_small(self, url: str) -> bytes:
        with told(url):
            data: bytes = self.fs.cat_file(url)
            return data

    def read_heads(self, urls: list[str], size_bytes: int) -> list[bytes]:
        """The first bytes of many files, asked for together."""
        heads: list[bytes] = []
        for first in range(0, len(urls), _HEAD_FILES):
            some = urls[first : first + _HEAD_FILES]
            with told(self.url):
                heads += self.fs.cat_ranges(some, [0] * len(some), [size_bytes] * len(some), on_error="raise")
        return heads


def version_of(info: Mapping[str, Any]) -> str:
    """What a file system gives to tell one content from another, or nothing."""
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")


def _nanoseconds(time: Any) -> int:
    if isinstance(time, (int, float)):
        return int(time * 1_000_000_000)
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            try:
                time = email.utils.parsedate_to_datetime(time)
            except ValueError:
                return 0
    if not isinstance(time, datetime):
        return 0
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return int(time.timestamp()) * 1_000_000_000 + time.microsecond * 1000


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

        def request() -> bytes:
            with told(self._file.path):
                if self._opened is None:
                    self._opened = self._open()
                self._opened.seek(start)
                data: bytes = self._opened.read(length)
            if len(data) != length:
                raise RemoteError(f"{len(data)} of {length} bytes came from offset {start}")
            return data

        def should_retry(error: Exception) -> bool:
            # A ValueError is the server's answer; everything else may be the connection.
            if not isinstance(error, RemoteError) or isinstance(error, RemoteFileChanged):
                return False
            if isinstance(error.__cause__, ValueError):
                return False
            self._drop()
            return True

        return retry(request, attempts=_TRIES, pause_s=_PAUSE_S, should_retry=should_retry)

    def _open(self) -> Any:
        fs, path = file_system(self._file.path, self._storage)
        known = {"size": self._file.size_bytes} if is_web(self._file.path) else {}
        opened = fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none", **known)
        details = getattr(opened, "details", None)
        now = version_of(details) if isinstance(details, Mapping) else ""
        if now and self._file.version and now != self._file.version:
            raise RemoteFileChanged(CHANGED)
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
            write_atomic(path, data + _checksum(path, data), parents=True, durable=False)
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
    with atomic_file(folder / "whole", parents=True, durable=False) as kept:
        _download(fs, path, file, kept)
    write_atomic(folder / "whole.sum", file_sum(str(folder / "whole")), durable=False)
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
