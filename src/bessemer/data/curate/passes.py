"""One reading of one part: the documents go through the steps that are due, and everything found is written down.
This is what a worker does. A pass ends where a step has to see the whole corpus first (it then collects), or at the
end of the list (it then takes the census). So a corpus is read once, and once more for every global step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bessemer.data.curate import ledger as files
from bessemer.data.curate.ledger import (
    LENGTH_BINS,
    DocumentChange,
    LedgerWriter,
    StepCounts,
    byte_length,
    counts_path,
    ledger_path,
    quarantine_path,
    read_touches,
    text_hash,
    write_json,
)
from bessemer.data.curate.step import Drop, GlobalStep, LocalStep, is_global, make_step
from bessemer.data.document import BadRow, Document
from bessemer.data.read import SourcePart, read_part
from bessemer.spec.curate.step import StepSpec
from bessemer.spec.data import SourceSpec
from bessemer.storage import commit_file, temporary_path

_BATCH_CHARS = 1 << 20  # documents that go through the steps together
_BATCH_DOCUMENTS = 1024
_SHOWN_BAD_ROWS = 5


@dataclass(frozen=True)
class Op:
    """A step that is due on a part. `ruling` is the file of a global step's ruling on it."""

    spec: StepSpec
    key: str  # of its ledger
    ruling: str | None = None


@dataclass(frozen=True)
class Split:
    """How documents are divided into training and validation: by a hash of their text."""

    seed: int
    share: float


@dataclass(frozen=True)
class PassTask:
    """One part's pass; everything a worker has to be told."""

    part: SourcePart
    source: SourceSpec
    cache: Path
    read_key: str
    done: tuple[str, ...]  # ledgers to apply first
    ops: tuple[Op, ...]
    collect: Op | None  # its key names the collected arrays
    census: tuple[str, Split] | None
    copies: Path | None = None  # where remote files are kept

    @property
    def name(self) -> str:
        return f"source {self.part.source!r}, {self.part.name}"


@dataclass
class Reading:
    """What reading a part gave."""

    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    undecodable: int = 0  # documents with a `decode_error`
    undecodable_files: list[str] = field(default_factory=list)  # the first few, with the error


@dataclass
class Census:
    """What is left of a part after the last step."""

    documents: int = 0
    text_bytes: int = 0
    held_out: int = 0
    lowest: int = 2**64  # of the hashes that the split goes by
    highest: int = -1
    lengths: list[int] = field(default_factory=lambda: [0] * LENGTH_BINS)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Entry:
    """A document on its way through the steps."""

    ordinal: int
    document: Document
    size_bytes: int


def run_pass(task: PassTask) -> tuple[Reading, Census | None]:
    """Reads the part, runs what is due, commits. Killed at any moment, it leaves nothing that is taken for done."""
    with files.naming(task.name, task.cache):
        reading = Reading()
        steps = [make_step(op.spec, 0) for op in task.ops]
        rulings = [files.load_arrays(Path(op.ruling)) if op.ruling else {} for op in task.ops]
        writers = [LedgerWriter(ledger_path(task.cache, op.key)) for op in task.ops]
        collecting = make_step(task.collect.spec, 0) if task.collect else None
        gathered: dict[str, list[Any]] = {}
        census = Census() if task.census else None
        try:
            for batch in _batches(_documents(task, reading)):
                for step, ruling, writer in zip(steps, rulings, writers, strict=True):
                    batch = _run_step(step, ruling, batch, writer)
                # A part of which nothing is left has no arrays.
                if collecting is not None and batch:
                    assert is_global(collecting)
                    for name, array in collecting.collect(*_columns(batch)).items():
                        gathered.setdefault(name, []).append(array)
                if census is not None and task.census is not None:
                    _count(census, batch, task.census[1])
            for writer in writers:
                writer.commit()
        except BaseException:
            for writer in writers:
                writer.discard()
            raise
        if task.collect is not None:
            arrays = {name: np.concatenate(some) for name, some in gathered.items()}
            files.save_arrays(files.collected_path(task.cache, task.collect.key), arrays)
        if census is not None and task.census is not None:
            write_json(counts_path(task.cache, task.census[0]), dataclasses.asdict(census))
        return reading, census


def curated_documents(
    part: SourcePart, source: SourceSpec, cache: Path, ledgers: Sequence[str], copies: Path | None = None
) -> Iterator[tuple[int, Document]]:
    """The documents of a part after the steps of `ledgers`, each with its ordinal in the part as it was read."""
    cursors = [_Cursor(ledger_path(cache, key)) for key in ledgers]
    ordinal = -1
    for document in read_part(part, source, copies):
        if isinstance(document, BadRow):
            continue
        ordinal += 1
        if all(cursor.pass_on(ordinal, document) for cursor in cursors):
            yield ordinal, document


class _Cursor:
    """Goes through a ledger beside the documents."""

    def __init__(self, path: Path) -> None:
        self._touches = read_touches(path)
        self._next = next(self._touches, None)

    def pass_on(self, ordinal: int, document: Document) -> bool:
        """False where the step dropped the document; otherwise the document is as the step left it."""
        touch = self._next
        while touch is not None and touch.ordinal < ordinal:
            touch = next(self._touches, None)
        self._next = touch
        if touch is None or touch.ordinal != ordinal:
            return True
        if touch.drop:
            return False
        if touch.text is not None:
            document.text = touch.text
        if touch.messages is not None:
            document.messages = json.loads(touch.messages)
        if touch.labels is not None:
            document.labels.update(json.loads(touch.labels))
        return True


