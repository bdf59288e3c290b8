"""Finds text of evaluation sets in the training data by word n-grams, and drops it, cuts it or only reports it. Each
document could be judged alone; the step is global because its report is: which sets, which items, and how many
documents hold each."""

from __future__ import annotations

import glob
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.dedup.clusters import Resolved, find_decided, keep_or_drop
from bessemer.data.curate.dedup.exact import word_spans
from bessemer.data.curate.dedup.near import shingles
from bessemer.data.curate.dedup.shuffle import PartTask, Places, begins, for_parts, load, note_places, numbering
from bessemer.data.curate.step import Arrays, Collected, Drop, Ints, Outcome, RunTasks, file_identity
from bessemer.data.read.entry import Document
from bessemer.data.read.rows import repair_surrogates
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import DecontaminateSpec, EvaluationSetSpec

Words = npt.NDArray[np.uint64]
_JSON = (".jsonl", ".ndjson")
_TEXT = (".txt", ".md")
_ITEMS_AT_ONCE = 1024


class EvaluationItem(NamedTuple):
    """One row of an evaluation set."""

    set: str
    place: str
    text: str


@dataclass(frozen=True)
class EvaluationIndex:
    """All n-grams of all sets. Gram g occurs in the items `item[start[g]:start[g + 1]]`, first at their words
    `word[start[g]:start[g + 1]]`."""

    grams: Words  # sorted, unique
    start: Ints
    item: Ints
    word: Ints
    sets: tuple[str, ...]
    set_of_item: Ints
    place_of_item: tuple[str, ...]
    too_short: Ints  # items shorter than an n-gram
    common: int  # n-grams left out because too many items hold them
    near: npt.NDArray[np.bool_]  # by the leading bits of a hash: whether any gram has them

    def word_in(self, gram: int, item: int) -> int:
        """The word of an item at which one of its grams first occurs."""
        occurrences = slice(int(self.start[gram]), int(self.start[gram + 1]))
        return int(self.word[occurrences][np.searchsorted(self.item[occurrences], item)])

    def find(self, hashes: Words) -> tuple[Ints, Ints]:
        """(which hashes are in the index, their grams). The table `near` avoids most searches."""
        if not self.grams.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        shift = np.uint64(65 - self.near.size.bit_length())
        maybe = np.flatnonzero(self.near[(hashes >> shift).astype(np.int64)])
        at = np.searchsorted(self.grams, hashes[maybe])
        at[at == self.grams.size] = 0
        is_known = self.grams[at] == hashes[maybe]
        return maybe[is_known], at[is_known]


def list_set_files(sets: Mapping[str, EvaluationSetSpec]) -> dict[str, list[str]]:
    """The files of each set. A set without files is an error: it would look like one without matches."""
    return {name: [file for path in spec.path for file in _expand(name, path)] for name, spec in sets.items()}


def _expand(name: str, pattern: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(path):
        files = sorted(
            os.path.join(folder, file)
            for folder, _, names in os.walk(path)
            for file in names
            if file.removesuffix(".gz").endswith(_JSON + _TEXT)
        )
    else:
        files = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    if not files:
        raise UserError(f"decontaminate: set {name!r}: no file {path}; correct its path")
    for file in files:
        if not file.removesuffix(".gz").endswith(_JSON + _TEXT):
            raise UserError(
                f"decontaminate: set {name!r}: {file}: the name does not tell the format; "
                "give .jsonl (an object a line) or .txt (an item a line)"
            )
    return files


def read_items(sets: Mapping[str, EvaluationSetSpec]) -> Iterator[EvaluationItem]:
    """Every item with text of every set, in order."""
    files = list_set_files(sets)
    for name, spec in sets.items():
        for file in files[name]:
            for row, text in _read_lines(name, file, spec.fields):
                if text.strip():
                    yield EvaluationItem(name, f"{file}:{row}", text)


def _read_lines(name: str, path: str, fields: Sequence[str]) -> Iterator[tuple[int, str]]:
    is_json = path.removesuffix(".gz").endswith(_JSON)
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        for row, line in enumerate(file, 1):
            text = line.decode("utf-8-sig" if row == 1 else "utf-8", errors="replace")
            if not text.strip():
                continue
            yield row, _item_text(f"set {name!r}: {path}:{row}", text, fields) if is_json else text


def _item_text(place: str, line: str, fields: Sequence[str]) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"decontaminate: {place}: not valid JSON ({error}); correct or delete this line") from error
    if fields:
        missing = [field for field in fields if not isinstance(value, dict) or field not in value]
        if missing:
            has = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise UserError(f"decontaminate: {place}: no field {missing[0]!r}; it has {has}: correct `parse_fields`")
        value = [value[field] for field in fields]
    return "\n".join(_strings(value))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield repair_surrogates(value)
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


