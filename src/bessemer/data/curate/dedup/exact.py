"""Exact duplicates: documents with the same URL or text, and paragraphs (or lines) that occur before in the corpus.

Also folds text for the fuzzy steps: lower case, no accents or punctuation, all numbers equal. Folding works character
by character, so that a folded word can be located in the original text (`word_spans`).

Pieces (paragraphs, or anchors of `dedup_substrings`) are compared by hash. A piece's position is its index among all
pieces of the corpus. Pieces are scattered by part, grouped by hash, and the positions of repeats return to their part.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.dedup import shuffle
from bessemer.data.curate.dedup.clusters import (
    ClusterDedupStep,
    DecisionsByPart,
    Resolved,
    describe_documents,
    find_ranges,
    keep_or_drop,
    resolve_by_keys,
)
from bessemer.data.curate.dedup.shuffle import BucketTask, PartTask, Places, Records, note_places, position
from bessemer.data.curate.filters.lists import normal_escapes
from bessemer.data.curate.step import Arrays, Collected, Ints, Outcome, RunTasks
from bessemer.data.read.entry import Document
from bessemer.spec.curate.dedup import DedupExactSpec, DedupParagraphsSpec, DedupUrlSpec

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_SEPARATOR, _WORD, _NOTHING, _ALONE = range(4)  # kinds of characters
# Scripts without spaces: each character is a word, since otherwise a whole sentence would be one.
_SPACELESS = (
    (0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip


def fold_bytes(text: str) -> bytes:
    """The text in UTF-8 with everything outside ASCII folded; `LETTERS` does the rest. Costs a copy for ASCII, up to 70
    ns per character otherwise."""
    raw = text.encode()
    beyond = len(raw) - len(text)
    if not beyond:
        return raw
    # Folding run by run costs 600 ns per run; folding everything costs 65 ns per character.
    mostly_ascii = beyond < len(text) / 10
    if mostly_ascii:
        return _NOT_ASCII.sub(lambda run: run[0].translate(_FOLDED), text).encode()
    return text.translate(_FOLDED).encode()


class _Folded(dict[int, str]):
    """The folded form of each character, computed on first use."""

    def __missing__(self, code: int) -> str:
        kind, letters = _fold_character(chr(code)) if code > 127 else (_WORD, chr(code))  # LETTERS folds ASCII
        folded = {_SEPARATOR: " ", _NOTHING: "", _WORD: letters, _ALONE: f" {letters} "}[kind]
        self[code] = folded
        return folded


_FOLDED = _Folded()


def _fold_character(character: str) -> tuple[int, str]:
    if "가" <= character <= "힣":
        return _WORD, character  # decomposing Korean only makes it longer
    parts = unicodedata.normalize("NFD", character.lower())
    letters = ""
    for part in parts:
        category = unicodedata.category(part)
        if category in ("Mn", "Me", "Cf"):
            continue  # accents and zero-width marks such as soft hyphens
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


LETTERS = bytes(map(_letter, range(256)))  # by folded byte: 0 between words, else the folded letter


@cache
def _character_kind(code: int) -> int:
    if code < 128:
        return _WORD if LETTERS[code] else _SEPARATOR
    return _fold_character(chr(code))[0]


def word_spans(text: str) -> tuple[Ints, Ints]:
    """The start and end of each folded word in the original text, in characters."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    different, which = np.unique(codes, return_inverse=True)
    kinds = np.array([_character_kind(code) for code in different.tolist()], np.uint8)[which]
    seen = np.flatnonzero(kinds != _NOTHING)  # characters that fold to nothing do not end a word
    kinds = kinds[seen]
    before = np.concatenate([[_SEPARATOR], kinds[:-1]])
    after = np.concatenate([kinds[1:], [_SEPARATOR]])
    starts = seen[(kinds == _ALONE) | ((kinds == _WORD) & (before != _WORD))]
    ends = seen[(kinds == _ALONE) | ((kinds == _WORD) & (after != _WORD))] + 1
    return starts.astype(np.int64), ends.astype(np.int64)


_DEFAULT_PORT = {"http": 80, "https": 443, "ftp": 21}


