"""One pass of a worker over one part: the documents go through the due steps, and the results are written to the cache.
A pass ends where a step must see the whole corpus first (it then collects), or at the end of the list (it then takes
the census). So a corpus is read once, plus once per global step."""

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

from bessemer.data.curate import ledger
from bessemer.data.curate.ledger import LENGTH_BINS, DocumentChange, LedgerWriter, StepCounts, byte_length, ledger_path
from bessemer.data.curate.step import Drop, GlobalStep, LocalStep, is_global, make_step
from bessemer.data.read import SourcePart, read_part
from bessemer.data.read.entry import BadRow, Document
from bessemer.spec.data import SourceSpec
from bessemer.spec.text_steps import StepSpec
from bessemer.storage import commit_file, temporary_path

_BATCH_CHARS = 1 << 20  # per batch of documents
_BATCH_DOCUMENTS = 1024
_MAX_EXAMPLES = 5


@dataclass(frozen=True)
class StepTask:
    """A step due on a part. `decisions` is the file of a global step's decisions about the part."""

    spec: StepSpec
    key: str  # of its ledger
    decisions: str | None = None


@dataclass(frozen=True)
class ValidationSplit:
    """How documents are divided into training and validation: by a hash of their text."""

    seed: int
    share: float


@dataclass(frozen=True)
class PassTask:
    """Everything a worker needs for one pass over a part."""

    part: SourcePart
    source: SourceSpec
    cache: Path
    read_key: str
    done: tuple[str, ...]  # ledger keys to apply first
    ops: tuple[StepTask, ...]
    collect: StepTask | None  # its key names the collected arrays
    census: tuple[str, ValidationSplit] | None
    copies: Path | None = None  # cache of remote files

    @property
    def name(self) -> str:
        return f"source {self.part.source!r}, {self.part.name}"


@dataclass
class ReadCounts:
    """What reading a part gave."""

    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    undecodable: int = 0  # documents with a `decode_error`
    undecodable_files: list[str] = field(default_factory=list)  # the first few, with their error


@dataclass
class Census:
    """What is left of a part after the last step."""

    documents: int = 0
    text_bytes: int = 0
    held_out: int = 0
    lowest: int = 2**64  # of the hashes that decide the split
    highest: int = -1
    lengths: list[int] = field(default_factory=lambda: [0] * LENGTH_BINS)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class _BatchItem:
    """A document on its way through the steps."""

    ordinal: int
    document: Document
    size_bytes: int


def run_pass(task: PassTask) -> tuple[ReadCounts, Census | None]:
    """Reads the part, runs the due steps and commits. Killed at any moment, it leaves nothing that counts as done."""
    with ledger.name_in_errors(task.name, task.cache):
        reading = ReadCounts()
        steps = [make_step(op.spec, 0) for op in task.ops]
        step_decisions = [ledger.load_arrays(Path(op.decisions)) if op.decisions else {} for op in task.ops]
        writers = [LedgerWriter(ledger_path(task.cache, op.key)) for op in task.ops]
        collector = make_step(task.collect.spec, 0) if task.collect else None
        collected: dict[str, list[Any]] = {}
        census = Census() if task.census else None
        try:
            for batch in _batches(_read_and_count(task, reading)):
                for step, decisions, writer in zip(steps, step_decisions, writers, strict=True):
                    batch = _run_step(step, decisions, batch, writer)
                # A part with no documents left has no arrays.
                if collector is not None and batch:
                    assert is_global(collector)
                    for name, array in collector.collect(*_columns(batch)).items():
                        collected.setdefault(name, []).append(array)
                if census is not None and task.census is not None:
                    _update_census(census, batch, task.census[1])
            for writer in writers:
                writer.commit()
        except BaseException:
            for writer in writers:
                writer.discard()
            raise
        if task.collect is not None:
            arrays = {name: np.concatenate(blocks) for name, blocks in collected.items()}
            ledger.save_arrays(ledger.collected_path(task.cache, task.collect.key), arrays)
        if census is not None and task.census is not None:
            ledger.write_json(ledger.counts_path(task.cache, task.census[0]), dataclasses.asdict(census))
        return reading, census


def read_curated_documents(
    part: SourcePart, source: SourceSpec, cache: Path, ledgers: Sequence[str], copies: Path | None = None
) -> Iterator[tuple[int, Document]]:
    """The documents of a part after the steps of `ledgers`, each with its ordinal in the part as read."""
    cursors = [_Cursor(ledger_path(cache, key)) for key in ledgers]
    ordinal = -1
    for document in read_part(part, source, copies):
        if isinstance(document, BadRow):
            continue
        ordinal += 1
        if all(cursor.apply(ordinal, document) for cursor in cursors):
            yield ordinal, document


class _Cursor:
    """Reads a ledger in step with the documents."""

    def __init__(self, path: Path) -> None:
        self._changes = ledger.read_changes(path)
        self._next = next(self._changes, None)

    def apply(self, ordinal: int, document: Document) -> bool:
        """False where the step dropped the document; otherwise applies the step's changes to it."""
        change = self._next
        while change is not None and change.ordinal < ordinal:
            change = next(self._changes, None)
        self._next = change
        if change is None or change.ordinal != ordinal:
            return True
        if change.drop:
            return False
        if change.text is not None:
            document.text = change.text
        if change.messages is not None:
            document.messages = json.loads(change.messages)
        if change.labels is not None:
            document.labels.update(json.loads(change.labels))
        return True


