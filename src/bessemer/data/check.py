"""`bessemer data check`: reads the files once and reports problems, with places and fixes, before training.

Memory grows by 20 bytes per document, to find copies.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.data.chat_checks import RowSource, TokenizerConfig, check_rows
from bessemer.data.chat_rows import FIRST_CONVERSATIONS, ChatRow, RowCounts, RowSample, has_system, render_document
from bessemer.data.curate.ledger import hash_text
from bessemer.data.read import FileEntry, SourcePart, divide_source, list_files, read_part
from bessemer.data.read.compression import READ_ERRORS, open_decompressed
from bessemer.data.read.entry import BadRow, Document
from bessemer.data.read.rows import detect_wide_encoding
from bessemer.data.tokenizer.chat import find_problems, find_template
from bessemer.data.tokenizer.labelled import LabelReader
from bessemer.errors import UserError
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.data import SourceSpec

if TYPE_CHECKING:
    from bessemer.data.tokenizer.tokenizer import Tokenizer

ENORMOUS_CHARS = 1_000_000
_EXAMPLES = 3
_EXCERPT_CHARS = 100
_SCHEMA_ROWS = 2000  # of each JSONL file, whose fields are compared
_SCHEMA_FIELDS = 500  # where rows have ids for keys there is no end of them
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")
_NUMBERS = re.compile(r"(?<![\w-])\d+")


@dataclass
class Problem:
    """One kind of problem: how often it occurs, where, and the fix."""

    what: str
    count: int = 0
    examples: list[str] = field(default_factory=list)
    fix: str = ""


@dataclass
class CheckReport:
    """The files that were read and their problems, the most frequent first."""

    files: int = 0
    documents: int = 0
    characters: int = 0
    notes: list[str] = field(default_factory=list)  # which files are read and which are not
    problems: list[Problem] = field(default_factory=list)
    rows: list[ChatRow] = field(default_factory=list)  # a sample of the rendered conversations

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(replace(self, rows=[])).items() if name != "rows"}


class _Problems:
    """Counts problems by their description, with the first places."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Problem] = {}

    def add(self, what: str, fix: str, place: str, detail: str = "", count: int = 1) -> None:
        problem = self.by_kind.setdefault(what, Problem(what, fix=fix))
        problem.count += count
        if len(problem.examples) < _EXAMPLES:
            shown = " ".join(detail.split())[:_EXCERPT_CHARS]
            problem.examples.append(f"{place}: {shown}" if shown else place)


def check_files(
    source: SourceSpec,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    template: str = "chatml",
    progress: Callable[[str], None] | None = None,
    config: TokenizerConfig | None = None,
    classify: ClassifySpec | None = None,
) -> CheckReport:
    """Reads all documents of a source and reports their problems.

    With a tokenizer, conversations are also rendered and get the named checks of fine-tuning rows (`chat_checks`),
    for rows of `context` tokens if that is given. `config` is of the model that they are for. With `classify` the
    labels of the rows are checked.
    """
    listing: list[str] = []
    notes = _Problems()
    missing_fix = "mount the volume or restore the file that it points to, delete it, or exclude it"
    files = list_files(
        source,
        listing.append,
        lambda path, reason: notes.add("skipped: not a readable file", missing_fix, path, reason),
    )
    report = CheckReport(files=len(files), notes=listing)
    unread = dict.fromkeys(file.name for file in files)
    _compare_schemas(files, source, notes)
    copies = _Copies()
    conversations = _Conversations(tokenizer, context, template, config) if tokenizer else None
    labels = _Labels(classify) if classify else None
    for part in divide_source("", files, source):
        if progress:
            progress(f"reading {part.name}")
        for document in _read(part, source, notes, unread):
            report.documents += 1
            report.characters += len(document.text)
            copies.add(document)
            _check_text(document, notes)
            if labels:
                labels.add(document, notes)
            if document.messages is not None:
                _check_conversation(document, conversations, notes)
    copies.report(notes)
    if labels:
        labels.report(notes)
    if conversations:
        report.rows = conversations.report(notes)
    for name in unread:
        notes.add("file without a document", "fill it, leave it out, or set text_field or format", name)
    report.problems = sorted(notes.by_kind.values(), key=lambda problem: -problem.count)
    return report


def _read(part: SourcePart, source: SourceSpec, notes: _Problems, unread: dict[str, None]) -> Iterator[Document]:
    """The documents of a part. Files with a document or a problem are removed from `unread`."""
    tally: Counter[str] = Counter()
    try:
        for row in read_part(part, source, None, tally):
            unread.pop(row.file, None)
            if isinstance(row, BadRow):
                reason = _NUMBERS.sub("N", row.reason)  # the same problem at another column is one kind
                notes.add(f"unreadable row: {reason.partition('; ')[0]}", row.reason.partition("; ")[2] or
                          "correct or delete these rows", f"{row.file}:{row.row}", row.raw)  # fmt: skip
            else:
                yield row
    except UserError as error:
        for piece in part.pieces:
            unread.pop(piece.file.name, None)
        if isinstance(error.__cause__, READ_ERRORS):
            notes.add("unreadable file", "restore it or leave it out", part.name, str(error))
        else:  # readable, but not with this source's settings
            what, _, fix = str(error).partition("; ")
            notes.add(what.rpartition(": ")[2], fix or "correct the file or leave it out", part.name)
    if tally["empty"]:
        fix = "they are skipped; delete them, or set text_field if the text is in another field"
        notes.add("empty document", fix, part.name, count=tally["empty"])


