"""The cache of curation: file layout, atomic writes, and ledgers. A ledger records what one step did to one part: which
documents it dropped, changed or labelled, and the counts.

The text of a corpus is not rewritten after each step. The state after any number of steps is the source files with the
ledgers applied in order, so a filter's result is small, and changing its threshold rereads only the files and the
earlier ledgers.

A ledger has two files: `KEY.arrow` (rows by ordinal; absent when nothing changed) and `KEY.json` (counts and the digest
of `KEY.arrow`; written last, it commits the ledger). Both are deterministic. A ledger whose files disagree counts as
not written: the step runs again on that part.
"""

from __future__ import annotations

import contextlib
import errno
import json
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bessemer.data.curate.step import Drop
from bessemer.data.read.entry import Document
from bessemer.data.store.digests import content_digest
from bessemer.data.store.format import file_digest
from bessemer.errors import UserError
from bessemer.storage import atomic_file, commit_file, temporary_path, write_atomic

_HASH_PIECE_CHARS = 1 << 20


def ledger_path(cache: Path, key: str) -> Path:
    return cache / "steps" / key[:2] / key


def counts_path(cache: Path, key: str) -> Path:
    """The counts of a ledger, a reading or a census."""
    return ledger_path(cache, key).with_suffix(".json")


def quarantine_path(cache: Path, key: str) -> Path:
    return ledger_path(cache, key).with_suffix(".quarantine.jsonl")


def collected_path(cache: Path, key: str) -> Path:
    return cache / "collected" / key[:2] / f"{key}.npz"


def decisions_path(cache: Path, key: str, part: int) -> Path:
    return cache / "rulings" / key / f"{part:06d}.npz"


def hash_text(text: str, seed: int) -> int:
    """A hash of the text in UTF-8, computed in pieces so that a long document is not copied."""
    if len(text) <= _HASH_PIECE_CHARS:
        return int(xxhash.xxh3_64_intdigest(text.encode(), seed=seed))
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(text), _HASH_PIECE_CHARS):
        state.update(text[start : start + _HASH_PIECE_CHARS].encode())
    return int(state.intdigest())


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Reports a full disk in one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"no space left for {folder}; free some and run again: finished work is kept") from error


@contextlib.contextmanager
def name_in_errors(name: str, folder: Path) -> Iterator[None]:
    """Prefixes every error with the part that caused it."""
    try:
        with explain_full_disk(folder):
            yield
    except UserError as error:
        raise UserError(f"{name}: {error}" if name not in str(error) else str(error)) from error
    except OSError as error:
        raise UserError(f"{name}: {error}") from error
    except MemoryError as error:
        raise UserError(f"{name}: out of memory; use fewer workers") from error


