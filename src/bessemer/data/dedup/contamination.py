"""Text of evaluation sets in the training data: found by word n-grams, then dropped, cut out or only reported. Each
document could be judged alone; the step is a global one because its report is: which sets, which items, and how many
documents hold each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.clusters import Resolved, left_after, ruled
from bessemer.data.dedup.evaluation_sets import Index, content_hash, files_of, items, load_index, words_of
from bessemer.data.dedup.folding import word_spans
from bessemer.data.dedup.places import Places, note_places
from bessemer.data.dedup.shingles import shingles
from bessemer.data.dedup.shuffle import PartTask, begins, for_parts, load, numbering
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

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: Each) -> Resolved:
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
            item = int(index.item[index.start[gram]])
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
        for i, record in ruled(ruling, ordinals):
            outcomes[i] = self._act(documents[i], ruling, record)
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
        return left_after(left, spec.min_left_chars, "text of evaluation sets")


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


MATCH_ARRAYS = ("ordinal", "matches", "words", "covered", "gram", "word")
_EXAMPLES = 20  # items of a set that are shown with a document and the words


def report_matches(
    collected: Sequence[Collected], scratch: Path, each: Each, spec: DecontaminateSpec, index: Index
) -> dict[str, Any]:
    """The summary. What it takes grows with the evaluation sets, not with the corpus."""
    np.save(scratch / "start.npy", index.start)
    np.save(scratch / "item.npy", index.item)
    tallies = each(tally_part, for_parts("matches", (scratch, spec), collected))
    numbers = numbering(collected)
    documents = np.zeros(len(index.place_of_item), np.int64)
    first = np.full((documents.size, 2), -1)  # by item: the first document with some of it, and the gram
    for part, tally in zip(collected, tallies, strict=True):
        new = documents[tally.items] == 0
        found = np.stack([tally.first_ordinal + numbers[part.part], tally.first_gram], axis=1)
        first[tally.items[new]] = found[new]
        documents[tally.items] += tally.documents
    return {
        "documents": sum(tally.seen for tally in tallies),
        "matching_documents": sum(tally.matching for tally in tallies),
        "acted_on": sum(tally.acted for tally in tallies),
        "ngram": spec.ngram,
        "common_ngrams_skipped": index.common,
        "sets": _sets(spec, index, documents, first, Places.of(collected, scratch)),
    }


def _sets(spec: DecontaminateSpec, index: Index, documents: Ints, first: Ints, places: Places) -> dict[str, Any]:
    about: dict[str, Any] = {}
    shown: dict[tuple[str, str], int] = {}  # set, place: item
    for number, name in enumerate(index.sets):
        own = np.flatnonzero(index.set_of_item == number)
        hit = own[documents[own] > 0]
        hit = hit[np.lexsort((hit, -documents[hit]))]
        shown |= {(name, index.place_of_item[i]): i for i in hit[:_EXAMPLES].tolist()}
        about[name] = {
            "items": int(own.size),
            "too_short": int(np.isin(index.too_short, own).sum()),
            "contaminated": int(hit.size),
            "contaminated_share": round(hit.size / own.size, 6) if own.size else 0.0,
            "documents_by_item": {index.place_of_item[i]: int(documents[i]) for i in hit.tolist()},
            "examples": [],
        }
    for item in items(spec.sets) if shown else ():
        number = shown.get((item.set, item.place), -1)
        if number >= 0:
            document, gram = first[number].tolist()
            words = words_of(item.text, index.word_in(gram, number), spec.ngram)
            example = {"item": item.place, "document": places.place(document), "ngram": words}
            about[item.set]["examples"].append(example)
    return about


def acted_on(arrays: Arrays, spec: DecontaminateSpec) -> npt.NDArray[np.bool_]:
    share = arrays["covered"] / np.maximum(arrays["words"], 1)
    return (arrays["matches"] > spec.max_matches) & (share > spec.max_share)


@dataclass(frozen=True)
class Tally:
    """What one part holds of the evaluation sets: for each item found there, the documents, and the first match."""

    seen: int
    matching: int
    acted: int
    items: Ints
    documents: Ints
    first_ordinal: Ints
    first_gram: Ints


def tally_part(task: PartTask[tuple[Path, DecontaminateSpec]]) -> Tally:
    scratch, spec = task.shared
    arrays = load(task.part, (*MATCH_ARRAYS, "seen"))
    none = np.empty(0, np.int64)
    if not arrays:
        return Tally(0, 0, 0, none, none, none, none)
    start, item = np.load(scratch / "start.npy", "r"), np.load(scratch / "item.npy", "r")
    gram = arrays["gram"]
    counts = start[gram + 1] - start[gram]
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    items = item[np.repeat(start[gram], counts) + places]
    document = np.repeat(np.repeat(np.arange(arrays["ordinal"].size), arrays["matches"]), counts)
    order = np.lexsort((document, items))  # stable, so that the first match of a document comes first
    items, document, grams = items[order], document[order], np.repeat(gram, counts)[order]
    new_pair, first = begins(items, document), np.flatnonzero(begins(items))
    return Tally(
        int(arrays["seen"].sum()),
        int(arrays["ordinal"].size),
        int(acted_on(arrays, spec).sum()),
        items[first],
        np.add.reduceat(new_pair.astype(np.int64), first) if first.size else none,
        arrays["ordinal"][document[first]],
        grams[first],
    )