def _check_text(document: Document, notes: _Problems) -> None:
    text, place = document.text, document.place
    if len(text) > ENORMOUS_CHARS:
        fix = f"cut them up, or drop them with `- length: {{max_chars: {ENORMOUS_CHARS}}}`"
        notes.add(f"enormous document (over {ENORMOUS_CHARS:,} characters)", fix, place, f"{len(text):,} characters")
    if document.decode_error:
        what = document.decode_error.partition(" (")[0]
        fix = "convert the file to UTF-8, such as with iconv -f LATIN1 -t UTF-8, or leave it out if it is not text"
        notes.add(what, fix, document.file, document.decode_error)
    elif "�" in text:
        fix = "the file was read in a wrong encoding once: export it again as UTF-8"
        notes.add("lost characters (U+FFFD)", fix, place, _around(text, text.index("�")))
    elif match := _MOJIBAKE.search(text):
        fix = "repair it with the step `unicode`"
        notes.add("mojibake (text read in a wrong encoding)", fix, place, _around(text, match.start()))
    if "\0" in text and (encoding := detect_wide_encoding(text[:_EXCERPT_CHARS].encode())):
        fix = f"convert it to UTF-8, such as with iconv -f {encoding} -t UTF-8"
        notes.add(f"text in {encoding} without a byte-order mark", fix, place)
    elif match := _CONTROL.search(text):
        fix = "remove them with the step `unicode`"
        notes.add("control characters", fix, place, repr(_around(text, match.start())))


# UTF-8 that was read as Latin-1 or cp1252: a lead byte's letter, then continuation bytes' signs.
_SIGN = "[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"  # continuation bytes
_MOJIBAKE = re.compile(
    "Â[\xa0-\xbf]"  # the signs of Latin-1; its controls are in no text
    f"|Ã(?![\xa0»›’”…–—]){_SIGN}|Ã[»›’”…–—](?=\\w)|(?<![A-Z])Ã\xa0"  # but a word may end so: “IRMÔ
    f"|â€{_SIGN}|ðŸ{_SIGN}{{2}}"  # quotes and dashes; emoji
    "|[\xc2-\xf4][\x80-\x9f]"  # a letter, then a control: read as Latin-1
    f"|(?:[\xc3-\xdf]{_SIGN}){{2}}|(?:[\xe0-\xef]{_SIGN}{{2}}){{2}}"  # two letters of another script
)


def _around(text: str, at: int) -> str:
    return text[max(0, at - 30) : at + 30]


def _check_conversation(document: Document, conversations: _Conversations | None, notes: _Problems) -> None:
    assert document.messages is not None
    errors = find_problems(document.messages)
    for error in errors:
        name, _, where = error.partition(": ")
        notes.add(f"conversation: {name}", "correct or delete these conversations", document.place, where)
    if not errors and conversations:
        conversations.add(document, notes)


class _Conversations:
    """Renders conversations as they would be trained, for the named checks."""

    def __init__(
        self, tokenizer: Tokenizer, context: int | None, template: str, config: TokenizerConfig | None
    ) -> None:
        self.tokenizer, self.context, self.template, self.config = tokenizer, context, template, config
        self.sample, self.counts = RowSample(), RowCounts()
        find_template(template, tokenizer)  # an unusable template is not a conversation's problem
        self.system_places: list[str] = []

    def add(self, document: Document, notes: _Problems) -> None:
        if has_system(document.messages) and len(self.system_places) < FIRST_CONVERSATIONS:
            self.system_places.append(document.place)
        try:
            rows = list(render_document(document, self.tokenizer, self.template, "all"))
        except UserError as error:
            what, _, fix = str(error).partition("; ")
            notes.add(what, fix or "correct the template", document.place)
            return
        for row in rows:
            self.sample.add(row)
            self.counts.add(row, self.context)

    def report(self, notes: _Problems) -> list[ChatRow]:
        """Adds the mistakes; returns the sample."""
        rows = self.sample.rows()
        source = RowSource(
            self.tokenizer, rows, self.sample.count, self.counts, self.context, self.template,
            self.config or TokenizerConfig(), system_places=self.system_places,
        )  # fmt: skip
        for mistake in check_rows(source):
            problem = Problem(f"{mistake.what} [{mistake.name}]", mistake.count, mistake.places, mistake.fix)
            notes.by_kind[mistake.name] = problem
        return rows