def _read_and_count(task: PassTask, reading: ReadCounts) -> Iterator[tuple[int, Document]]:
    """As `read_curated_documents`, but also counts what was read and writes unusable rows to quarantine."""
    cursors = [_Cursor(ledger_path(task.cache, key)) for key in task.done]
    quarantine = ledger.quarantine_path(task.cache, task.read_key)
    quarantine.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(quarantine)
    empty: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        file = None
        stack.callback(temporary.unlink, missing_ok=True)
        for row in read_part(task.part, task.source, task.copies, empty):
            if isinstance(row, BadRow):
                reading.bad += 1
                line = dataclasses.asdict(row)
                if len(reading.examples) < _MAX_EXAMPLES:
                    reading.examples.append(line)
                if file is None:
                    file = stack.enter_context(open(temporary, "w", encoding="utf-8"))
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                continue
            ordinal = reading.documents
            reading.documents += 1
            reading.text_bytes += byte_length(row.text)
            if row.decode_error:
                reading.undecodable += 1
                if len(reading.undecodable_files) < _MAX_EXAMPLES:
                    reading.undecodable_files.append(f"{row.file}: {row.decode_error}")
            if all(cursor.apply(ordinal, row) for cursor in cursors):
                yield ordinal, row
        reading.empty = empty["empty"]
        if file is not None:
            file.close()
            commit_file(temporary, quarantine)
    ledger.write_json(ledger.counts_path(task.cache, task.read_key), dataclasses.asdict(reading))


def _batches(documents: Iterator[tuple[int, Document]]) -> Iterator[list[_BatchItem]]:
    batch: list[_BatchItem] = []
    chars = 0
    for ordinal, document in documents:
        batch.append(_BatchItem(ordinal, document, byte_length(document.text)))
        chars += len(document.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _columns(batch: Sequence[_BatchItem]) -> tuple[list[Document], npt.NDArray[np.int64]]:
    return [item.document for item in batch], np.array([item.ordinal for item in batch], np.int64)


def _run_step(
    step: LocalStep | GlobalStep, decisions: dict[str, Any], batch: list[_BatchItem], writer: LedgerWriter
) -> list[_BatchItem]:
    """Applies one step to a batch in place, writes its changes, and returns what it kept."""
    (documents, ordinals), counts = _columns(batch), writer.counts
    before = [dict(document.labels) for document in documents]
    if is_global(step):
        outcomes = step.apply(documents, ordinals, decisions)
    else:
        outcomes = cast(LocalStep, step).apply(documents)
    assert len(outcomes) == len(documents), "a step gives one outcome for each document"
    counts.documents_in += len(documents)
    counts.bytes_in += sum(item.size_bytes for item in batch)
    kept_items: list[_BatchItem] = []
    for item, outcome, labels_before in zip(batch, outcomes, before, strict=True):
        document = item.document
        if isinstance(outcome, str) and not outcome.strip():
            outcome = Drop("nothing left of it")
        if isinstance(outcome, Drop):
            counts.dropped(document, outcome, item.size_bytes)
            writer.add(DocumentChange(item.ordinal, True, None, None, None))
            continue
        messages = None
        if outcome is not None and document.messages is not None:
            messages = _change_messages(step, document)
            outcome = document.text
        if outcome is not None:
            document.text = outcome
            item.size_bytes = byte_length(outcome)
            counts.changed += 1
        labels = {name: value for name, value in document.labels.items() if labels_before.get(name) != value}
        if labels:
            counts.labelled(labels)
        if outcome is not None or labels:
            label_json = json.dumps(labels, ensure_ascii=False, sort_keys=True) if labels else None
            writer.add(DocumentChange(item.ordinal, False, outcome, messages, label_json))
        kept_items.append(item)
    counts.documents_out += len(kept_items)
    counts.bytes_out += sum(item.size_bytes for item in kept_items)
    return kept_items


def _change_messages(step: LocalStep | GlobalStep, document: Document) -> str | None:
    """Changes a conversation message by message, which keeps roles and turns. A message that a step would drop is
    unchanged: only a whole conversation can be dropped."""
    assert document.messages is not None
    if is_global(step):
        return None  # cuts in the joined text cannot be mapped back to turns
    for message in document.messages:
        alone = Document(message["content"], document.file, document.row, document.id, document.url)
        [outcome] = cast(LocalStep, step).apply([alone])
        if isinstance(outcome, str):
            message["content"] = outcome
    document.text = "\n\n".join(message["content"] for message in document.messages)
    return json.dumps(document.messages, ensure_ascii=False)


def _update_census(census: Census, batch: Sequence[_BatchItem], split: ValidationSplit) -> None:
    limit = int(split.share * 2**64)
    label_counts = StepCounts(labels=census.labels)
    for item in batch:
        text = item.document.text
        key = ledger.hash_text(text, split.seed)
        census.documents += 1
        census.text_bytes += item.size_bytes
        census.held_out += key < limit
        census.lowest, census.highest = min(census.lowest, key), max(census.highest, key)
        census.lengths[min(len(text).bit_length(), LENGTH_BINS - 1)] += 1
        label_counts.labelled(item.document.labels)
