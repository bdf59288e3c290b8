"""Which pieces of documents occur more than once: paragraphs by the hash of their text, anchors by that of their
bytes. A piece's position is its place among all pieces of the corpus in order. Pieces come in by part, are grouped by
hash, and the positions of those that repeat go back out by part.

Paragraphs (or lines) that the corpus has had before are cut out: menus, notices, licences, quoted letters. The
first occurrence stays, in the order of the corpus; what is left of a document after too much went is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.curate.dedup import shuffle
from bessemer.data.curate.dedup.clusters import Resolved, Rulings, cut_ranges, left_after
from bessemer.data.curate.dedup.exact import hash_128, simplify
from bessemer.data.curate.dedup.shuffle import (
    BucketTask,
    PartTask,
    Places,
    Records,
    begins,
    for_buckets,
    for_parts,
    note_places,
    numbering,
    position,
)
from bessemer.data.curate.step import Arrays, Collected, Ints, Outcome, PerDocumentStep
from bessemer.data.document import Document
from bessemer.spec.curate.dedup import DedupParagraphsSpec

Words = npt.NDArray[np.uint64]
_POSITION = np.dtype([("key", "<u8")])
_SHOWN = 10


@dataclass(frozen=True)
class TextPieces:
    """Where pieces are brought together. `least` occurrences make a repeat; `first_too` asks for the position of the
    first occurrence as well; `checked`: pieces have 64 bits beside the key."""

    folder: Path
    parts: int
    buckets: int
    least: int
    first_too: bool
    checked: bool

    @property
    def repeats(self) -> Path:
        return self.folder / "repeats"

    @property
    def dtype(self) -> np.dtype[Any]:
        return piece_dtype(self.checked)


def bring_together(folder: Path, parts: int, records: int, least: int, *, first_too: bool, checked: bool) -> TextPieces:
    """An empty place for so many pieces."""
    buckets = shuffle.bucket_count(records, piece_dtype(checked))
    pieces = TextPieces(folder, parts, buckets, least, first_too, checked)
    pieces.repeats.mkdir(parents=True)
    return pieces


def piece_dtype(checked: bool) -> np.dtype[Any]:
    return np.dtype([("key", "<u8"), *([("check", "<u8")] if checked else []), ("position", "<i8")])


@dataclass(frozen=True)
class RepeatedPieces:
    """What one bucket gave: how many positions, and the most frequent pieces as (count, position of the first)."""

    positions: int
    most: list[tuple[int, int]]


def write_pieces(pieces: TextPieces, part: int, keys: Words, checks: Words | None) -> int:
    """One part's pieces, in order; how many they are."""
    records = np.empty(keys.size, pieces.dtype)
    records["key"] = keys
    if checks is not None:
        records["check"] = checks
    records["position"] = np.arange(keys.size) + position(part)
    shuffle.write_run(pieces.folder, part, records, shuffle.hash_bounds(pieces.buckets))
    return int(keys.size)


def find_repeats(task: BucketTask[TextPieces]) -> RepeatedPieces:
    """Goes through a bucket twice: to count, then to write down the repeats. What is held at once is a piece of the
    bucket and one record for each different key."""
    pieces = task.shared
    heads = np.empty(0, np.dtype([*pieces.dtype.descr, ("count", "<i8")]))
    for records in shuffle.read_bucket(pieces.folder, pieces.parts, task.bucket, pieces.dtype):
        heads, _, _ = _grouped(heads, records, 1)
    heads = heads[heads["count"] >= pieces.least]
    found = [np.empty(0, np.int64)]
    for records in shuffle.read_bucket(pieces.folder, pieces.parts, task.bucket, pieces.dtype):
        merged, ordered, group = _grouped(heads, records, 0)
        often = merged["count"][group] >= pieces.least
        later = ordered["position"] != merged["position"][group]
        found.append(ordered["position"][often & later])
    if pieces.first_too:
        found.append(heads["position"])
    positions = np.concatenate(found)
    run = np.empty(positions.size, _POSITION)
    run["key"] = positions
    shuffle.write_run(pieces.repeats, task.bucket, run, shuffle.part_bounds(pieces.parts))
    top = np.lexsort((heads["position"], -heads["count"]))[:_SHOWN]
    most = [(int(heads["count"][i]), int(heads["position"][i])) for i in top]
    return RepeatedPieces(positions.size, most)


