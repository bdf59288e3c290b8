"""Text of evaluation sets in the training data: found by word n-grams, then dropped, cut out or only reported.

Each document could be judged alone; the step is a global one because its report is: which sets, which items, and how
many documents hold each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.clusters import Rulings
from bessemer.data.dedup.contamination_report import MATCH_ARRAYS, acted_on, report_matches
from bessemer.data.dedup.evaluation_sets import Index, content_hash, files_of, load_index, words_of
from bessemer.data.dedup.folding import word_spans
from bessemer.data.dedup.places import note_places
from bessemer.data.dedup.shingles import shingles
from bessemer.data.dedup.shuffle import load
from bessemer.data.document import Document
from bessemer.data.step import Arrays, Collected, Drop, Each, Ints, Outcome
from bessemer.spec.clean.dedup import DecontaminateSpec


class Decontaminate:
    """`identity` follows the content of the evaluation files, so that a changed set is judged anew."""

    version = 1

    def __init__(self, spec: DecontaminateSpec, seed: int) -> None:
        self.spec = spec
        self.identity = content_hash(files_of(spec.sets))

    @property
    def index(self) -> Index:
        return load_index(self.spec.model_dump_json(), self.identity)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        n, index = self.spec.ngram, self.index
        counts = np.zeros(len(documents), np.int64)  # n-grams
        owner, gram, word = [], [], []
        for block in shingles([document.text for document in documents], "word", n, brief=False):
            amounts = np.diff(block.starts, append=block.hashes.size)
            np.add.at(counts, block.documents, amounts)
            at, found = index.find(block.hashes)
            if at.size:
                segment = np.searchsorted(block.starts, at, side="right") - 1
                owner.append(block.documents[segment])
                word.append(at - block.starts[segment] + block.first[segment])
                gram.append(found)
        none = [np.empty(0, np.int64)]
        of, at_word = np.concatenate(owner or none), np.concatenate(word or none)
        order = np.lexsort((at_word, of))
        of, at_word = of[order], at_word[order]
        there, start, matches = np.unique(of, return_index=True, return_counts=True)
        reach = np.minimum(np.diff(at_word, append=0), n)  # words that a match covers before the next begins
        reach[start + matches - 1] = n
        having = [documents[i] for i in there.tolist()]
        return {
            **note_places(having, ordinals[there]),
            "seen": np.array([len(documents)], np.int64),
            "ordinal": ordinals[there],
            "matches": matches,
            "words": counts[there] + n - 1,
            "covered": np.add.reduceat(reach, start) if start.size else start,
            "gram": np.concatenate(gram or none)[order],
            "word": at_word,
        }

    def resolve(
        self, collected: Sequence[Collected], scratch: Path, each: Each
    ) -> tuple[Rulings, dict[str, Any]]:
        summary = report_matches(collected, scratch, each, self.spec, self.index)
        return (self._ruling(part) for part in collected), summary

    def _ruling(self, part: Collected) -> Arrays:
        """The documents that are acted on, the first item that each matches, and where the matches begin."""
        arrays = load(part, MATCH_ARRAYS)
        if not arrays:
            return {"ordinal": np.empty(0, np.int64)}
        index = self.index
        acted = acted_on(arrays, self.spec)
        inside = np.repeat(acted, arrays["matches"])
        starts = np.cumsum(arrays["matches"]) - arrays["matches"]
        names = []
        for gram in arrays["gram"][starts[acted]].tolist():
            item = index.first_item(gram)
            names.append(f"{index.sets[index.set_of_item[item]]} {index.place_of_item[item]}".encode())
        return {
            "ordinal": arrays["ordinal"][acted],
            "match_end": np.cumsum(arrays["matches"][acted]),
            "word": arrays["word"][inside],
            "name_end": np.cumsum([len(name) for name in names], dtype=np.int64),
            "name": np.frombuffer(b"".join(names), np.uint8),
        }

    def apply(self, documents: Sequence[Document], ordinals: Ints, ruling: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        acted = ruling["ordinal"]
        if not acted.size:
            return outcomes
        at = np.searchsorted(acted, ordinals)
        at[at == acted.size] = 0
        for i in np.flatnonzero(acted[at] == ordinals).tolist():
            outcomes[i] = self._act(documents[i], ruling, int(at[i]))
        return outcomes

    def _act(self, document: Document, ruling: Arrays, record: int) -> Outcome:
        spec = self.spec
        name = _item(ruling["name"], ruling["name_end"], record).tobytes().decode()
        words = _item(ruling["word"], ruling["match_end"], record)
        if spec.action == "report":
            document.labels["contaminated"] = name.partition(" ")[0]
            return None
        if spec.action == "drop":
            found = words_of(document.text, int(words[0]), spec.ngram)
            return Drop("contains text of an evaluation set", f"{name}: {found}")
        left = cut_words(document.text, words, spec.ngram, spec.margin_chars)
        chars = len(left.strip())
        if chars < spec.min_left_chars:
            return Drop("too little left without text of evaluation sets", float(chars))
        return left


def cut_words(text: str, words: Ints, n: int, margin: int) -> str:
    """The text without the n words from each of `words` on, and so many characters on both sides."""
    starts, ends = word_spans(text)
    words = words[words < starts.size]
    if not words.size:
        return text
    start = np.maximum(starts[words] - margin, 0)
    end = np.maximum.accumulate(np.minimum(ends[np.minimum(words + n, ends.size) - 1] + margin, len(text)))
    new = np.flatnonzero(np.append(True, start[1:] > end[:-1]))
    last = np.append(new[1:], start.size) - 1
    kept, at = [], 0
    for begin, stop in zip(start[new].tolist(), end[last].tolist(), strict=True):
        kept.append(text[at:begin])
        at = stop
    return "".join([*kept, text[at:]])


def _item(values: npt.NDArray[Any], ends: Ints, record: int) -> npt.NDArray[Any]:
    return values[int(ends[record - 1]) if record else 0 : int(ends[record])]
