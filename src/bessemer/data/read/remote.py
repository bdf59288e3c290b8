"""Files behind a URL, through fsspec: lists them and reads them in blocks, so that reading a range costs no more than
that range. Fetched blocks can be cached in a local folder, where any later reader of the same version finds them; a
server without range requests is copied to disk first. Errors of the file system libraries become OSErrors without
credentials."""

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
from bessemer.data.read.secrets import environment_for, redact, redact_message
from bessemer.data.store.format import file_digest
from bessemer.errors import UserError
from bessemer.storage import atomic_file, retry, write_atomic

_INSTALL = {
    "s3": "'bessemer[s3]'", "s3a": "'bessemer[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub",
}  # fmt: skip
# Most reliable first: hashes and numbers of the content, then a time given as text.
_VERSION_KEYS = (
    "ETag", "etag", "generation", "VersionId", "version_id", "blob_id", "sha", "md5Hash", "Content-MD5", "Digest",
    "Last-Modified",
)  # fmt: skip
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created", "Last-Modified")
_HEAD_FILES = 1000  # per batched request
CHANGED = "it has changed since it was listed; run again when it is complete"


class RemoteError(OSError):
    """A remote file could not be listed or read; the message holds no credentials."""


class RemoteFileChanged(RemoteError):
    """The file differs from the listing, so results derived from the listing are invalid."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file as listed."""

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
    """The fsspec file system of a URL, and the path of the URL in it."""
    protocol = protocol_of(url)
    if "::" in url.replace("[::", ""):  # http://[::1]/ is a host
        raise UserError(f"{redact(url)}: chained URLs are not supported; give the URL of the file itself")
    try:
        from fsspec.core import url_to_fs

        folders = {"auto_mkdir": True} if protocol == "file" else {}  # an object store has none
        return url_to_fs(url, **folders, **storage)
    except ImportError as error:
        package = _INSTALL.get(protocol)
        fix = f"pip install {package}" if package else "install its package"
        raise UserError(f"{redact(url)}: {redact_message(error)}; {fix}") from error
    except (ValueError, TypeError) as error:
        fix = "correct the URL" + (" or storage" if storage else "")
        raise UserError(f"{redact(url)}: {redact_message(error)}; {fix}") from error


@contextlib.contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Turns a remote library's errors into FileNotFoundError, PermissionError or RemoteError, without secrets."""
    try:
        yield
    except (UserError, RemoteError):
        raise
    except Exception as error:  # every library raises its own: botocore, aiohttp, Google
        cause: BaseException = error
        if isinstance(error, FileNotFoundError):
            # fsspec raises this for any failed web request; the cause holds the status.
            web = type(error.__cause__).__module__.startswith("aiohttp")
            if not web or getattr(error.__cause__, "status", 0) in (404, 410):
                raise FileNotFoundError("no such file") from error
            cause = error.__cause__ or error
        raise _redact_error(cause, url) from error


def _redact_error(error: BaseException, url: str) -> OSError:
    name = type(error).__name__
    text = redact_message(error) or name
    message = text if name in text or isinstance(error, OSError) else f"{name}: {text}"
    if name == "FileExpired":  # s3fs: the ETag changed
        return RemoteFileChanged(CHANGED)
    is_denied = isinstance(error, PermissionError) or getattr(error, "status", 0) in (401, 403)
    if is_denied or "Credential" in name:
        variables = environment_for(protocol_of(url))
        return PermissionError(f"{message}; access comes from the environment: {variables}")
    return RemoteError(message)