class _Labels:
    """Reads the labels of rows, and counts how often each occurs."""

    def __init__(self, classify: ClassifySpec) -> None:
        self.reader, self.names = LabelReader(classify), classify.labels
        self.several = classify.problem == "multi"
        self.counts, self.rows = np.zeros(len(classify.labels), np.int64), 0

    def add(self, document: Document, notes: _Problems) -> None:
        try:
            numbers = self.reader.read(document)
        except UserError as error:
            what, _, fix = str(error).removeprefix(f"{document.place}: ").partition("; ")
            notes.add(what, fix or "correct the label, or delete the row", document.place)
            return
        self.rows += 1
        if self.names:
            numbers = np.flatnonzero(numbers) if self.several else numbers[numbers >= 0]
            self.counts += np.bincount(numbers, minlength=len(self.names))

    def report(self, notes: _Problems) -> None:
        if not self.rows or not self.names:
            return
        fix = "the model cannot learn it: add rows, or remove it from classify.labels"
        for name, count in zip(self.names, self.counts.tolist(), strict=True):
            if count == 0:
                notes.add(f"label {name!r} occurs in no row", fix, f"{self.rows:,} rows with a label")
            elif count == self.counts.sum() and not self.several:
                notes.add(f"every label is {name!r}", "add rows with other labels", f"{count:,} labels")


class _Copies:
    """Finds documents that are equal except for white space, like `dedup_exact`."""

    def __init__(self) -> None:
        self._hashes: list[np.ndarray[Any, Any]] = []
        self._waiting: list[tuple[int, int, int]] = []
        self._files: dict[str, int] = {}

    def add(self, document: Document) -> None:
        number = self._files.setdefault(document.file, len(self._files))
        key = hash_text(" ".join(document.text.split()), 0)
        self._waiting.append((key, number, document.row))
        if len(self._waiting) >= 1 << 16:
            self._flush()

    def report(self, notes: _Problems) -> None:
        self._flush()
        if not self._hashes:
            return
        rows = np.concatenate(self._hashes)
        _, first, inverse = np.unique(rows["key"], return_index=True, return_inverse=True)
        names = list(self._files)
        for i in np.flatnonzero(first[inverse] != np.arange(rows.size)).tolist():
            copy, original = rows[i], rows[first[inverse[i]]]
            notes.add(
                "copy of an earlier document",
                "drop copies with the step `dedup_exact` (near copies too with `dedup_minhash`)",
                f"{names[copy['file']]}:{copy['row']}",
                f"is {names[original['file']]}:{original['row']}",
            )

    def _flush(self) -> None:
        if self._waiting:
            kind = np.dtype([("key", "<u8"), ("file", "<u4"), ("row", "<u8")])
            self._hashes.append(np.array(self._waiting, kind))
            self._waiting = []


def _compare_schemas(files: Sequence[FileEntry], source: SourceSpec, notes: _Problems) -> None:
    """Reports fields that only some rows have, or that have several types."""
    kinds: dict[str, Counter[str]] = {}
    places: dict[tuple[str, str], str] = {}
    lacking: dict[str, str] = {}  # the first row without a field
    rows, first = 0, ""
    for file in files:
        if file.format != "jsonl":
            continue
        for row, record in _first_records(file, source):
            place = f"{file.name}:{row}"
            rows, first = rows + 1, first or place
            for name in kinds:
                if name not in record:
                    lacking.setdefault(name, place)
            for name, value in record.items():
                if name not in kinds:
                    if len(kinds) >= _SCHEMA_FIELDS:
                        continue
                    if rows > 1:
                        lacking[name] = first
                kind = "number" if type(value) in (int, float) else type(value).__name__
                kinds.setdefault(name, Counter())[kind] += 1
                places.setdefault((name, kind), place)
    for name, counts in kinds.items():
        typed = {kind: count for kind, count in counts.items() if kind != "NoneType"}
        if len(typed) > 1:
            rarest = min(typed, key=lambda kind: typed[kind])
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(typed.items()))
            what = f"mixed types in field {name!r}"
            notes.add(what, "write one type", places[name, rarest], listed, typed[rarest])
        wanted = name in (source.text_field, source.id_field, source.url_field, source.messages_field)
        missing = rows - sum(counts.values())
        # A rare field is optional; a rarely missing one is a mistake.
        if missing and not wanted and missing < rows / 2:
            fix = "mixed schemas: check where these rows come from"
            notes.add(f"rows without field {name!r}", fix, lacking[name], count=missing)


def _first_records(file: FileEntry, source: SourceSpec) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open_decompressed(file, source.storage, None) as opened:
            for row, line in zip(range(1, _SCHEMA_ROWS + 1), opened, strict=False):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # reported when the documents are read
                if isinstance(record, dict):
                    yield row, record
    except READ_ERRORS:
        return  # likewise reported later