@lru_cache(maxsize=1)
def load_index(spec_json: str, content: str) -> EvaluationIndex:
    """The index of a spec's sets, cached because a worker creates the step for every part. `content` is the hash of the
    files, so a changed file is read again."""
    spec = DecontaminateSpec.model_validate_json(spec_json)
    return build_index(list(read_items(spec.sets)), tuple(spec.sets), spec.ngram, spec.max_items)


def build_index(
    evaluation_items: Sequence[EvaluationItem], sets: tuple[str, ...], n: int, max_items: int | None
) -> EvaluationIndex:
    hashes, owner, word = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for at in range(0, len(evaluation_items), _ITEMS_AT_ONCE):
        texts = [item.text for item in evaluation_items[at : at + _ITEMS_AT_ONCE]]
        for block in shingles(texts, "word", n, brief=False):
            counts = np.diff(block.starts, append=block.hashes.size)
            hashes.append(block.hashes)
            owner.append(np.repeat(block.documents + at, counts))
            word.append(np.arange(block.hashes.size) - np.repeat(block.starts - block.first, counts))
    gram, item, at_word = np.concatenate(hashes), np.concatenate(owner), np.concatenate(word)
    long = np.zeros(len(evaluation_items), bool)
    long[item] = True
    order = np.lexsort((at_word, item, gram))
    gram, item, at_word = gram[order], item[order], at_word[order]
    once = begins(gram, item)  # a gram counts once per item
    gram, item, at_word = gram[once], item[once], at_word[once]
    _, start, count = np.unique(gram, return_index=True, return_counts=True)
    often = count > (max_items if max_items is not None else len(evaluation_items))
    keep = np.repeat(~often, count)
    gram, item, at_word = gram[keep], item[keep], at_word[keep]
    grams, start = np.unique(gram, return_index=True)
    bits = min(max(int(grams.size * 32).bit_length(), 10), 26)
    near = np.zeros(1 << bits, bool)
    near[(grams >> np.uint64(64 - bits)).astype(np.int64)] = True
    set_of_item = np.array([sets.index(entry.set) for entry in evaluation_items], np.int64)
    places = tuple(entry.place for entry in evaluation_items)
    start, too_short = np.append(start, gram.size), np.flatnonzero(~long)
    return EvaluationIndex(
        grams, start, item, at_word, sets, set_of_item, places, too_short, int(often.sum()), near
    )  # fmt: skip


def extract_words(text: str, word: int, count: int) -> str:
    """Some words of a text, on one line."""
    starts, ends = word_spans(text)
    if word >= starts.size:
        return ""
    last = min(word + count, starts.size) - 1
    return " ".join(text[int(starts[word]) : int(ends[last])].split())


