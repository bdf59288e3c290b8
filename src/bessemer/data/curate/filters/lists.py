"""Lists that steps use: files with one word, domain, URL, id or hash per line. A domain includes its subdomains, a URL
everything below it. Both are looked up by hash, at about 20 microseconds per document in lists of millions of lines. A
file is read once per process."""

from __future__ import annotations

import gzip
import ipaddress
import os
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.step import file_identity
from bessemer.errors import UserError

_GZIP = b"\x1f\x8b"


class ListFile(NamedTuple):
    """A file with its size and time. Changed content is another ListFile, so derived data can be cached by it."""

    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, key: str) -> ListFile:
        """`key` is the setting that names the file, for messages."""
        full = os.path.expanduser(path)
        try:
            stat = os.stat(full)
        except OSError as error:
            raise UserError(f"{key}: {path} cannot be read ({error.strerror}); give another file") from None
        if not os.path.isfile(full):
            raise UserError(f"{key}: {path} is no file; give a file with one entry a line")
        return cls(full, stat.st_size, stat.st_mtime_ns)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Row and line, without empty lines and # comments. A .gz file is decompressed."""
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
        """A hash of the file's bytes, for cache keys."""
        return _content(self)


@lru_cache(maxsize=256)
def _content(file: ListFile) -> str:
    return file_identity(file.path)


