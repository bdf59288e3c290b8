"""Questions of an evaluation in the run's own training data, named by file and row.

The run's token stores are decoded document by document and searched for n-grams of the questions. A question counts as
contaminated if one document holds at least half of the n-grams of its longest text: shared phrases are no leak.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.curate.dedup.decontaminate import EvaluationIndex, EvaluationItem, build_index, extract_words
from bessemer.data.curate.dedup.near import shingles
from bessemer.data.prepare import Prepared, open_prepared
from bessemer.errors import UserError
from bessemer.evaluate.results import Evaluation
from bessemer.observe.progress import ProgressReport, silent

NGRAM = 8  # words
SHARE = 0.5  # of a question's n-grams, in one document
COMMON = 10  # n-grams of more questions than this are phrases of the task
AT_ONCE = 256  # documents
EXAMPLES = 5


@dataclass(frozen=True)
class Match:
    """A question and the document that holds most of it."""

    item: int
    share: float
    source: str
    file: str
    row: int
    excerpt: str

    def to_json(self) -> dict[str, Any]:
        return {"question": self.item, "share": round(self.share, 3), "source": self.source, "file": self.file,
                "row": self.row, "excerpt": self.excerpt}  # fmt: skip

    def __str__(self) -> str:
        return f"question {self.item}: {self.share:.0%} of it in {self.file}:{self.row} ({self.excerpt!r})"


def open_training_data(place: Path) -> Prepared:
    data = place / "data.json"
    folder = Path(json.loads(data.read_text())["folder"]) if data.exists() else None
    if folder is None or not (folder / "prepared.json").exists():
        raise UserError(f"--contamination: {place} has no prepared training data here: give the folder of a run")
    return open_prepared(folder)


def find_matches(
    data: Prepared, texts: Sequence[str], report: ProgressReport = silent
) -> tuple[list[Match], list[int]]:
    """The best document of each contaminated question, and the questions that are too short to judge."""
    items = [EvaluationItem("questions", str(number), text) for number, text in enumerate(texts)]
    index = build_index(items, ("questions",), NGRAM, max(COMMON, len(items) // 100))
    grams = np.bincount(index.item, minlength=len(items))
    best: dict[int, Match] = {}
    for source, documents, batch in _training_texts(data, report):
        for document, item, count, word in _hits(index, batch):
            share = count / grams[item]
            if share >= SHARE and (item not in best or share > best[item].share):
                origin = data.train[source].origin_of_document(documents[document])
                excerpt = extract_words(batch[document], word, 12)
                best[item] = Match(item, float(share), source, origin.file, int(origin.row), excerpt)
    short = [number for number in range(len(items)) if not grams[number]]
    return [best[item] for item in sorted(best)], short


def _training_texts(data: Prepared, report: ProgressReport) -> Iterator[tuple[str, list[int], list[str]]]:
    total, done = sum(store.documents for store in data.train.values()), 0
    for name, store in data.train.items():
        for first in range(0, store.documents, AT_ONCE):
            numbers = np.arange(first, min(first + AT_ONCE, store.documents))
            report("searching the training data", done, total)
            done += len(numbers)
            pairs = zip(*store.extents(numbers), strict=True)
            texts = [data.tokenizer.decode(store.slice(int(start), int(stop)).tolist()) for start, stop in pairs]
            yield name, numbers.tolist(), texts


def _hits(index: EvaluationIndex, texts: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """(document, item, its different n-grams in the document, word at which the first begins)."""
    matches: dict[tuple[int, int], dict[int, int]] = {}
    for block in shingles(texts, "word", NGRAM, brief=False):
        at, grams = index.find(block.hashes)
        segment = np.searchsorted(block.starts, at, side="right") - 1
        words = at - block.starts[segment] + block.first[segment]
        owners = block.documents[segment]
        for document, gram, word in zip(owners.tolist(), grams.tolist(), words.tolist(), strict=True):
            for item in index.item[index.start[gram] : index.start[gram + 1]].tolist():
                matches.setdefault((document, item), {}).setdefault(gram, word)
    for (document, item), words_of in matches.items():
        yield document, item, len(words_of), min(words_of.values())


def mark_contaminated(result: Evaluation, place: Path, report: ProgressReport = silent) -> dict[str, Any]:
    """Marks the questions of each task that the run trained on; returns share, examples and lines to print."""
    data, facts = open_training_data(place), {}
    for task in dict.fromkeys(each.task for each in result.results):
        own = [each for each in result.results if each.task == task and each.samples]
        if not own or len(own[0].samples) != len(own[0].ids):
            continue
        matches, short = find_matches(data, [_text(row["doc"]) for row in own[0].samples], report)
        for each in own:
            each.contaminated = [match.item for match in matches]
        count = len(own[0].ids)
        lines = [f"{len(matches):,} of {count:,} questions are in the training data ({len(matches) / count:.1%})"]
        lines += [str(match) for match in matches[:EXAMPLES]]
        lines += [f"{len(short):,} are shorter than {NGRAM} words and were not judged"] if short else []
        examples = [match.to_json() for match in matches]
        facts[task] = {"share": len(matches) / count, "matches": examples, "too_short": len(short), "lines": lines}
    return facts


def _text(doc: Any) -> str:
    """The longest text of a question's row: the question or its passage. A crawl rarely has the wrong choices too."""
    texts = [value for value in doc.values() if isinstance(value, str)] if isinstance(doc, dict) else []
    return max(texts, key=len, default=_all_text(doc))


def _all_text(doc: Any) -> str:
    if isinstance(doc, str):
        return doc
    values = doc.values() if isinstance(doc, dict) else doc if isinstance(doc, list | tuple) else ()
    return "\n".join(filter(None, map(_all_text, values)))
