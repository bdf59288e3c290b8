"""Exclusion lists: documents that a trial convicted, in a file that later runs can read.

A list has one JSON line for each document, with file and row. A stream bans (source, document index), which differs
between stores: `banned_documents` finds it. Banned documents keep their place in the stream with weight zero.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.data.store.format import Strings
from bessemer.data.store.shard import Shard
from bessemer.data.stream.rows import Ints, Rows, StoreRows
from bessemer.errors import UserError
from bessemer.run.journal import json_ready
from bessemer.storage import write_atomic

FILE_NAME = "exclusions.jsonl"  # in the run's folder
EXCERPT_CHARS = 120
_SUSPECT_DOCUMENTS = 3  # convicted documents of one file that make the file itself a suspect
_SCANNED = 1 << 20  # origins held at once: 20 MB


@dataclass(frozen=True)
class Exclusion:
    """One line of a list. `row` None means the whole file; an empty `document_id` is not compared."""

    file: str
    row: int | None
    document_id: str = ""
    source: str = ""
    document: int | None = None  # index in the store of the run that convicted it
    from_step: int | None = None  # the first step from which that run excludes it
    run: str = ""
    step: int | None = None  # the step that convicted it
    reason: str = ""
    mean_loss: float | None = None
    excerpt: str = ""

    @property
    def place(self) -> str:
        return self.file if self.row is None else f"{self.file}:{self.row}"

    @property
    def key(self) -> tuple[str, int | None, str]:
        return self.file, self.row, self.document_id

    def to_line(self) -> str:
        record = asdict(replace(self, excerpt=self.excerpt[:EXCERPT_CHARS]))
        line = json.dumps(json_ready(record), ensure_ascii=False)
        # A text may hold lone surrogates, which UTF-8 cannot encode; \udcXX is JSON's escape for them.
        return line.encode("utf-8", "backslashreplace").decode()


_NUMBERS = dict.fromkeys(("row", "document", "from_step", "step"), (int, type(None)))
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((field.name for field in fields(Exclusion)), (str,)),
    **_NUMBERS,
    "mean_loss": (int, float, str, type(None)),
}


def append_exclusions(path: Path, entries: Iterable[Exclusion]) -> int:
    """Adds new entries to a list and returns their number. The file is replaced atomically; existing lines stay."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    known = {entry.key for entry in _parse(path, text) if isinstance(entry, Exclusion)}
    new: dict[tuple[str, int | None, str], Exclusion] = {}
    for entry in entries:
        if entry.key not in known:
            new.setdefault(entry.key, entry)
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
        ended = text if not text or text.endswith("\n") else text + "\n"
        write_atomic(path, ended + "".join(f"{entry.to_line()}\n" for entry in new.values()))
    return len(new)


def read_exclusions(path: str | Path) -> list[Exclusion]:
    """The entries of a list. An invalid line is refused by its number."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); correct data.exclude or remove the path") from error
    entries = []
    for entry in _parse(path, text):
        if isinstance(entry, UserError):
            raise entry
        entries.append(entry)
    return entries


def _parse(path: str | Path, text: str) -> Iterator[Exclusion | UserError]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _entry(json.loads(line))
        except (ValueError, RecursionError) as error:
            yield UserError(f"{path}:{number}: not an exclusion ({error}); correct or delete the line")


def _entry(record: Any) -> Exclusion:
    if not isinstance(record, dict) or "file" not in record or "row" not in record:
        raise ValueError("write an object with file and row; row is null for the whole file")
    for key, value in record.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            raise ValueError(f"unknown key {key!r}; there are {', '.join(_KINDS)}")
        if type(value) not in kinds or (key == "row" and value is not None and value < 0):
            raise ValueError(f"{key} is {json.dumps(value)[:40]}")
    mean = record.get("mean_loss")  # "nan" and "inf" are strings in JSON
    return Exclusion(**{**record, "mean_loss": None if mean is None else float(mean)})


def suspect_files(entries: Iterable[Exclusion], seen: Mapping[str, int] | None = None) -> list[Exclusion]:
    """Entries for files with so many convicted documents that the file itself is suspect: at least 3, and at least half
    of those the run has `seen`, if that is known. These are suggestions: a person decides."""
    entries = list(entries)
    excluded_files = {entry.file for entry in entries if entry.row is None}
    counts = Counter(file for file, row in {entry.key[:2] for entry in entries} if row is not None)
    suspects = []
    for file, count in counts.items():
        if file in excluded_files or count < max(_SUSPECT_DOCUMENTS, (seen or {}).get(file, 0) / 2):
            continue
        first = next(entry for entry in entries if entry.file == file)
        reason = f"{count} of its documents were convicted"
        suspects.append(Exclusion(file, None, source=first.source, run=first.run, step=first.step, reason=reason))
    return suspects


@dataclass(frozen=True)
class ExclusionOffer:
    """Another run's list that convicts documents of this run's files."""

    path: str
    documents: int
    files: int  # completely excluded files

    @property
    def line(self) -> str:
        files = f"{self.files} whole file{'s' * (self.files > 1)}" if self.files else ""
        documents = f"{self.documents} document{'s' * (self.documents > 1)}" if self.documents else ""
        what = " and ".join(part for part in (files, documents) if part)
        return f"{self.path} convicts {what} of this data: add `data: {{exclude: [{self.path}]}}` to the spec"


def find_offers(
    files: Collection[str], runs_folder: str | Path, excluded: Collection[str | Path] = ()
) -> list[ExclusionOffer]:
    """Lists in the same runs folder that convict documents of these `files` (names as in origins) and that the lists in
    `excluded` do not contain yet; pass the run's own list there too. Unreadable lines are ignored."""
    skipped_paths = {Path(path).resolve() for path in excluded}
    excluded_keys = {entry.key for path in skipped_paths if path.exists() for entry in read_exclusions(path)}
    files, offered = set(files), []
    for path in sorted(Path(runs_folder).glob(f"*/{FILE_NAME}")):
        if path.resolve() in skipped_paths:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        entries = {entry.key for entry in _parse(path, text) if isinstance(entry, Exclusion)}
        new = [key for key in entries - excluded_keys if key[0] in files]
        if new:
            file_count = sum(row is None for _, row, _ in new)
            offered.append(ExclusionOffer(str(path), len(new) - file_count, file_count))
    return offered