class NameList:
    """A set of strings as sorted 64-bit hashes, 8 bytes each. In a set of five million, fewer than one of 10^12 lookups
    gives a false match."""

    def __init__(self, hashes: array[int]) -> None:
        self._hashes: npt.NDArray[np.uint64] = np.unique(np.frombuffer(hashes, dtype=np.uint64))

    @classmethod
    def of(cls, names: Iterable[str]) -> NameList:
        return cls(array("Q", map(name_hash, names)))

    def __len__(self) -> int:
        return len(self._hashes)

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Which of the names are in the set. One call for many names costs less than many calls."""
        if not len(self._hashes) or not names:
            return [False] * len(names)
        hashes = np.fromiter(map(name_hash, names), dtype=np.uint64, count=len(names))
        places = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        is_member: list[bool] = (self._hashes[places] == hashes).tolist()
        return is_member


def name_hash(name: str) -> int:
    return int(xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")))


_URL = re.compile(
    r"\s*(?:[A-Za-z][A-Za-z0-9+.-]*://|//)?(?:[^/?#@\s]*@)?(\[[0-9A-Fa-f:.]+\]|[^/?#:\s]+)(?::[0-9]+)?([/?#].*)?\Z",
    re.DOTALL,
)
_BREAK = re.compile("[/?&;#]")
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_MAX_LEVELS = 64  # of a path; deeper ones are matched by their first levels
_UT1_FILES = ("domains", "urls", "expressions")  # the files of a category in the UT1 collection


class UrlAddress(NamedTuple):
    """`host` is in lower-case ASCII; `path` begins with a slash and includes the query."""

    host: str
    path: str


def split_url(url: str) -> UrlAddress | None:
    """The host and path of a URL, with or without its scheme; None where there is no host."""
    match = _URL.match(url)
    if not match or not (host := ascii_host(match[1])):
        return None
    path = (match[2] or "/").partition("#")[0]
    return UrlAddress(host, path if path.startswith("/") else "/" + path)


def normal_escapes(text: str) -> str:
    """Escapes in one form: %7e becomes ~, %c3 becomes %C3."""

    def spelled(match: re.Match[str]) -> str:
        sign = chr(int(match[1], 16))
        return sign if sign in _UNRESERVED else match[0].upper()

    return _ESCAPE.sub(spelled, text)


def ascii_host(host: str) -> str:
    """A host as lists write it: lower case, no trailing dot, other scripts in punycode."""
    host = host.lower().strip(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return host


def host_and_above(host: str) -> list[str]:
    """a.example.com, example.com, com."""
    labels = host.split(".")
    return [".".join(labels[first:]) for first in range(len(labels))]


def address_and_above(address: UrlAddress) -> list[str]:
    """example.com, example.com/a, example.com/a/b?c=d: the URL and everything it lies below, as keys of a list."""
    host = address.host.removeprefix("www.")
    path = address.path.rstrip("/")
    cuts = [match.start() for match in _BREAK.finditer(path)][:_MAX_LEVELS]
    return [host + path[:cut].rstrip("/") for cut in cuts] + [host + path]


class UrlLists:
    """Domains, URLs and patterns from settings and files."""

    def __init__(self, domains: Sequence[str], urls: Sequence[str], paths: Sequence[str], key: str) -> None:
        read = _read_lists(_files(paths, f"{key}.lists"))
        self.content = "".join(read.contents)
        self._domains = (read.domains, NameList.of(_domain(domain, f"{key}.domains") for domain in domains))
        self._urls = (read.urls, NameList.of(_address(url, f"{key}.urls") for url in urls))
        self.patterns = read.patterns

    def match(self, addresses: Sequence[UrlAddress | None]) -> list[tuple[str, str] | None]:
        """For each address, ("domain" or "address", the matching entry), or None."""
        hosts = [host_and_above(address.host) if address else [] for address in addresses]
        levels = [address_and_above(address) if address else [] for address in addresses]
        by_domain = _first_match(hosts, self._domains, "domain")
        by_address = _first_match(levels, self._urls, "address")
        return [domain or address for domain, address in zip(by_domain, by_address, strict=True)]


def _first_match(keys: list[list[str]], sets: tuple[NameList, ...], kind: str) -> list[tuple[str, str] | None]:
    """The first key of each address that a set contains; one lookup for all addresses."""
    flat = [key for address_keys in keys for key in address_keys]
    is_member = [any(memberships) for memberships in zip(*(names.contains(flat) for names in sets), strict=True)]
    matches: list[tuple[str, str] | None] = []
    at = 0
    for address_keys in keys:
        hits = (key for key, hit in zip(address_keys, is_member[at : at + len(address_keys)], strict=True) if hit)
        first = next(hits, None)
        matches.append((kind, first) if first else None)
        at += len(address_keys)
    return matches


class _ParsedLists(NamedTuple):
    domains: NameList
    urls: NameList
    patterns: tuple[re.Pattern[str], ...]
    contents: tuple[str, ...]


def _files(paths: Sequence[str], key: str) -> tuple[tuple[str, ListFile], ...]:
    """Every file with the kind of its lines: mixed, or by its name in a folder of the UT1 collection."""
    files: list[tuple[str, ListFile]] = []
    for path in paths:
        full = os.path.expanduser(path)
        if not os.path.isdir(full):
            files.append(("mixed", ListFile.of(path, key)))
            continue
        tree = sorted(os.walk(full))
        walked = [(folder, name) for folder, _, names in tree for name in _UT1_FILES if name in names]
        if not walked:
            problem = f"{key}: {path} holds no file named domains, urls or expressions"
            raise UserError(f"{problem}; give a file or such a folder")
        files += [(name, ListFile.of(os.path.join(folder, name), key)) for folder, name in walked]
    return tuple(files)


@lru_cache(maxsize=8)
def _read_lists(files: tuple[tuple[str, ListFile], ...]) -> _ParsedLists:
    domains, urls = array("Q"), array("Q")
    patterns = []
    for kind, file in files:
        if kind == "expressions":
            patterns += [_pattern(file, row, line) for row, line in file.lines()]
            continue
        for entry_kind, entry in _entries(kind, file):
            (domains if entry_kind == "domain" else urls).append(name_hash(entry))
    return _ParsedLists(NameList(domains), NameList(urls), tuple(patterns), tuple(file.content() for _, file in files))


def _pattern(file: ListFile, row: int, line: str) -> re.Pattern[str]:
    try:
        return re.compile(line, re.I)
    except re.error as error:
        raise UserError(f"{file.path}:{row}: no regular expression ({error}); correct or remove the line") from None


def _entries(kind: str, file: ListFile) -> Iterator[tuple[str, str]]:
    """("domain" or "address", entry) of each line of a file; in `mixed` files the line's form decides."""
    for row, line in file.lines():
        words = line.partition(" #")[0].split()
        place = f"{file.path}:{row}"
        if len(words) > 1 and _is_ip(words[0]):  # the hosts format: 0.0.0.0 name name
            for word in words[1:]:
                if "." in word and not _is_ip(word):
                    yield "domain", _domain(word, place)
        elif len(words) > 1:
            raise UserError(f"{place}: {line[:60]!r} is neither a domain nor an address; write one a line")
        elif words and (kind == "urls" or (kind == "mixed" and "/" in words[0])):
            yield "address", _address(words[0], place)
        elif words:
            yield "domain", _domain(words[0], place)


def _is_ip(word: str) -> bool:
    try:
        ipaddress.ip_address(word)
    except ValueError:
        return False
    return True


def _domain(text: str, place: str) -> str:
    host = ascii_host(text.strip().removeprefix("*."))
    if not host or "/" in host or any(sign.isspace() for sign in host):
        raise UserError(f"{place}: {text!r} is no domain; write one such as example.com")
    return host


def _address(text: str, place: str) -> str:
    address = split_url(text)
    if address is None:
        raise UserError(f"{place}: {text!r} is no address; write one such as example.com/path")
    return address_and_above(address)[-1]