@dataclass(frozen=True)
class RemoteLocation:
    """A URL to list: its file system, its path there, and the prefix that turns such a path back into a URL."""

    url: str
    fs: Any
    path: str
    prefix: str

    @classmethod
    def of(cls, url: str, storage: Mapping[str, Any]) -> Self:
        fs, path = file_system(url, storage)
        fs.invalidate_cache()  # a cached listing may be outdated
        short = url.rstrip("/")
        # Keeps the host, which some file systems drop from their paths.
        prefix = short.removesuffix(path) if path and short.endswith(path) else f"{protocol_of(url)}://"
        return cls(url, fs, path, "" if path.startswith(("http://", "https://")) else prefix)

    def describe(self) -> RemoteEntry | None:
        """The file at this location, or None for a folder. FileNotFoundError where there is neither."""
        with translate_errors(self.url):
            return self._entry(self.path, self.fs.info(self.path))

    def _entry(self, path: str, info: Mapping[str, Any]) -> RemoteEntry | None:
        """The listed file; an unknown size counts as 0."""
        if info.get("type") == "directory":
            return None
        mtime_ns = next((_to_nanoseconds(info[key]) for key in _TIME_KEYS if info.get(key)), 0)
        return RemoteEntry(self.prefix + path, int(info.get("size") or 0), mtime_ns, version_of(info))

    def expand(self) -> dict[str, RemoteEntry | None]:
        """The matches of the location as a glob, by path; None stands for a folder."""
        with translate_errors(self.url):
            infos = self.fs.glob(self.path, detail=True)
        return {path: self._entry(path, infos[path]) for path in sorted(infos)}

    def walk(self, path: str) -> dict[str, RemoteEntry]:
        """Every file below a folder, by its path inside the folder."""
        root = path.rstrip("/") + "/"
        with translate_errors(self.url):
            infos = self.fs.find(path, detail=True)
        return {
            inner.removeprefix(root): entry
            for inner, info in infos.items()
            if not inner.endswith("/") and (entry := self._entry(inner, info))  # some stores have keys for folders
        }

    def names_in(self, path: str) -> list[str]:
        """The entries of a folder, for a message; empty where it cannot be listed."""
        try:
            with translate_errors(self.url):
                inside = self.fs.ls(path, detail=False)
            return sorted(inner.rstrip("/").rpartition("/")[2] for inner in inside)
        except OSError:
            return []

    def read_small(self, url: str) -> bytes:
        with translate_errors(url):
            data: bytes = self.fs.cat_file(url)
            return data

    def read_heads(self, urls: list[str], size_bytes: int) -> list[bytes]:
        """The first bytes of many files, in batched requests."""
        heads: list[bytes] = []
        for first in range(0, len(urls), _HEAD_FILES):
            batch = urls[first : first + _HEAD_FILES]
            with translate_errors(self.url):
                heads += self.fs.cat_ranges(batch, [0] * len(batch), [size_bytes] * len(batch), on_error="raise")
        return heads


def version_of(info: Mapping[str, Any]) -> str:
    """The value that identifies a file's content (an ETag, a generation), or an empty string."""
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")


def _to_nanoseconds(time: Any) -> int:
    if isinstance(time, (int, float)):
        return int(time * 1_000_000_000)
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            with contextlib.suppress(ValueError):
                time = email.utils.parsedate_to_datetime(time)
    if not isinstance(time, datetime):
        return 0
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return int(time.timestamp()) * 1_000_000_000 + time.microsecond * 1000


BLOCK_BYTES = 4 << 20
_BLOCKS_IN_MEMORY = 8  # Parquet alternates between its columns and its footer
_ATTEMPTS = 4
_PAUSE_S = 0.5  # before the first retry; doubles each time
_CHECKSUM_BYTES = 8


def open_remote(file: FileEntry, storage: Mapping[str, Any], cache: Path | None) -> IO[bytes]:
    """The file's bytes, seekable. Fetches lazily, and nothing that the cache holds."""
    folder = _cache_folder(file, cache)
    if is_web(file.path) and not _has_ranges(file, storage, folder):
        return _open_copy(file, storage, folder)
    return cast(IO[bytes], io.BufferedReader(RemoteFile(file, storage, folder), 256 << 10))


