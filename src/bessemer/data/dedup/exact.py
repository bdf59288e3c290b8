"""Documents that are the same, by their address or by their text, and when two of either count as the same."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.clean.lists import normal_escapes
from bessemer.data.dedup.clusters import OneOfEach, Resolved
from bessemer.data.dedup.links import about, resolve_by_keys
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Each, Ints
from bessemer.spec.clean.dedup import DedupExactSpec, DedupParagraphsSpec, DedupUrlSpec

_DEFAULT_PORT = {"http": 80, "https": 443, "ftp": 21}


class _ByHash(OneOfEach):
    def _hashed(self, documents: Sequence[Document], ordinals: Ints, texts: Sequence[str]) -> Arrays:
        key, check = hash_128(texts)
        return {**about(documents, ordinals, self.spec.keep), "key": key, "check": check}

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: Each) -> Resolved:
        return resolve_by_keys(collected, scratch, each, 1, self.spec.keep, checked=True)


class DedupUrl(_ByHash):
    """One document for each address stays. Those without a URL take no part."""

    def __init__(self, spec: DedupUrlSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        there = [i for i, document in enumerate(documents) if document.url.strip()]
        having = [documents[i] for i in there]
        urls = [normal_url(one.url, self.spec.tracking, self.spec.ignore_query) for one in having]
        return self._hashed(having, ordinals[there], urls)


class DedupExact(_ByHash):
    """One document for each text stays, up to the differences that are ignored."""

    def __init__(self, spec: DedupExactSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        return self._hashed(documents, ordinals, [simplify(one.text, self.spec) for one in documents])


def simplify(text: str, spec: DedupExactSpec | DedupParagraphsSpec) -> str:
    """The text without the differences that are to be ignored."""
    if spec.ignore_case:
        text = text.casefold()
    if spec.ignore_punctuation:
        text = text.translate(_PUNCTUATION)
    return " ".join(text.split()) if spec.ignore_whitespace else text


class _Punctuation(dict[int, str]):
    """Punctuation and symbols become nothing; found out when a character is first met."""

    def __missing__(self, code: int) -> str:
        made = "" if unicodedata.category(chr(code))[0] in "PS" else chr(code)
        self[code] = made
        return made


_PUNCTUATION = _Punctuation()


def hash_128(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Two 64-bit halves for each text. With 10^12 texts, 128 bits collide with probability 10^-15; 64 bits would
    thousands of times, and a length beside them would not help much, as lengths repeat so often."""
    raw = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    halves = np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


def normal_url(url: str, tracking: Sequence[str] = (), ignore_query: bool = False) -> str:
    """Without http or https, default port, fragment, tracking parameters and closing slash; the host in lower case,
    escapes spelled one way. What cannot be read as a URL stays as it is."""
    url = url.strip()
    if url.startswith("//"):
        url = "http:" + url
    elif "://" not in url:
        url = "http://" + url
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # such as a port that is no number
        return url
    scheme = parts.scheme.lower()
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    place = f"[{host}]" if ":" in host else host
    shown_port = "" if port is None or port == _DEFAULT_PORT.get(scheme) else f":{port}"
    query = "" if ignore_query else _without(parts.query, tracking)
    page = normal_escapes(parts.path).rstrip("/")
    prefix = "" if scheme in ("http", "https") else f"{scheme}:"
    return f"{prefix}//{user}{place}{shown_port}{page}" + (f"?{query}" if query else "")


def _without(query: str, tracking: Sequence[str]) -> str:
    kept = []
    for pair in query.split("&"):
        name = pair.partition("=")[0].lower()
        known = any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in tracking)
        if pair and not known:
            kept.append(normal_escapes(pair))
    return "&".join(kept)