class Decontaminate:
    """`step_identity` covers the content of the evaluation files."""

    version = 1

    def __init__(self, spec: DecontaminateSpec, seed: int) -> None:
        self.spec = spec
        files = list_set_files(spec.sets).items()
        contents = [[name, [(path, file_identity(path)) for path in paths]] for name, paths in files]
        self.identity = str(xxhash.xxh3_128_hexdigest(json.dumps(contents).encode()))

    @property
    def index(self) -> EvaluationIndex:
        return load_index(self.spec.model_dump_json(), self.identity)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        n, index = self.spec.ngram, self.index
        counts = np.zeros(len(documents), np.int64)  # n-grams
        owner, gram, word = [], [], []
        for block in shingles([document.text for document in documents], "word", n, brief=False):
            amounts = np.diff(block.starts, append=block.hashes.size)
            np.add.at(counts, block.documents, amounts)
            at, grams_found = index.find(block.hashes)
            if at.size:
                segment = np.searchsorted(block.starts, at, side="right") - 1
                owner.append(block.documents[segment])
                word.append(at - block.starts[segment] + block.first[segment])
                gram.append(grams_found)
        none = [np.empty(0, np.int64)]
        of, at_word = np.concatenate(owner or none), np.concatenate(word or none)
        order = np.lexsort((at_word, of))
        of, at_word = of[order], at_word[order]
        matching, start, matches = np.unique(of, return_index=True, return_counts=True)
        reach = np.minimum(np.diff(at_word, append=0), n)  # words that a match covers before the next
        reach[start + matches - 1] = n
        matching_documents = [documents[i] for i in matching.tolist()]
        return {
            **note_places(matching_documents, ordinals[matching]),
            "seen": np.array([len(documents)], np.int64),
            "ordinal": ordinals[matching],
            "matches": matches,
            "words": counts[matching] + n - 1,
            "covered": np.add.reduceat(reach, start) if start.size else start,
            "gram": np.concatenate(gram or none)[order],
            "word": at_word,
        }

    def resolve(self, collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks) -> Resolved:
        summary = report_matches(collected, scratch, run_tasks, self.spec, self.index)
        return (self._part_decisions(part) for part in collected), summary

    def _part_decisions(self, part: Collected) -> Arrays:
        """The documents to act on, the first item that each matches, and where the matches begin."""
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

    def apply(self, documents: Sequence[Document], ordinals: Ints, decisions: Arrays) -> list[Outcome]:
        outcomes: list[Outcome] = [None] * len(documents)
        for i, record in find_decided(decisions, ordinals):
            outcomes[i] = self._act(documents[i], decisions, record)
        return outcomes

    def _act(self, document: Document, decisions: Arrays, record: int) -> Outcome:
        spec = self.spec
        name = _slice_record(decisions["name"], decisions["name_end"], record).tobytes().decode()
        words = _slice_record(decisions["word"], decisions["match_end"], record)
        if spec.action == "report":
            document.labels["contaminated"] = name.partition(" ")[0]
            return None
        if spec.action == "drop":
            matched_words = extract_words(document.text, int(words[0]), spec.ngram)
            return Drop("contains text of an evaluation set", f"{name}: {matched_words}")
        left = cut_words(document.text, words, spec.ngram, spec.margin_chars)
        return keep_or_drop(left, spec.min_left_chars, "text of evaluation sets")


def cut_words(text: str, words: Ints, n: int, margin: int) -> str:
    """The text without the n words from each of `words` on, and `margin` characters on both sides."""
    starts, ends = word_spans(text)
    words = words[words < starts.size]
    if not words.size:
        return text
    start = np.maximum(starts[words] - margin, 0)
    end = np.maximum.accumulate(np.minimum(ends[np.minimum(words + n, ends.size) - 1] + margin, len(text)))
    new = np.flatnonzero(np.append(True, start[1:] > end[:-1]))
    last = np.append(new[1:], start.size) - 1
    pieces, at = [], 0
    for begin, stop in zip(start[new].tolist(), end[last].tolist(), strict=True):
        pieces.append(text[at:begin])
        at = stop
    return "".join([*pieces, text[at:]])


def _slice_record(values: npt.NDArray[Any], ends: Ints, record: int) -> npt.NDArray[Any]:
    return values[int(ends[record - 1]) if record else 0 : int(ends[record])]


MATCH_ARRAYS = ("ordinal", "matches", "words", "covered", "gram", "word")
_EXAMPLES = 20  # items per set shown with a document and words


