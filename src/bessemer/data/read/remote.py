"""Files behind a URL, through fsspec: which there are, what tells their versions apart, and how one is opened.
Whatever a file system's library raises comes out as an OSError whose text holds no credentials."""

from __future__ import annotations

import contextlib
import email.utils
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import urlsplit

from bessemer.data.read.secrets import environment_for, redacted, shown
from bessemer.errors import UserError

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


class Changed(RemoteError):
    """The file is another one than was listed: what was derived from the listing no longer holds."""


@dataclass(frozen=True, slots=True)
class Found:
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
        return Changed(CHANGED)
    refused = isinstance(error, PermissionError) or getattr(error, "status", 0) in (401, 403)
    if refused or "Credential" in name:
        where = environment_for(protocol_of(url))
        return PermissionError(f"{about}; access comes from the environment: {where}")
    return RemoteError(about)


@dataclass(frozen=True)
class Place:
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

    def describe(self) -> Found | None:
        """The file at this place, or None where it is a folder. FileNotFoundError where there is neither."""
        with told(self.url):
            return self._entry(self.path, self.fs.info(self.path))

    def _entry(self, path: str, info: Mapping[str, Any]) -> Found | None:
        """The file that a listing tells of; a size that is not told counts as 0."""
        if info.get("type") == "directory":
            return None
        mtime_ns = next((_nanoseconds(info[key]) for key in _TIME_KEYS if info.get(key)), 0)
        return Found(self.prefix + path, int(info.get("size") or 0), mtime_ns, version_of(info))

    def expand(self) -> dict[str, Found | None]:
        """What the place matches as a glob, by path; None stands for a folder."""
        with told(self.url):
            infos = self.fs.glob(self.path, detail=True)
        return {path: self._entry(path, infos[path]) for path in sorted(infos)}

    def walk(self, path: str) -> dict[str, Found]:
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
