"""Passages that the corpus has had before, byte for byte, are cut out, wherever they begin and end.

The definition is that of deduplication by suffix array: a window of `min_bytes` bytes is a repeat if the same bytes
begin somewhere earlier and end before it; all bytes of all repeats go. A suffix array of the corpus would take nine
times its size in memory. Here windows are compared only where their anchors agree, on disk, by the bytes themselves.

`collect` keeps the bytes of the documents, as they are: `resolve` has no documents at hand, and windows are as many as
bytes, so that hashes of them would be eight times larger. With the anchors it is 1.3 bytes of disk a byte of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bessemer.data.dedup.anchors import find_anchors
from bessemer.data.dedup.clusters import Resolved, cut_ranges, left_after
from bessemer.data.dedup.windows import resolve_windows
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Each, Ints, Outcome
from bessemer.spec.clean.dedup import DedupSubstringsSpec


class DedupSubstrings:
    """Cuts repeats out of documents; the documents themselves stay unless too little is left."""

    version = 1
    bulky = True  # 1.3 times the text

    def __init__(self, spec: DedupSubstringsSpec, seed: int) -> None:
        self.spec = spec

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        raws = [document.text.encode() for document in documents]
        there = [i for i, raw in enumerate(raws) if len(raw) >= self.spec.min_bytes]
        texts = [raws[i] for i in there]
        found = find_anchors(texts, self.spec.min_bytes)
        sizes = np.array([len(text) for text in texts], np.int64)
        return {
            "ordinal": ordinals[there],
            "bytes": sizes,
            "text": np.frombuffer(b"".join(texts), np.uint8),
            "anchors": np.bincount(found.document, minlength=len(texts)),
            "key": found.key,
            "offset": found.offset.astype(np.uint32 if sizes.max(initial=0) < 1 << 32 else np.int64),
            "lead": found.lead.astype(np.uint16),
            "span": found.span.astype(np.uint16),
            "local_ordinal": ordinals[there][found.local[:, 0]],
            "local_start": found.local[:, 1],
            "local_end": found.local[:, 2],
        }

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: Each) -> Resolved:
        return resolve_windows(collected, scratch, each, self.spec.min_bytes)

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, some in cut_ranges(ruling, ordinals):
            text = cut_bytes(documents[i].text, ruling["start"][some].tolist(), ruling["end"][some].tolist())
            outcomes[i] = left_after(text, self.spec.min_left_chars, "repeated passages")
        return outcomes


def cut_bytes(text: str, starts: Sequence[int], ends: Sequence[int]) -> str:
    """The text without some ranges of its UTF-8 bytes, in order; a character that lies in one only in part stays."""
    raw = text.encode()
    kept, at = [], 0
    for start, end in zip(starts, ends, strict=True):
        while start < end and _inside_character(raw, start):
            start += 1
        while end > start and end < len(raw) and _inside_character(raw, end):
            end -= 1
        kept.append(raw[at:start])
        at = end
    return b"".join([*kept, raw[at:]]).decode()


def _inside_character(raw: bytes, at: int) -> bool:
    return raw[at] & 0xC0 == 0x80
