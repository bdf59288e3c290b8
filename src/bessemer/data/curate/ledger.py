"""Where the cache of curation keeps things, how they are written, and the few measures of a text that everything
uses.

What one step did to one part of the corpus, on disk: which documents it dropped or changed, and the counts.

The text of a corpus is never written again after each step. A ledger holds only the documents that a step dropped,
gave another text or labelled; the state after any number of steps is the files as they are read, with the ledgers
applied one after the other. So a filter costs nothing to keep, and changing its threshold reads the files and the
earlier ledgers.

Two files: `KEY.arrow` (rows by ordinal; absent when nothing was touched) and `KEY.json` (counts, and the digest of
`KEY.arrow`; written last, it is the commit). Both are the same bytes whoever writes them. A ledger whose files do not
agree counts as not written: the step is run again on that part.
"""

from __future__ import annotations

import contextlib
import errno
import json
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bessemer.data.curate.step import Drop
from bessemer.data.document import Document
from bessemer.data.store.digests import content_digest
from bessemer.data.store.format import file_sum
from bessemer.errors import UserError
from bessemer.storage import atomic_file, commit_file, temporary_path, write_atomic

_HASH_PIECE_CHARS = 1 << 20


def ledger_path(cache: Path, key: str) -> Path:
    return cache / "steps" / key[:2] / key


def counts_path(cache: Path, key: str) -> Path:
    """What was counted: of a ledger, a reading or a census."""
    return ledger_path(cache, key).with_suffix(".json")


def quarantine_path(cache: Path, key: str) -> Path:
    return ledger_path(cache, key).with_suffix(".quarantine.jsonl")


def collected_path(cache: Path, key: str) -> Path:
    return cache / "collected" / key[:2] / f"{key}.npz"


def ruling_path(cache: Path, key: str, part: int) -> Path:
    return cache / "rulings" / key / f"{part:06d}.npz"


def text_hash(text: str, seed: int) -> int:
    """Of the text in UTF-8; by pieces, so that a long document is not copied whole."""
    if len(text) <= _HASH_PIECE_CHARS:
        return int(xxhash.xxh3_64_intdigest(text.encode(), seed=seed))
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(text), _HASH_PIECE_CHARS):
        state.update(text[start : start + _HASH_PIECE_CHARS].encode())
    return int(state.intdigest())


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@contextlib.contextmanager
def space_for(folder: Path) -> Iterator[None]:
    """A full disk is told in one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = "free some and run again: what was finished is kept"
        raise UserError(f"no space left for {folder}; {fix}") from error


@contextlib.contextmanager
def naming(name: str, folder: Path) -> Iterator[None]:
    """Every error says which part it struck."""
    try:
        with space_for(folder):
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
    """What `save_arrays` wrote, for reading some of it. An archive has a checksum of every array in it; its comment is
    the name that it was written under, so one that was put in another's place is noticed (older ones have none)."""
    with np.load(path, allow_pickle=False) as arrays:
        if arrays.zip.comment not in (b"", _identity(path)):
            raise ValueError(f"it was written as {arrays.zip.comment.decode(errors='replace')}")
        yield arrays


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    assert not {"file", "allow_pickle"} & set(arrays), "numpy takes these names for its own arguments"
    with atomic_file(path, parents=True) as file:
        np.savez(file, **arrays)
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = _identity(path)


def _identity(path: Path) -> bytes:
    return f"{path.parent.name}/{path.name}".encode()


_FLUSH_BYTES = 4 << 20
_EXAMPLES = 3  # of each reason, from each part
_EXCERPT_CHARS = 400
LENGTH_BINS = 40  # powers of two of the number of characters