def _documents(task: PassTask, reading: Reading) -> Iterator[tuple[int, Document]]:
    """As `curated_documents`, and what could not be read is set aside and counted."""
    cursors = [_Cursor(ledger_path(task.cache, key)) for key in task.done]
    quarantine = quarantine_path(task.cache, task.read_key)
    quarantine.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(quarantine)
    empty: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        aside = None
        stack.callback(temporary.unlink, missing_ok=True)
        for row in read_part(task.part, task.source, task.copies, empty):
            if isinstance(row, BadRow):
                reading.bad += 1
                line = dataclasses.asdict(row)
                if len(reading.examples) < _SHOWN_BAD_ROWS:
                    reading.examples.append(line)
                if aside is None:
                    aside = stack.enter_context(open(temporary, "w", encoding="utf-8"))
                aside.write(json.dumps(line, ensure_ascii=False) + "\n")
                continue
            ordinal = reading.documents
            reading.documents += 1
            reading.text_bytes += byte_length(row.text)
            if row.decode_error:
                reading.undecodable += 1
                if len(reading.undecodable_files) < _SHOWN_BAD_ROWS:
                    reading.undecodable_files.append(f"{row.file}: {row.decode_error}")
            if all(cursor.pass_on(ordinal, row) for cursor in cursors):
                yield ordinal, row
        reading.empty = empty["empty"]
        if aside is not None:
            aside.close()
            commit_file(temporary, quarantine)
    write_json(counts_path(task.cache, task.read_key), dataclasses.asdict(reading))


def _batches(documents: Iterator[tuple[int, Document]]) -> Iterator[list[_Entry]]:
    batch: list[_Entry] = []
    chars = 0
    for ordinal, document in documents:
        batch.append(_Entry(ordinal, document, byte_length(document.text)))
        chars += len(document.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _columns(batch: Sequence[_Entry]) -> tuple[list[Document], npt.NDArray[np.int64]]:
    return [one.document for one in batch], np.array([one.ordinal for one in batch], np.int64)


def _run_step(
    step: LocalStep | GlobalStep, ruling: dict[str, Any], batch: list[_Entry], writer: LedgerWriter
) -> list[_Entry]:
    """Applies one step to a batch in place, writes what it touched, and returns what it kept."""
    (documents, ordinals), tally = _columns(batch), writer.tally
    before = [dict(document.labels) for document in documents]
    if is_global(step):
        outcomes = step.apply(documents, ordinals, ruling)
    else:
        outcomes = cast(LocalStep, step).apply(documents)
    assert len(outcomes) == len(documents), "a step gives one outcome for each document"
    tally.documents_in += len(documents)
    tally.bytes_in += sum(one.size_bytes for one in batch)
    kept: list[_Entry] = []
    for one, outcome, known in zip(batch, outcomes, before, strict=True):
        document = one.document
        if isinstance(outcome, str) and not outcome.strip():
            outcome = Drop("nothing left of it")
        if isinstance(outcome, Drop):
            tally.dropped(document, outcome, one.size_bytes)
            writer.add(DocumentChange(one.ordinal, True, None, None, None))
            continue
        messages = None
        if outcome is not None and document.messages is not None:
            messages = _change_messages(step, document)
            outcome = document.text
        if outcome is not None:
            document.text = outcome
            one.size_bytes = byte_length(outcome)
            tally.changed += 1
        labels = {name: value for name, value in document.labels.items() if known.get(name) != value}
        if labels:
            tally.labelled(labels)
        if outcome is not None or labels:
            found = json.dumps(labels, ensure_ascii=False, sort_keys=True) if labels else None
            writer.add(DocumentChange(one.ordinal, False, outcome, messages, found))
        kept.append(one)
    tally.documents_out += len(kept)
    tally.bytes_out += sum(one.size_bytes for one in kept)
    return kept


def _change_messages(step: LocalStep | GlobalStep, document: Document) -> str | None:
    """A conversation is changed message by message, so that roles and turns stay. A message that a step would drop
    stays as it is: only a whole conversation can go."""
    assert document.messages is not None
    if is_global(step):
        return None  # what is cut out of the joined text cannot be given back to the turns
    for message in document.messages:
        alone = Document(message["content"], document.file, document.row, document.id, document.url)
        [outcome] = cast(LocalStep, step).apply([alone])
        if isinstance(outcome, str):
            message["content"] = outcome
    document.text = "\n\n".join(message["content"] for message in document.messages)
    return json.dumps(document.messages, ensure_ascii=False)


def _count(census: Census, batch: Sequence[_Entry], split: Split) -> None:
    limit = int(split.share * 2**64)
    tally = StepCounts(labels=census.labels)
    for one in batch:
        text = one.document.text
        key = text_hash(text, split.seed)
        census.documents += 1
        census.text_bytes += one.size_bytes
        census.held_out += key < limit
        census.lowest, census.highest = min(census.lowest, key), max(census.highest, key)
        census.lengths[min(len(text).bit_length(), LENGTH_BINS - 1)] += 1
        tally.labelled(one.document.labels)