def repeats_of(pieces: TextPieces, part: int) -> Ints:
    """The repeats among one part's pieces, by their number in the part, in order."""
    held = [np.empty(0, _POSITION), *shuffle.read_bucket(pieces.repeats, pieces.buckets, part, _POSITION)]
    return np.sort(np.concatenate(held)["key"].astype(np.int64) - position(part))


def most_frequent(found: Sequence[RepeatedPieces]) -> Iterator[tuple[int, int, int]]:
    """(occurrences, part and number of the first) of the most frequent pieces of all."""
    every = sorted((one for each in found for one in each.most), key=lambda one: (-one[0], one[1]))
    for count, at in every[:_SHOWN]:
        yield count, at // position(1), at % position(1)


def _grouped(heads: Records, records: Records, weight: int) -> tuple[Records, Records, Ints]:
    """One head for each key of `heads` and `records`, with its first position and summed count; then all of both in
    the order of keys, and the group of each. A head that is among the records as well counts once for each."""
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
    new = begins(*(merged[name] for name in keyed))
    starts = np.flatnonzero(new)
    found = merged[starts]
    if starts.size:
        found["position"] = np.minimum.reduceat(merged["position"], starts)
        found["count"] = np.add.reduceat(merged["count"], starts)
    return found, merged, np.cumsum(new) - 1


_GAP, _NEWLINE = re.compile(r"\n\s*\n"), re.compile("\n")
_ARRAYS = ("ordinal", "count", "index")


def split(text: str, unit: str) -> list[tuple[int, int, int]]:
    """(start, end, start of the next) of each paragraph or line. Linear in the text."""
    gaps = [gap.span() for gap in (_GAP if unit == "paragraph" else _NEWLINE).finditer(text)]
    starts = [0, *(end for _, end in gaps)]
    ends = [*(start for start, _ in gaps), len(text)]
    return list(zip(starts, ends, [*starts[1:], len(text)], strict=True))


class DedupParagraphs:
    """Cuts repeats out of documents; the documents themselves stay unless too little is left."""

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

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: PerDocumentStep) -> Resolved:
        numbers = numbering(collected)
        records, least = shuffle.count_records(collected, "key"), self.spec.min_count
        folder = scratch / "pieces"
        pieces = bring_together(folder, len(collected), records, least, first_too=False, checked=True)
        total = sum(each(scatter_pieces, for_parts("paragraphs", pieces, collected)))
        found = each(find_repeats, for_buckets("repeats", pieces, pieces.buckets))
        places = Places.of(collected, scratch)
        shown = []
        for count, part, piece in most_frequent(found):
            ordinal, index = _pieces(shuffle.load(collected[part], _ARRAYS), np.array([piece]))
            place = places.place(int(numbers[part] + ordinal[0]))
            shown.append({"count": count, "first": place, self.spec.unit: int(index[0]) + 1})
        repeats = sum(one.positions for one in found)
        summary = {f"{self.spec.unit}s": total, "repeats": repeats, "most_frequent": shown}
        return _rulings(pieces, collected), summary

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, some in cut_ranges(ruling, ordinals):
            outcomes[i] = self._cut(documents[i].text, set(ruling["index"][some].tolist()))
        return outcomes

    def _cut(self, text: str, repeated: set[int]) -> Outcome:
        kept = [piece for i, piece in enumerate(split(text, self.spec.unit)) if i not in repeated]
        left = "".join(text[start:following] for start, _, following in kept)
        if kept:  # the gap before a paragraph that went goes with it
            left = left[: len(left) - (kept[-1][2] - kept[-1][1])]
        return left_after(left, self.spec.min_left_chars, "repeated paragraphs")


def scatter_pieces(task: PartTask[TextPieces]) -> int:
    arrays = shuffle.load_columns(task.part, ("key", "check", "index"))
    none = np.empty(0, np.uint64)
    return write_pieces(task.shared, task.part.part, arrays.get("key", none), arrays.get("check", none))


def _rulings(pieces: TextPieces, collected: Sequence[Collected]) -> Rulings:
    for part in collected:
        repeated = repeats_of(pieces, part.part)
        found = _pieces(shuffle.load(part, _ARRAYS), repeated) if repeated.size else (repeated, repeated)
        yield {"ordinal": found[0], "index": found[1]}


def _pieces(arrays: Arrays, numbers: Ints) -> tuple[Ints, npt.NDArray[Any]]:
    """The document of each of some of a part's pieces, and its index in it."""
    document = np.searchsorted(np.cumsum(arrays["count"]), numbers, side="right")
    return arrays["ordinal"][document], arrays["index"][numbers]
