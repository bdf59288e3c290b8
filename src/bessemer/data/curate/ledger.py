"""What one step did to one part of the corpus, on disk: which documents it dropped or changed, and the counts.

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
import json
import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.chunk_digests import content_digest
from bessemer.data.curate.files import writing
from bessemer.data.document import Document
from bessemer.data.step import Drop
from bessemer.data.store_format import file_sum, sync
from bessemer.errors import UserError

_FLUSH_BYTES = 4 << 20
_EXAMPLES = 3  # of each reason, from each part
_EXCERPT_CHARS = 400
LENGTH_BINS = 40  # powers of two of the number of characters


@dataclass
class Tally:
    """The counts of a step over a part; tallies of parts add up to that of the corpus."""

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    changed: int = 0
    reasons: dict[str, list[int]] = field(default_factory=dict)  # reason: [documents, bytes]
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)  # label: value or "sum": count

    def add(self, other: Tally) -> None:
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
class Touch:
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
        self.tally = Tally()
        self._touches = 0
        self._rows: dict[str, list[Any]] = {name: [] for name in Touch.__slots__}
        self._held_bytes = 0
        self._writer: Any = None
        self._temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")

    def add(self, touch: Touch) -> None:
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
            sync(self._temporary)  # on the disk before the tally that vouches for it
            digest = file_sum(str(self._temporary))
            os.replace(self._temporary, self.path.with_suffix(".arrow"))
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
    counts, file = read_cached(path.with_suffix(".json"), Tally.__dataclass_fields__), path.with_suffix(".arrow")
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


def read_tally(path: Path) -> Tally:
    counts = read_json(path.with_suffix(".json"))
    return Tally(**{name: counts[name] for name in Tally.__dataclass_fields__})


def read_touches(path: Path) -> Iterator[Touch]:
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
                    yield Touch(*values)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file}: damaged ({error}); delete it and its .json, and run again") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically: a reader sees all of it or nothing. With a digest of the content and the file's name."""
    with writing(path) as file:
        sealed = {**value, "digest": _digest(path, value)}
        file.write(json.dumps(sealed, indent=1, ensure_ascii=False).encode())


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
