"""What one step did to one part of the corpus, on disk: which documents it dropped or changed, and the counts.

The text of a corpus is never written again after each step. A ledger holds only the documents that a step dropped,
gave another text or labelled; the state after any number of steps is the files as they are read, with the ledgers
applied one after the other. So a filter costs nothing to keep, and changing its threshold reads the files and the
earlier ledgers.

Two files: `KEY.arrow` (rows by ordinal; absent when nothing was touched) and `KEY.json` (counts; written last, it
is the commit). Both are the same bytes whoever writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.curate.files import writing
from bessemer.data.document import Document
from bessemer.data.step import Drop
from bessemer.data.store_format import sync
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
        self._rows: dict[str, list[Any]] = {name: [] for name in Touch.__slots__}
        self._held_bytes = 0
        self._writer: Any = None
        self._temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")

    def add(self, touch: Touch) -> None:
        for name, values in self._rows.items():
            values.append(getattr(touch, name))
        self._held_bytes += 64 + len(touch.text or "") + len(touch.messages or "") + len(touch.labels or "")
        if self._held_bytes > _FLUSH_BYTES:
            self._flush()

    def commit(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
            sync(self._temporary)  # on the disk before the tally that vouches for it
            os.replace(self._temporary, self.path.with_suffix(".arrow"))
        write_json(self.path.with_suffix(".json"), self.tally.to_json())

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


def read_touches(path: Path) -> Iterator[Touch]:
    """The touches of a committed ledger, in order."""
    import pyarrow as pa

    file = path.with_suffix(".arrow")
    if not file.exists():
        return
    try:
        with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
            for i in range(reader.num_record_batches):
                columns = [column.to_pylist() for column in reader.get_batch(i).columns]
                for values in zip(*columns, strict=True):
                    yield Touch(*values)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file}: damaged ({error}); delete it and its .json, and run again") from error


def write_json(path: Path, value: Any) -> None:
    """Atomically: a reader sees all of it or nothing."""
    with writing(path) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); delete it and run again") from error
    return found