def load_arrays(path: Path) -> dict[str, Any]:
    try:
        with open_arrays(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fix = f"delete the folder {path.parent} and run again"
        raise UserError(f"{path}: damaged ({error}); {fix}") from error


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[Any]:
    """Opens what `save_arrays` wrote. Every array has a checksum; the archive's comment holds the name it was written
    under, which detects a file in the wrong place (older files have no comment)."""
    with np.load(path, allow_pickle=False) as arrays:
        if arrays.zip.comment not in (b"", _identity(path)):
            raise ValueError(f"it was written as {arrays.zip.comment.decode(errors='replace')}")
        yield arrays


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    assert not {"file", "allow_pickle"} & set(arrays), "reserved by numpy.savez"
    with atomic_file(path, parents=True) as file:
        np.savez(file, **arrays)
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = _identity(path)


def _identity(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()


_FLUSH_BYTES = 4 << 20
_EXAMPLES = 3  # per reason and part
_EXCERPT_CHARS = 400
LENGTH_BINS = 40  # by powers of two of the number of characters


@dataclass
class StepCounts:
    """The counts of a step over a part; those of parts add up to the corpus."""

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    reasons: dict[str, list[int]] = field(default_factory=dict)  # reason: [documents, bytes]
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)  # label: value or "sum": count

    def add(self, part: StepCounts) -> None:
        for name in ("documents_in", "documents_out", "bytes_in", "bytes_out", "changed"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        for reason, (documents, size_bytes) in part.reasons.items():
            total = self.reasons.setdefault(reason, [0, 0])
            total[0] += documents
            total[1] += size_bytes
        for reason, examples in part.examples.items():
            pool = [*self.examples.get(reason, []), *examples]
            self.examples[reason] = sorted(pool, key=itemgetter("draw"))[:_EXAMPLES]
        for label, counts in part.labels.items():
            totals = self.labels.setdefault(label, {})
            for value, count in counts.items():
                totals[value] = totals.get(value, 0) + count

    def dropped(self, document: Document, drop: Drop, size_bytes: int) -> None:
        counts = self.reasons.setdefault(drop.reason, [0, 0])
        counts[0] += 1
        counts[1] += size_bytes
        examples = self.examples.setdefault(drop.reason, [])
        draw = xxhash.xxh3_64_intdigest(document.place.encode(), seed=17)
        if len(examples) < _EXAMPLES or draw < examples[-1]["draw"]:
            value = drop.value if not isinstance(drop.value, float) else round(drop.value, 4)
            text = document.text[:_EXCERPT_CHARS]
            examples.append({"draw": draw, "place": document.place, "value": value, "text": text})
            examples.sort(key=itemgetter("draw"))
            del examples[_EXAMPLES:]

    def labelled(self, labels: dict[str, str | float]) -> None:
        """Counts text values; sums numeric values and counts them."""
        for name, value in labels.items():
            counts = self.labels.setdefault(name, {})
            if isinstance(value, str):
                counts[value] = counts.get(value, 0) + 1
            else:
                counts["sum"] = counts.get("sum", 0.0) + value
                counts["count"] = counts.get("count", 0) + 1

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """One document's row in a ledger: dropped, or given a new text, messages or labels."""

    ordinal: int
    drop: bool
    text: str | None
    messages: str | None
    labels: str | None


class LedgerWriter:
    """Appends changes in ascending order of ordinals; `commit` makes the ledger exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = StepCounts()
        self._change_count = 0
        self._rows: dict[str, list[Any]] = {name: [] for name in DocumentChange.__slots__}
        self._buffered_bytes = 0
        self._writer: Any = None
        self._temporary = temporary_path(path)

    def add(self, change: DocumentChange) -> None:
        self._change_count += 1
        for name, values in self._rows.items():
            values.append(getattr(change, name))
        self._buffered_bytes += 64 + len(change.text or "") + len(change.messages or "") + len(change.labels or "")
        if self._buffered_bytes > _FLUSH_BYTES:
            self._flush()

    def commit(self) -> None:
        self._flush()
        digest = None
        if self._writer is not None:
            self._writer.close()
            digest = file_digest(str(self._temporary))
            commit_file(self._temporary, self.path.with_suffix(".arrow"))  # before the counts that refer to it
        committed = {**self.counts.to_json(), "touches": self._change_count, "arrow": digest}
        write_json(self.path.with_suffix(".json"), committed)

    def discard(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # on a full disk the footer cannot be written
                self._writer.close()
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows["ordinal"]:
            return
        texts = dict.fromkeys(("text", "messages", "labels"), pa.large_string())
        schema = pa.schema({"ordinal": pa.int64(), "drop": pa.bool_(), **texts})
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._writer = pa.ipc.new_file(str(self._temporary), schema, options=options)
        self._writer.write_batch(pa.RecordBatch.from_pydict(self._rows, schema=schema))
        for values in self._rows.values():
            values.clear()
        self._buffered_bytes = 0


def ledger_damage(path: Path) -> str | None:
    """What is wrong with a ledger, or None. Hashes its `.arrow`."""
    counts, file = read_cached(path.with_suffix(".json"), StepCounts.__dataclass_fields__), path.with_suffix(".arrow")
    if counts is None:
        return f"{path.with_suffix('.json')}: missing or damaged"
    is_changed = counts["documents_in"] != counts["documents_out"] or counts["changed"] or counts["labels"]
    if not counts.get("touches", is_changed):
        return None
    if not file.exists():
        return f"{file}: missing"
    if "arrow" in counts and file_digest(str(file)) != counts["arrow"]:  # ledgers of earlier versions have no digest
        return f"{file}: damaged (its content is not what was written)"
    return None


def read_counts(path: Path) -> StepCounts:
    counts = read_json(path.with_suffix(".json"))
    return StepCounts(**{name: counts[name] for name in StepCounts.__dataclass_fields__})


def read_changes(path: Path) -> Iterator[DocumentChange]:
    """The changes of a committed ledger, in order, after verification."""
    import pyarrow as pa

    file = path.with_suffix(".arrow")
    if damage := ledger_damage(path):
        raise UserError(f"{damage}; run again, and the step runs again on this part")
    if not read_json(path.with_suffix(".json")).get("touches", file.exists()):
        return
    try:
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            for i in range(reader.num_record_batches):
                columns = [column.to_pylist() for column in reader.get_batch(i).columns]
                for values in zip(*columns, strict=True):
                    yield DocumentChange(*values)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file}: damaged ({error}); delete it and its .json, and run again") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes atomically, with a digest of the content and the file's name."""
    sealed = {**value, "digest": _digest(path, value)}
    write_atomic(path, json.dumps(sealed, indent=1, ensure_ascii=False), parents=True)


def read_json(path: Path, fix: str = "delete it and run again") -> dict[str, Any]:
    """What `write_json` wrote. Files of earlier versions have no digest."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a mapping")
        digest = value.pop("digest", None)
        if digest is not None and digest != _digest(path, value):
            raise ValueError("its content is not what was written")
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {fix}") from error
    return value


def read_cached(path: Path, names: Collection[str] = ()) -> dict[str, Any] | None:
    """As `read_json`, for recomputable files: None where it is missing or damaged or lacks one of the names."""
    try:
        value = read_json(path)
    except (FileNotFoundError, UserError):
        return None
    return value if value.keys() >= set(names) else None


def _digest(path: Path, value: Mapping[str, Any]) -> str:
    canonical = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return content_digest(f"{path.name} {canonical}".encode())