def report_matches(
    collected: Sequence[Collected], scratch: Path, run_tasks: RunTasks, spec: DecontaminateSpec, index: EvaluationIndex
) -> dict[str, Any]:
    """The summary. Memory grows with the evaluation sets, not with the corpus."""
    np.save(scratch / "start.npy", index.start)
    np.save(scratch / "item.npy", index.item)
    tallies = run_tasks(count_matches, for_parts("matches", (scratch, spec), collected))
    numbers = numbering(collected)
    documents = np.zeros(len(index.place_of_item), np.int64)
    first = np.full((documents.size, 2), -1)  # by item: the first document that matches, and the gram
    for part, tally in zip(collected, tallies, strict=True):
        new = documents[tally.items] == 0
        first_matches = np.stack([tally.first_ordinal + numbers[part.part], tally.first_gram], axis=1)
        first[tally.items[new]] = first_matches[new]
        documents[tally.items] += tally.documents
    return {
        "documents": sum(tally.seen for tally in tallies),
        "matching_documents": sum(tally.matching for tally in tallies),
        "acted_on": sum(tally.acted for tally in tallies),
        "ngram": spec.ngram,
        "common_ngrams_skipped": index.common,
        "sets": _summarize_sets(spec, index, documents, first, Places.of(collected, scratch)),
    }


def _summarize_sets(
    spec: DecontaminateSpec, index: EvaluationIndex, documents: Ints, first: Ints, places: Places
) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    examples: dict[tuple[str, str], int] = {}  # set, place: item
    for number, name in enumerate(index.sets):
        set_items = np.flatnonzero(index.set_of_item == number)
        hit = set_items[documents[set_items] > 0]
        hit = hit[np.lexsort((hit, -documents[hit]))]
        examples |= {(name, index.place_of_item[i]): i for i in hit[:_EXAMPLES].tolist()}
        summary[name] = {
            "items": int(set_items.size),
            "too_short": int(np.isin(index.too_short, set_items).sum()),
            "contaminated": int(hit.size),
            "contaminated_share": round(hit.size / set_items.size, 6) if set_items.size else 0.0,
            "documents_by_item": {index.place_of_item[i]: int(documents[i]) for i in hit.tolist()},
            "examples": [],
        }
    for item in read_items(spec.sets) if examples else ():
        number = examples.get((item.set, item.place), -1)
        if number >= 0:
            document, gram = first[number].tolist()
            words = extract_words(item.text, index.word_in(gram, number), spec.ngram)
            example = {"item": item.place, "document": places.place(document), "ngram": words}
            summary[item.set]["examples"].append(example)
    return summary


def acted_on(arrays: Arrays, spec: DecontaminateSpec) -> npt.NDArray[np.bool_]:
    share = arrays["covered"] / np.maximum(arrays["words"], 1)
    return (arrays["matches"] > spec.max_matches) & (share > spec.max_share)


@dataclass(frozen=True)
class MatchCounts:
    """What one part holds of the evaluation sets: for each item found, the documents and the first match."""

    seen: int
    matching: int
    acted: int
    items: Ints
    documents: Ints
    first_ordinal: Ints
    first_gram: Ints


def count_matches(task: PartTask[tuple[Path, DecontaminateSpec]]) -> MatchCounts:
    scratch, spec = task.shared
    arrays = load(task.part, (*MATCH_ARRAYS, "seen"))
    none = np.empty(0, np.int64)
    if not arrays:
        return MatchCounts(0, 0, 0, none, none, none, none)
    start, item = np.load(scratch / "start.npy", "r"), np.load(scratch / "item.npy", "r")
    gram = arrays["gram"]
    counts = start[gram + 1] - start[gram]
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    items = item[np.repeat(start[gram], counts) + places]
    document = np.repeat(np.repeat(np.arange(arrays["ordinal"].size), arrays["matches"]), counts)
    order = np.lexsort((document, items))  # stable: the first match of a document comes first
    items, document, grams = items[order], document[order], np.repeat(gram, counts)[order]
    new_pair, first = begins(items, document), np.flatnonzero(begins(items))
    return MatchCounts(
        int(arrays["seen"].sum()),
        int(arrays["ordinal"].size),
        int(acted_on(arrays, spec).sum()),
        items[first],
        np.add.reduceat(new_pair.astype(np.int64), first) if first.size else none,
        arrays["ordinal"][document[first]],
        grams[first],
    )