class _HashDedupStep(ClusterDedupStep):
    def _hashed(self, documents: Sequence[Document], ordinals: Ints, texts: Sequence[str]) -> Arrays:
        key, check = hash_128(texts)
        return {**describe_documents(documents, ordinals, self.spec.keep), "key": key, "check": check}

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        return resolve_by_keys(collected, scratch, run_tasks, 1, self.spec.keep, checked=True)


class DedupUrl(_HashDedupStep):
    """Keeps one document per URL. Documents without a URL do not take part."""

    def __init__(self, spec: DedupUrlSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        with_url = [i for i, document in enumerate(documents) if document.url.strip()]
        documents_with_url = [documents[i] for i in with_url]
        urls = [normal_url(document.url, self.spec.tracking, self.spec.ignore_query) for document in documents_with_url]
        return self._hashed(documents_with_url, ordinals[with_url], urls)


class DedupExact(_HashDedupStep):
    """Keeps one document per text, up to the ignored differences."""

    def __init__(self, spec: DedupExactSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        return self._hashed(documents, ordinals, [simplify(document.text, self.spec) for document in documents])


def simplify(text: str, spec: DedupExactSpec | DedupParagraphsSpec) -> str:
    """The text without the differences to ignore."""
    if spec.ignore_case:
        text = text.casefold()
    if spec.ignore_punctuation:
        text = text.translate(_PUNCTUATION)
    return " ".join(text.split()) if spec.ignore_whitespace else text


class _Punctuation(dict[int, str]):
    """Maps punctuation and symbols to nothing; computed on first use."""

    def __missing__(self, code: int) -> str:
        replacement = "" if unicodedata.category(chr(code))[0] in "PS" else chr(code)
        self[code] = replacement
        return replacement


_PUNCTUATION = _Punctuation()


def hash_128(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Two 64-bit halves per text. With 10^12 texts, 128 bits collide with probability 10^-15; 64 bits would collide
    thousands of times, even with the length added."""
    raw = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    halves = np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


def normal_url(url: str, tracking: Sequence[str] = (), ignore_query: bool = False) -> str:
    """The URL without http or https, default port, fragment, tracking parameters and trailing slash; host in lower
    case, escapes in one form. An unparsable URL is returned as it is."""
    url = url.strip()
    if url.startswith("//"):
        url = "http:" + url
    elif "://" not in url:
        url = "http://" + url
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # such as an invalid port
        return url
    scheme = parts.scheme.lower()
    user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    place = f"[{host}]" if ":" in host else host
    shown_port = "" if port is None or port == _DEFAULT_PORT.get(scheme) else f":{port}"
    query = "" if ignore_query else _drop_tracking(parts.query, tracking)
    page = normal_escapes(parts.path).rstrip("/")
    prefix = "" if scheme in ("http", "https") else f"{scheme}:"
    return f"{prefix}//{user}{place}{shown_port}{page}" + (f"?{query}" if query else "")


def _drop_tracking(query: str, tracking: Sequence[str]) -> str:
    prefixes = tuple(name[:-1] for name in tracking if name.endswith("*"))
    pairs = []
    for pair in filter(None, query.split("&")):
        name = pair.partition("=")[0].lower()
        if name not in tracking and not name.startswith(prefixes):
            pairs.append(normal_escapes(pair))
    return "&".join(pairs)


Words = npt.NDArray[np.uint64]
_POSITION = np.dtype([("key", "<u8")])
_MAX_EXAMPLES = 10


@dataclass(frozen=True)
class PieceIndex:
    """Where pieces are grouped. A piece with `least` occurrences is a repeat; `first_too` also returns the first
    occurrence; `checked` pieces have 64 bits besides the key."""

    folder: Path
    parts: int
    records: int
    least: int
    first_too: bool
    checked: bool

    @property
    def repeats(self) -> Path:
        return self.folder / "repeats"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype([("key", "<u8"), *([("check", "<u8")] if self.checked else []), ("position", "<i8")])

    @property
    def buckets(self) -> int:
        return shuffle.bucket_count(self.records, self.dtype)


@dataclass(frozen=True)
class RepeatedPieces:
    """The result of one bucket: the number of positions, and the most frequent pieces as (count, first position)."""

    positions: int
    most: list[tuple[int, int]]


def write_pieces(pieces: PieceIndex, part: int, keys: Words, checks: Words | None) -> int:
    """Writes one part's pieces, in order, and returns their number."""
    records = np.empty(keys.size, pieces.dtype)
    records["key"] = keys
    if checks is not None:
        records["check"] = checks
    records["position"] = np.arange(keys.size) + position(part)
    shuffle.write_run(pieces.folder, part, records, shuffle.hash_bounds(pieces.buckets))
    return int(keys.size)


def find_repeats(task: BucketTask[PieceIndex]) -> RepeatedPieces:
    """Scans a bucket twice: to count, then to write the repeats. Holds a piece of the bucket and one record per
    distinct key."""
    pieces = task.shared
    heads = np.empty(0, np.dtype([*pieces.dtype.descr, ("count", "<i8")]))
    for records in shuffle.read_bucket(pieces.folder, pieces.parts, task.bucket, pieces.dtype):
        heads, _, _ = _merge_groups(heads, records, 1)
    heads = heads[heads["count"] >= pieces.least]
    positions_found = [np.empty(0, np.int64)]
    for records in shuffle.read_bucket(pieces.folder, pieces.parts, task.bucket, pieces.dtype):
        merged, ordered, group = _merge_groups(heads, records, 0)
        often = merged["count"][group] >= pieces.least
        later = ordered["position"] != merged["position"][group]
        positions_found.append(ordered["position"][often & later])
    if pieces.first_too:
        positions_found.append(heads["position"])
    positions = np.concatenate(positions_found)
    run = np.empty(positions.size, _POSITION)
    run["key"] = positions
    shuffle.write_run(pieces.repeats, task.bucket, run, shuffle.part_bounds(pieces.parts))
    top = np.lexsort((heads["position"], -heads["count"]))[:_MAX_EXAMPLES]
    most = [(int(heads["count"][i]), int(heads["position"][i])) for i in top]
    return RepeatedPieces(positions.size, most)


def read_repeats(pieces: PieceIndex, part: int) -> Ints:
    """The repeats among one part's pieces, by their number in the part, in order."""
    pieces_read = [np.empty(0, _POSITION), *shuffle.read_bucket(pieces.repeats, pieces.buckets, part, _POSITION)]
    return np.sort(np.concatenate(pieces_read)["key"].astype(np.int64) - position(part))


def most_frequent_pieces(buckets: Sequence[RepeatedPieces]) -> Iterator[tuple[int, int, int]]:
    """(occurrences, part and number of the first) of the most frequent pieces of the corpus."""
    candidates = [piece for bucket in buckets for piece in bucket.most]
    for count, first in sorted(candidates, key=lambda piece: (-piece[0], piece[1]))[:_MAX_EXAMPLES]:
        yield count, first // position(1), first % position(1)


def _merge_groups(heads: Records, records: Records, weight: int) -> tuple[Records, Records, Ints]:
    """One head per key of `heads` and `records`, with its first position and summed count; then all records in key
    order, and the group of each. A head that is also among the records counts once for each."""
    merged = np.zeros(heads.size + records.size, heads.dtype)
    merged[: heads.size] = heads
    names = [name for name in heads.dtype.names or () if name != "count"]
    for name in names:
        merged[name][heads.size :] = records[name]
    merged["count"][heads.size :] = weight
    keyed = [name for name in names if name != "position"]
    keys = [merged[name] for name in keyed]
    order = np.lexsort(keys[::-1]) if len(keys) > 1 else np.argsort(keys[0])
    merged = merged[order]
    new = shuffle.begins(*(merged[name] for name in keyed))
    starts = np.flatnonzero(new)
    groups = merged[starts]
    if starts.size:
        groups["position"] = np.minimum.reduceat(merged["position"], starts)
        groups["count"] = np.add.reduceat(merged["count"], starts)
    return groups, merged, np.cumsum(new) - 1


_GAP, _NEWLINE = re.compile(r"\n\s*\n"), re.compile("\n")
_ARRAYS = ("ordinal", "count", "index")


def split(text: str, unit: str) -> list[tuple[int, int, int]]:
    """(start, end, start of the next) of each paragraph or line. Linear in the text."""
    gaps = [gap.span() for gap in (_GAP if unit == "paragraph" else _NEWLINE).finditer(text)]
    starts = [0, *(end for _, end in gaps)]
    ends = [*(start for start, _ in gaps), len(text)]
    return list(zip(starts, ends, [*starts[1:], len(text)], strict=True))


class DedupParagraphs:
    """Cuts repeated paragraphs (menus, notices, licences) from documents and keeps the first occurrence in the corpus.
    Drops a document where too little is left."""

    version = 1

    def __init__(self, spec: DedupParagraphsSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        spec = self.spec
        texts: list[str] = []
        index: list[int] = []
        counts = np.zeros(len(documents), np.int64)
        for i, document in enumerate(documents):
            for number, (start, end, _) in enumerate(split(document.text, spec.unit)):
                text = document.text[start:end].strip()
                if len(text) >= spec.min_chars:
                    texts.append(simplify(text, spec))
                    index.append(number)
                    counts[i] += 1
        key, check = hash_128(texts)
        return {
            **note_places(documents, ordinals),
            "ordinal": ordinals,
            "count": counts,
            "key": key,
            "check": check,
            "index": np.array(index, np.int32),
        }

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        numbers = shuffle.numbering(collected)
        records, least = shuffle.count_records(collected, "key"), self.spec.min_count
        folder = scratch / "pieces"
        pieces = PieceIndex(folder, len(collected), records, least, first_too=False, checked=True)
        pieces.repeats.mkdir(parents=True)
        total = sum(run_tasks(scatter_pieces, shuffle.for_parts("paragraphs", pieces, collected)))
        buckets = run_tasks(find_repeats, shuffle.for_buckets("repeats", pieces, pieces.buckets))
        places = Places.of(collected, scratch)
        examples = []
        for count, part, piece in most_frequent_pieces(buckets):
            ordinal, index = _locate_pieces(shuffle.load(collected[part], _ARRAYS), np.array([piece]))
            place = places.place(int(numbers[part] + ordinal[0]))
            examples.append({"count": count, "first": place, self.spec.unit: int(index[0]) + 1})
        repeats = sum(bucket.positions for bucket in buckets)
        summary = {f"{self.spec.unit}s": total, "repeats": repeats, "most_frequent": examples}
        return _decisions_by_part(pieces, collected), summary

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, records in find_ranges(decisions, ordinals):
            outcomes[i] = self._cut(documents[i].text, set(decisions["index"][records].tolist()))
        return outcomes

    def _cut(self, text: str, repeated: set[int]) -> Outcome:
        kept_pieces = [piece for i, piece in enumerate(split(text, self.spec.unit)) if i not in repeated]
        left = "".join(text[start:following] for start, _, following in kept_pieces)
        if kept_pieces:  # drops the gap before a removed last paragraph
            left = left[: len(left) - (kept_pieces[-1][2] - kept_pieces[-1][1])]
        return keep_or_drop(left, self.spec.min_left_chars, "repeated paragraphs")


def scatter_pieces(task: PartTask[PieceIndex]) -> int:
    arrays = shuffle.load_columns(task.part, ("key", "check", "index"))
    none = np.empty(0, np.uint64)
    return write_pieces(task.shared, task.part.part, arrays.get("key", none), arrays.get("check", none))


def _decisions_by_part(pieces: PieceIndex, collected: Sequence[Collected]) -> DecisionsByPart:
    for part in collected:
        repeated = read_repeats(pieces, part.part)
        located = _locate_pieces(shuffle.load(part, _ARRAYS), repeated) if repeated.size else (repeated, repeated)
        yield {"ordinal": located[0], "index": located[1]}


def _locate_pieces(arrays: Arrays, numbers: Ints) -> tuple[Ints, npt.NDArray[Any]]:
    """The document of each of a part's pieces, and the piece's index in it."""
    document = np.searchsorted(np.cumsum(arrays["count"]), numbers, side="right")
    return arrays["ordinal"][document], arrays["index"][numbers]
