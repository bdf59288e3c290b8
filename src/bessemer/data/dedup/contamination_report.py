"""How much of each evaluation set the training data holds: the report of `decontaminate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.evaluation_sets import Index, items, words_of
from bessemer.data.dedup.places import PLACE_ARRAYS, Places
from bessemer.data.dedup.shuffle import load, numbering
from bessemer.data.step import Arrays, Collected, Each, Ints
from bessemer.spec.clean.dedup import DecontaminateSpec

MATCH_ARRAYS = ("ordinal", "matches", "words", "covered", "gram", "word")
_EXAMPLES = 20  # items of a set that are shown with a document and the words


def report_matches(
    collected: Sequence[Collected], scratch: Path, each: Each, spec: DecontaminateSpec, index: Index
) -> dict[str, Any]:
    """The summary. What it takes grows with the evaluation sets, not with the corpus."""
    np.save(scratch / "start.npy", index.start)
    np.save(scratch / "item.npy", index.item)
    tallies = each(tally_part, [TallyTask(scratch, part, spec) for part in collected])
    numbers = numbering(collected)
    documents = np.zeros(len(index.place_of_item), np.int64)
    first = np.full((documents.size, 2), -1)  # by item: the first document with some of it, and the gram
    for part, tally in zip(collected, tallies, strict=True):
        new = documents[tally.items] == 0
        found = np.stack([tally.first_ordinal + numbers[part.part], tally.first_gram], axis=1)
        first[tally.items[new]] = found[new]
        documents[tally.items] += tally.documents
    noted = ((int(numbers[part.part]), load(part, PLACE_ARRAYS)) for part in collected)
    places = Places(scratch / "places", noted)
    return {
        "documents": sum(tally.seen for tally in tallies),
        "matching_documents": sum(tally.matching for tally in tallies),
        "acted_on": sum(tally.acted for tally in tallies),
        "ngram": spec.ngram,
        "common_ngrams_skipped": index.common,
        "sets": _sets(spec, index, documents, first, places),
    }


def _sets(
    spec: DecontaminateSpec, index: Index, documents: Ints, first: Ints, places: Places
) -> dict[str, Any]:
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
class TallyTask:
    scratch: Path
    part: Collected
    spec: DecontaminateSpec

    @property
    def name(self) -> str:
        return f"matches of part {self.part.part}"


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


def tally_part(task: TallyTask) -> Tally:
    arrays = load(task.part, (*MATCH_ARRAYS, "seen"))
    none = np.empty(0, np.int64)
    if not arrays:
        return Tally(0, 0, 0, none, none, none, none)
    start, item = np.load(task.scratch / "start.npy", "r"), np.load(task.scratch / "item.npy", "r")
    gram = arrays["gram"]
    counts = start[gram + 1] - start[gram]
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    items = item[np.repeat(start[gram], counts) + places]
    document = np.repeat(np.repeat(np.arange(arrays["ordinal"].size), arrays["matches"]), counts)
    order = np.lexsort((document, items))  # stable, so that the first match of a document comes first
    items, document, grams = items[order], document[order], np.repeat(gram, counts)[order]
    new_item = np.append(True, items[1:] != items[:-1])[: items.size]
    new_pair = new_item | np.append(True, document[1:] != document[:-1])[: items.size]
    first = np.flatnonzero(new_item)
    return Tally(
        int(arrays["seen"].sum()),
        int(arrays["ordinal"].size),
        int(acted_on(arrays, task.spec).sum()),
        items[first],
        np.add.reduceat(new_pair.astype(np.int64), first) if first.size else none,
        arrays["ordinal"][document[first]],
        grams[first],
    )
