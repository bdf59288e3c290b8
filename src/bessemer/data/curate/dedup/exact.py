"""Text as a comparison sees it: words in lower case, without accents and punctuation, every number the same. Two
documents that differ only in this are the same document to the fuzzy steps. Folding goes character by character, so
that a word of the folded text can be found again in the text as it is (`word_spans`).

Documents that are the same, by their address or by their text, and when two of either count as the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.dedup.clusters import OneOfEach, Resolved, about, resolve_by_keys
from bessemer.data.curate.filters.lists import normal_escapes
from bessemer.data.curate.step import Arrays, Collected, Ints, PerDocumentStep
from bessemer.data.document import Document
from bessemer.spec.curate.dedup import DedupExactSpec, DedupParagraphsSpec, DedupUrlSpec

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_SEPARATOR, _WORD, _NOTHING, _ALONE = range(4)  # what a character is
# Scripts written without spaces. A character of theirs is a word of its own: otherwise a whole sentence would be one.
_SPACELESS = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip


def fold_bytes(text: str) -> bytes:
    """The text in UTF-8 with everything that is not ASCII folded; `LETTERS` does the rest. Costs a copy for ASCII, up
    to 70 ns a character otherwise."""
    raw = text.encode()
    beyond = len(raw) - len(text)
    if not beyond:
        return raw
    # Runs one by one cost 600 ns each and nothing between them; the whole text, 65 ns for every character.
    mostly_ascii = beyond < len(text) / 10
    if mostly_ascii:
        return _NOT_ASCII.sub(lambda run: run[0].translate(_FOLDED), text).encode()
    return text.translate(_FOLDED).encode()


class _Folded(dict[int, str]):
    """What each character becomes, found out when it is first met."""

    def __missing__(self, code: int) -> str:
        kind, letters = _fold(chr(code)) if code > 127 else (_WORD, chr(code))  # ASCII is left to LETTERS
        made = {_SEPARATOR: " ", _NOTHING: "", _WORD: letters, _ALONE: f" {letters} "}[kind]
        self[code] = made
        return made


_FOLDED = _Folded()


def _fold(character: str) -> tuple[int, str]:
    if "가" <= character <= "힣":
        return _WORD, character  # decomposing Korean would only make it longer
    parts = unicodedata.normalize("NFD", character.lower())
    letters = ""
    for part in parts:
        category = unicodedata.category(part)
        if category in ("Mn", "Me", "Cf"):
            continue  # accents, and marks without width such as a soft hyphen
        if category[0] not in "LNM":
            return _SEPARATOR, ""
        letters += "0" if category == "Nd" else part
    if not letters:
        return _NOTHING, ""
    spaceless = any(low <= ord(character) <= high for low, high in _SPACELESS)
    return (_ALONE if spaceless else _WORD), letters


def _letter(code: int) -> int:
    character = chr(code)
    if code >= 128 or character.isalpha():
        return ord(character.lower()) if code < 128 else code
    return ord("0") if character.isdigit() else 0


LETTERS = bytes(map(_letter, range(256)))  # of folded bytes: 0 between words, else what it counts as


@cache
def _kind(code: int) -> int:
    if code < 128:
        return _WORD if LETTERS[code] else _SEPARATOR
    return _fold(chr(code))[0]


def word_spans(text: str) -> tuple[Ints, Ints]:
    """Where each word of the folded text begins and ends in the text itself, in characters."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    different, which = np.unique(codes, return_inverse=True)
    kinds = np.array([_kind(code) for code in different.tolist()], np.uint8)[which]
    seen = np.flatnonzero(kinds != _NOTHING)  # what folds to nothing does not end a word
    kinds = kinds[seen]
    before = np.concatenate([[_SEPARATOR], kinds[:-1]])
    after = np.concatenate([kinds[1:], [_SEPARATOR]])
    starts = seen[(kinds == _ALONE) | ((kinds == _WORD) & (before != _WORD))]
    ends = seen[(kinds == _ALONE) | ((kinds == _WORD) & (after != _WORD))] + 1
    return starts.astype(np.int64), ends.astype(np.int64)


_DEFAULT_PORT = {"http": 80, "https": 443, "ftp": 21}


class _ByHash(OneOfEach):
    def _hashed(self, documents: Sequence[Document], ordinals: Ints, texts: Sequence[str]) -> Arrays:
        key, check = hash_128(texts)
        return {**about(documents, ordinals, self.spec.keep), "key": key, "check": check}

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: PerDocumentStep) -> Resolved:
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