@dataclass
class StepCounts:
    """The counts of a step over a part; tallies of parts add up to that of the corpus."""

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    reasons: dict[str, list[int]] = field(default_factory=dict)  # reason: [documents, bytes]
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)  # label: value or "sum": count

    def add(self, other: StepCounts) -> None:
        for name in ("documents_in", "documents_out", "bytes_in", "bytes_out", "changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, (documents, size_bytes) in other.reasons.items():
            mine = self.reasons.setdefault(reason, [0, 0])
            mine[0] += documents
            mine[1] += size_bytes
        for reason, found in other.examples.items():
            pool = [*self.examples.get(reason, []), *found]
            self.examples[reason] = sorted(pool, key=lambda one: one["draw"])[:_EXAMPLES]
        for label, counts in other.labels.items():
            mine_of = self.labels.setdefault(label, {})
            for value, count in counts.items():
                mine_of[value] = mine_of.get(value, 0) + count

    def dropped(self, document: Document, drop: Drop, size_bytes: int) -> None:
        counts = self.reasons.setdefault(drop.reason, [0, 0])
        counts[0] += 1
        counts[1] += size_bytes
        found = self.examples.setdefault(drop.reason, [])
        draw = xxhash.xxh3_64_intdigest(document.place.encode(), seed=17)
        if len(found) < _EXAMPLES or draw < found[-1]["draw"]:
            shown = drop.value if not isinstance(drop.value, float) else round(drop.value, 4)
            text = document.text[:_EXCERPT_CHARS]
            found.append({"draw": draw, "place": document.place, "value": shown, "text": text})
            found.sort(key=lambda one: one["draw"])
            del found[_EXAMPLES:]

    def labelled(self, labels: dict[str, str | float]) -> None:
        """Words are counted; numbers are summed, with how many there were."""
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
    """One document's line in a ledger: it was dropped, or got another text (or messages) or more labels."""

    ordinal: int
    drop: bool
    text: str | None
    messages: str | None
    labels: str | None


class LedgerWriter:
    """Appends touches in rising order of ordinals; `commit` makes the ledger exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tally = StepCounts()
        self._touches = 0
        self._rows: dict[str, list[Any]] = {name: [] for name in DocumentChange.__slots__}
        self._held_bytes = 0
        self._writer: Any = None
        self._temporary = temporary_path(path)

    def add(self, touch: DocumentChange) -> None:
        self._touches += 1
        for name, values in self._rows.items():
            values.append(getattr(touch, name))
        self._held_bytes += 64 + len(touch.text or "") + len(touch.messages or "") + len(touch.labels or "")
        if self._held_bytes > _FLUSH_BYTES:
            self._flush()

    def commit(self) -> None:
        self._flush()
        digest = None
        if self._writer is not None:
            self._writer.close()
            digest = file_sum(str(self._temporary))
            commit_file(self._temporary, self.path.with_suffix(".arrow"))  # before the tally that vouches for it
        counts = {**self.tally.to_json(), "touches": self._touches, "arrow": digest}
        write_json(self.path.with_suffix(".json"), counts)

    def discard(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # on a full disk its end cannot be written
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
        self._held_bytes = 0


def ledger_damage(path: Path) -> str | None:
    """What is wrong with a ledger, or None: hashes its `.arrow`."""
    counts, file = read_cached(path.with_suffix(".json"), StepCounts.__dataclass_fields__), path.with_suffix(".arrow")
    if counts is None:
        return f"{path.with_suffix('.json')}: missing or damaged"
    touched = counts["documents_in"] != counts["documents_out"] or counts["changed"] or counts["labels"]
    if not counts.get("touches", touched):
        return None
    if not file.exists():
        return f"{file}: missing"
    if "arrow" in counts and file_sum(str(file)) != counts["arrow"]:  # ledgers of earlier versions have no digest
        return f"{file}: damaged (its content is not what was written)"
    return None


def read_tally(path: Path) -> StepCounts:
    counts = read_json(path.with_suffix(".json"))
    return StepCounts(**{name: counts[name] for name in StepCounts.__dataclass_fields__})


def read_touches(path: Path) -> Iterator[DocumentChange]:
    """The touches of a committed ledger, in order; verified first."""
    import pyarrow as pa

    file = path.with_suffix(".arrow")
    if damage := ledger_damage(path):
        raise UserError(f"{damage}; run again, and the step is run again on this part")
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
    """Atomically: a reader sees all of it or nothing. With a digest of the content and the file's name."""
    sealed = {**value, "digest": _digest(path, value)}
    write_atomic(path, json.dumps(sealed, indent=1, ensure_ascii=False), parents=True)


def read_json(path: Path, fix: str = "delete it and run again") -> dict[str, Any]:
    """What `write_json` wrote. Files of earlier versions have no digest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a mapping")
        digest = found.pop("digest", None)
        if digest is not None and digest != _digest(path, found):
            raise ValueError("its content is not what was written")
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {fix}") from error
    return found


def read_cached(path: Path, names: Collection[str] = ()) -> dict[str, Any] | None:
    """The same for what can be computed again: None where it is missing or damaged, or lacks one of the names."""
    try:
        found = read_json(path)
    except (FileNotFoundError, UserError):
        return None
    return found if found.keys() >= set(names) else None


def _digest(path: Path, value: Mapping[str, Any]) -> str:
    canonical = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return content_digest(f"{path.name} {canonical}".encode())
