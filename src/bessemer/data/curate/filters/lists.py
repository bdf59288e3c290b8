"""Lists that steps are told to use: files with a word, domain, address, id or hash a line. A domain stands for its
subdomains too, an address for everything below it. Both are looked up by hash, at some 20 microseconds a document, in
lists of millions of lines. A file is read once in a process, however many parts of a corpus it works on."""

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

from bessemer.data.curate.scores.model_file import file_identity
from bessemer.errors import UserError

_GZIP = b"\x1f\x8b"


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
            raise UserError(f"{key}: {path} cannot be read ({error.strerror}); give another file") from None
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
    return file_identity(file.path)


class NameList:
    """A set of strings at 8 bytes each: their 64-bit hashes, sorted. Of 10^12 lookups in a set of five million, less
    than one finds what is not there."""

    def __init__(self, hashes: array[int]) -> None:
        self._hashes: npt.NDArray[np.uint64] = np.unique(np.frombuffer(hashes, dtype=np.uint64))

    @classmethod
    def of(cls, names: Iterable[str]) -> NameList:
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


_URL = re.compile(
    r"\s*(?:[A-Za-z][A-Za-z0-9+.-]*://|//)?(?:[^/?#@\s]*@)?(\[[0-9A-Fa-f:.]+\]|[^/?#:\s]+)(?::[0-9]+)?([/?#].*)?\Z",
    re.DOTALL,
)
_BREAK = re.compile("[/?&;#]")
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_MOST_LEVELS = 64  # of a path; a longer one is matched by its first levels
_UT1 = ("domains", "urls", "expressions")  # the files of a category in the UT1 collection


class UrlAddress(NamedTuple):
    """`host` is in small letters and ASCII; `path` begins with a slash and has the query."""

    host: str
    path: str


def split_url(url: str) -> UrlAddress | None:
    """The host and path of an address, with or without its scheme; None where there is no host."""
    match = _URL.match(url)
    if not match or not (host := ascii_host(match[1])):
        return None
    path = (match[2] or "/").partition("#")[0]
    return UrlAddress(host, path if path.startswith("/") else "/" + path)


def normal_escapes(text: str) -> str:
    """Escapes spelled one way: %7e is ~, %c3 is %C3."""

    def spelled(match: re.Match[str]) -> str:
        sign = chr(int(match[1], 16))
        return sign if sign in _UNRESERVED else match[0].upper()

    return _ESCAPE.sub(spelled, text)


def ascii_host(host: str) -> str:
    """A host as lists write it: small letters, no dot at the end, other scripts in punycode."""
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
    """example.com, example.com/a, example.com/a/b?c=d: the address and what it lies below, as keys of a list."""
    host = address.host.removeprefix("www.")
    path = address.path.rstrip("/")
    cuts = [match.start() for match in _BREAK.finditer(path)][:_MOST_LEVELS]
    return [host + path[:cut].rstrip("/") for cut in cuts] + [host + path]


class UrlLists:
    """Domains, addresses and patterns from settings and files."""

    def __init__(self, domains: Sequence[str], urls: Sequence[str], paths: Sequence[str], key: str) -> None:
        read = _read(_files(paths, f"{key}.lists"))
        self.content = "".join(read.contents)
        self._domains = (read.domains, NameList.of(_domain(domain, f"{key}.domains") for domain in domains))
        self._urls = (read.urls, NameList.of(_address(url, f"{key}.urls") for url in urls))
        self.patterns = read.patterns

    def name(self, addresses: Sequence[UrlAddress | None]) -> list[tuple[str, str] | None]:
        """For each address, ("domain" or "address", the entry that names it), or None."""
        hosts = [host_and_above(address.host) if address else [] for address in addresses]
        levels = [address_and_above(address) if address else [] for address in addresses]
        found = _first_held(hosts, self._domains, "domain")
        below = _first_held(levels, self._urls, "address")
        return [one or other for one, other in zip(found, below, strict=True)]


def _first_held(keys: list[list[str]], sets: tuple[NameList, ...], what: str) -> list[tuple[str, str] | None]:
    """The first key of each address that a set holds; one lookup for all addresses."""
    flat = [key for some in keys for key in some]
    held = [any(one) for one in zip(*(names.holds(flat) for names in sets), strict=True)]
    found: list[tuple[str, str] | None] = []
    at = 0
    for some in keys:
        hits = (key for key, hit in zip(some, held[at : at + len(some)], strict=True) if hit)
        first = next(hits, None)
        found.append((what, first) if first else None)
        at += len(some)
    return found


class _Read(NamedTuple):
    domains: NameList
    urls: NameList
    patterns: tuple[re.Pattern[str], ...]
    contents: tuple[str, ...]


def _files(paths: Sequence[str], key: str) -> tuple[tuple[str, ListFile], ...]:
    """Every file with what its lines are: mixed, or by its name in a folder of the UT1 collection."""
    files: list[tuple[str, ListFile]] = []
    for path in paths:
        full = os.path.expanduser(path)
        if not os.path.isdir(full):
            files.append(("mixed", ListFile.of(path, key)))
            continue
        tree = sorted(os.walk(full))
        walked = [(folder, name) for folder, _, names in tree for name in _UT1 if name in names]
        if not walked:
            what = f"{key}: {path} holds no file named domains, urls or expressions"
            raise UserError(f"{what}; give a file or such a folder")
        files += [(name, ListFile.of(os.path.join(folder, name), key)) for folder, name in walked]
    return tuple(files)


@lru_cache(maxsize=8)
def _read(files: tuple[tuple[str, ListFile], ...]) -> _Read:
    domains, urls = array("Q"), array("Q")
    patterns = []
    for kind, file in files:
        if kind == "expressions":
            patterns += [_pattern(file, row, line) for row, line in file.lines()]
            continue
        for what, entry in _entries(kind, file):
            (domains if what == "domain" else urls).append(name_hash(entry))
    return _Read(NameList(domains), NameList(urls), tuple(patterns), tuple(file.content() for _, file in files))


def _pattern(file: ListFile, row: int, line: str) -> re.Pattern[str]:
    try:
        return re.compile(line, re.I)
    except re.error as error:
        what = f"{file.path}:{row}: no regular expression ({error})"
        raise UserError(f"{what}; correct or remove the line") from None


def _entries(kind: str, file: ListFile) -> Iterator[tuple[str, str]]:
    """("domain" or "address", entry) of a file; of `mixed` ones, what each line looks like."""
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


def _domain(written: str, place: str) -> str:
    host = ascii_host(written.strip().removeprefix("*."))
    if not host or "/" in host or any(sign.isspace() for sign in host):
        raise UserError(f"{place}: {written!r} is no domain; write one such as example.com")
    return host


def _address(written: str, place: str) -> str:
    address = split_url(written)
    if address is None:
        raise UserError(f"{place}: {written!r} is no address; write one such as example.com/path")
    return address_and_above(address)[-1]
