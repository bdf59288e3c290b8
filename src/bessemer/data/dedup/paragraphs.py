"""Paragraphs (or lines) that the corpus has had before are cut out: menus, notices, licences, quoted letters. The
first occurrence stays, in the order of the corpus; what is left of a document after too much went is dropped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup import shuffle
from bessemer.data.dedup.clusters import Resolved, Rulings, cut_ranges, left_after
from bessemer.data.dedup.exact import hash_128, simplify
from bessemer.data.dedup.places import Places, note_places
from bessemer.data.dedup.repeats import Pieces, bring_together, find_repeats, most_frequent, repeats_of, write_pieces
from bessemer.data.dedup.shuffle import PartTask, for_buckets, for_parts, numbering
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Each, Ints, Outcome
from bessemer.spec.clean.dedup import DedupParagraphsSpec

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

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: Each) -> Resolved:
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


def scatter_pieces(task: PartTask[Pieces]) -> int:
    arrays = shuffle.load_columns(task.part, ("key", "check", "index"))
    none = np.empty(0, np.uint64)
    return write_pieces(task.shared, task.part.part, arrays.get("key", none), arrays.get("check", none))


def _rulings(pieces: Pieces, collected: Sequence[Collected]) -> Rulings:
    for part in collected:
        repeated = repeats_of(pieces, part.part)
        found = _pieces(shuffle.load(part, _ARRAYS), repeated) if repeated.size else (repeated, repeated)
        yield {"ordinal": found[0], "index": found[1]}


def _pieces(arrays: Arrays, numbers: Ints) -> tuple[Ints, npt.NDArray[Any]]:
    """The document of each of some of a part's pieces, and its index in it."""
    document = np.searchsorted(np.cumsum(arrays["count"]), numbers, side="right")
    return arrays["ordinal"][document], arrays["index"][numbers]