class RemoteFile(io.RawIOBase):
    """Reads by blocks and caches them in `folder`. Holds at most 32 MiB."""

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
        self._close_stream()
        self._blocks.clear()
        super().close()

    def _close_stream(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self._file.size_bytes - start)
        data = self._load_block(number, length)
        if data is None:
            data = self._fetch(start, length)
            self._save_block(number, data)
        self._blocks[number] = data
        if len(self._blocks) > _BLOCKS_IN_MEMORY:
            self._blocks.popitem(last=False)
        return data

    def _fetch(self, start: int, length: int) -> bytes:
        """Reads from the server; retries when the connection fails, since long jobs meet every kind of outage."""

        def request() -> bytes:
            with translate_errors(self._file.path):
                if self._opened is None:
                    self._opened = self._open()
                self._opened.seek(start)
                data: bytes = self._opened.read(length)
            if len(data) != length:
                raise RemoteError(f"{len(data)} of {length} bytes received at offset {start}")
            return data

        def should_retry(error: Exception) -> bool:
            if not isinstance(error, RemoteError) or isinstance(error, RemoteFileChanged):
                return False
            if isinstance(error.__cause__, ValueError):  # an answer of the server, so not a connection error
                return False
            self._close_stream()
            return True

        return retry(request, attempts=_ATTEMPTS, pause_s=_PAUSE_S, should_retry=should_retry)

    def _open(self) -> Any:
        fs, path = file_system(self._file.path, self._storage)
        size = {"size": self._file.size_bytes} if is_web(self._file.path) else {}
        opened = fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none", **size)
        details = getattr(opened, "details", None)
        version = version_of(details) if isinstance(details, Mapping) else ""
        if version and self._file.version and version != self._file.version:
            raise RemoteFileChanged(CHANGED)
        return opened

    def _load_block(self, number: int, length: int) -> bytes | None:
        """A block from the cache, unless it is missing or damaged."""
        try:
            if self._folder is None:
                return None
            path = self._folder / f"{number:08d}"
            data = path.read_bytes()
        except OSError:
            return None
        is_intact = len(data) == length + _CHECKSUM_BYTES and data[length:] == _checksum(path, data[:length])
        return data[:length] if is_intact else None

    def _save_block(self, number: int, data: bytes) -> None:
        if self._folder is None:
            return
        try:
            path = self._folder / f"{number:08d}"
            write_atomic(path, data + _checksum(path, data), parents=True, durable=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._folder = None  # the disk is full: continue without caching


def _checksum(path: Path, data: bytes) -> bytes:
    """Covers the block and its name, so that a block in the wrong place is not used."""
    return xxhash.xxh3_64_digest(data, seed=xxhash.xxh3_64_intdigest(f"{path.parent.name}/{path.name}".encode()))


def _cache_folder(file: FileEntry, cache: Path | None) -> Path | None:
    """The cache folder of a file's blocks: one per version, none for a file whose version is unknown."""
    if cache is None or not (file.version or file.mtime_ns):
        return None
    name = xxhash.xxh3_128_hexdigest(repr([BLOCK_BYTES, *file.identity]).encode())
    return cache / name[:2] / name


def _has_ranges(file: FileEntry, storage: Mapping[str, Any], folder: Path | None) -> bool:
    """Whether an HTTP server supports range requests. A cached file answers without a request."""
    if folder is not None and (folder / "whole").exists():
        return False
    if folder is not None and any(folder.glob("[0-9]*")):
        return True
    with contextlib.closing(RemoteFile(file, storage)) as probe:
        try:
            return bool(file.size_bytes and probe._fetch(file.size_bytes - 1, 1))
        except RemoteError as error:
            if isinstance(error.__cause__, ValueError):  # raised by fsspec where ranges are not supported
                return False
            raise


def _open_copy(file: FileEntry, storage: Mapping[str, Any], folder: Path | None) -> IO[bytes]:
    """A complete local copy: in the cache, or in a temporary file that is deleted on close."""
    if folder is not None and _is_complete(folder):
        return open(folder / "whole", "rb")
    fs, path = file_system(file.path, storage)
    if folder is None:
        target = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115 (the caller closes it)
        _download(fs, path, file, target)
        target.seek(0)
        return target
    with atomic_file(folder / "whole", parents=True, durable=False) as copy:
        _download(fs, path, file, copy)
    write_atomic(folder / "whole.sum", file_digest(str(folder / "whole")), durable=False)
    return open(folder / "whole", "rb")


def _is_complete(folder: Path) -> bool:
    try:
        return file_digest(str(folder / "whole")) == (folder / "whole.sum").read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _download(fs: Any, path: str, file: FileEntry, target: IO[bytes]) -> None:
    with translate_errors(file.path), fs.open(path, "rb", block_size=0) as stream:
        shutil.copyfileobj(stream, target, 1 << 20)
    if file.size_bytes and target.tell() != file.size_bytes:
        raise RemoteError(f"{target.tell()} bytes received instead of {file.size_bytes}")