ByFile = Mapping[str, list[Exclusion]]
Located = tuple[str, Ints, Ints, bool]  # a file, some of its documents, the row of each, whether it was searched


def banned_documents(
    entries: Iterable[Exclusion], rows_by_source: Mapping[str, Rows]
) -> tuple[set[tuple[str, int]], list[str]]:
    """(source, document index) of every entry, in each source that holds it, whatever its name; and a message for every
    stale entry, which bans nothing because its file or row is not in this data, or has another text. A remote store is
    not searched: there a document is found only at the index that the entry names.

    Reads the table of files of every shard, and 20 bytes a document of shards with an accused file: half a second for a
    million of either.
    """
    by_file: dict[str, list[Exclusion]] = defaultdict(list)
    for entry in dict.fromkeys(entries):
        by_file[entry.file].append(entry)
    banned: set[tuple[str, int]] = set()
    matched: set[Exclusion] = set()
    reasons: dict[Exclusion, str] = {}
    for name, rows in rows_by_source.items():
        for file, documents, numbers, searched in _locate(name, rows, by_file):
            by_row: dict[int, list[Exclusion]] = defaultdict(list)
            for entry in by_file[file]:
                if entry.row is None and searched:
                    banned.update((name, document) for document in documents.tolist())
                    matched.add(entry)
                elif entry.row is not None:
                    by_row[entry.row].append(entry)
                    reasons.setdefault(entry, "no training document is in that row")
            listed = np.isin(numbers, np.array(list(by_row), np.int64))
            for document, row in zip(documents[listed].tolist(), numbers[listed].tolist(), strict=True):
                document_id = rows.origin_of_document(document).document_id
                for entry in by_row[row]:
                    if entry.document_id in ("", document_id):
                        banned.add((name, document))
                        matched.add(entry)
                    else:
                        reasons[entry] = "another text is in that row now"
    stale = [entry for group in by_file.values() for entry in group if entry not in matched]
    absent = "not found in this data"
    return banned, [f"{entry.place}: {reasons.get(entry, absent)}; it is not excluded" for entry in stale]


def _locate(name: str, rows: Rows, by_file: ByFile) -> Iterator[Located]:
    if isinstance(rows, StoreRows) and not rows.store.cache:
        first = 0
        for k, info in enumerate(rows.store.infos):
            yield from _locate_in_shard(rows.store.shard(k), first, by_file)
            first += info.documents
    else:  # a user's dataset or a remote store: a search would read or fetch all of it
        yield from _locate_by_index(name, rows, by_file)


def _locate_in_shard(shard: Shard, first: int, by_file: ByFile) -> Iterator[Located]:
    """The documents of the accused files; `first` is the index of the shard's first document."""
    numbers = find_strings(shard._files, by_file)
    accused = np.zeros(shard.info.files, np.bool_)
    accused[list(numbers)] = True
    for start in range(0, shard.documents, _SCANNED) if numbers else ():
        origins = shard.origins_of(start, min(start + _SCANNED, shard.documents))
        at = np.flatnonzero(accused[origins["file"]])
        files, rows = origins["file"][at], origins["row"][at].astype(np.int64)
        for number in np.unique(files).tolist():
            of_file = files == number
            yield numbers[number], first + start + at[of_file], rows[of_file], True


def find_strings(table: Strings, wanted: Iterable[str]) -> dict[int, str]:
    """The indices of strings in a table, which may have as many strings as there are documents."""
    by_bytes = {string.encode("utf-8", "surrogatepass"): string for string in wanted}
    lengths = np.diff(table.offsets)
    candidates = np.flatnonzero(np.isin(lengths, [len(data) for data in by_bytes]))  # few strings have such a length
    matches = {}
    for number in candidates.tolist():
        start = int(table.offsets[number])
        string = by_bytes.get(table.text[start : start + int(lengths[number])].tobytes())
        if string is not None:
            matches[number] = string
    return matches


def _locate_by_index(name: str, rows: Rows, by_file: ByFile) -> Iterator[Located]:
    """Looks only at the index that the list names."""
    for file, group in by_file.items():
        for entry in group:
            if entry.source != name or entry.document is None or entry.row is None:
                continue
            try:
                origin = rows.origin_of_document(entry.document)
            except IndexError:
                continue
            if (origin.file, origin.row) == (file, entry.row):
                yield file, np.array([entry.document]), np.array([entry.row]), False
