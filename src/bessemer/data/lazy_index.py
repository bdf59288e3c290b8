"""Where every document of a source lies, and how long its text is: all that `lazy` needs to know beforehand.

The source is read once (its rows are parsed, nothing is tokenized) and divided into stretches that can be read alone:
about 64 kB of JSON lines, a row group of Parquet, or a whole file where its format or compression allows no seek.
On disk 12 bytes per document, mapped when used.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.curate.ledger import byte_length, load_arrays, naming, save_arrays, text_hash
from bessemer.data.document import BadRow, Document
from bessemer.data.read import FileEntry, FilePiece, SourcePart, divide, read_part
from bessemer.data.read.compression import compression_of, open_bytes
from bessemer.data.read.parts import cut, line_starts
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec
from bessemer.storage import atomic_file

Each = Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
Ints = npt.NDArray[np.int64]

_VERSION = 1  # raise it when the same files would give another index
_STRETCH_BYTES = 64 << 10
_SHOWN_FILES = 5
_COLUMNS = ("number", "start", "stop", "first_row", "size_bytes", "document", "text")


@dataclass(frozen=True)
class Side:
    """Which documents count: those whose hash lies below `limit` are held out. All, if the limit is 0."""

    seed: int = 0
    limit: int = 0
    held_out: bool = False

    def has(self, document: Document) -> bool:
        return not self.limit or (text_hash(document.text, self.seed) < self.limit) == self.held_out


@dataclass(frozen=True)
class _Task:
    part: SourcePart
    files: tuple[int, ...]  # the number of each piece's file
    source: SourceSpec
    side: Side
    copies: Path | None
    out: Path

    @property
    def name(self) -> str:
        return f"source {self.part.source!r}, {self.part.name}"


class Index:
    """A source's documents in order, each taking its text's bytes and one more, which stands for its end.

    `ends[d]` is where document d ends in these bytes; `ordinal[d]` its number among the documents of its stretch.
    """

    def __init__(
        self, folder: Path, files: Sequence[FileEntry], source: SourceSpec, copies: Path | None = None
    ) -> None:
        self.folder, self.files, self.source, self.copies = folder, files, source, copies
        try:
            about = json.loads((folder / "index.json").read_text())
            self.name: str = about["source"]
            self.documents, self.bytes = int(about["documents"]), int(about["bytes"])
            self.bad_rows, self.fingerprint = int(about["bad_rows"]), str(about["fingerprint"])
            self.undecodable: list[str] = about.get("undecodable", [])  # indexes of earlier versions lack it
            self.undecodable_documents = int(about.get("undecodable_documents", 0))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder}: not a whole index ({error}); delete it and run again") from error
        self.ends = _mapped(folder / "ends.bin", np.dtype("<i8"), self.documents)
        self.ordinal = _mapped(folder / "ordinals.bin", np.dtype("<i4"), self.documents)
        self.stretches = load_arrays(folder / "stretches.npz")

    def stretch_of(self, documents: Ints) -> Ints:
        return np.searchsorted(self.stretches["document"], documents, side="right") - 1

    def read(self, stretch: int) -> Iterator[Document]:
        """The documents of a stretch, of both sides."""
        at = {name: int(self.stretches[name][stretch]) for name in _COLUMNS}
        first_row = at["first_row"]
        piece = FilePiece(self.files[at["number"]], at["size_bytes"], at["start"], at["stop"], first_row=first_row)
        for found in read_part(SourcePart(self.name, (piece,)), self.source, self.copies):
            if isinstance(found, Document):
                yield found


def build_index(
    name: str,
    files: Sequence[FileEntry],
    source: SourceSpec,
    cache: Path,
    side: Side | None = None,
    bad_rows: float = 0.01,
    copies: Path | None = None,
    each: Each | None = None,
) -> Index:
    """The index of a source, from the cache when nothing of it has changed. Reads it once: `each` spreads the parts
    over workers. A kill leaves parts that the next call takes up."""
    if source.messages_field is not None:
        raise UserError(
            f"source {name!r}: conversations are masked when data is prepared: write tokenize: ahead, or text_field"
        )
    side = side or Side()
    run: Each = each or (lambda function, tasks: [function(task) for task in tasks])
    parts = divide(name, files, source, cache=copies, each=each)
    folder = cache / f"lazy-{_key(parts, source, side)}"
    if not (folder / "index.json").exists():
        work = folder / "parts"
        work.mkdir(parents=True, exist_ok=True)
        number = {file.path: k for k, file in enumerate(files)}
        tasks = [
            _Task(
                part, tuple(number[piece.file.path] for piece in part.pieces), source, side, copies,
                work / f"{k:06d}.npz",
            )
            for k, part in enumerate(parts)
        ]  # fmt: skip
        counts = run(_index_part, tasks)
        _check_bad(name, sum(c["bad"] for c in counts), sum(c["rows"] for c in counts), bad_rows)
        _join(folder, name, tasks, counts)
        shutil.rmtree(work)
    return Index(folder, files, source, copies)


def _key(parts: Sequence[SourcePart], source: SourceSpec, side: Side) -> str:
    settings = [source.text_field, source.id_field, source.format]
    what = [_VERSION, _STRETCH_BYTES, settings, dataclasses.astuple(side), [part.key for part in parts]]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(what).encode()))


def _index_part(task: _Task) -> dict[str, Any]:
    """Writes one part's stretches and documents; the few numbers that the whole needs."""
    if task.out.exists():
        arrays = load_arrays(task.out)
        return _counts(arrays)
    lengths: list[int] = []
    ordinals: list[int] = []
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    content, bad, rows = xxhash.xxh3_128(), 0, 0
    undecodable: list[str] = []
    undecodable_documents = 0
    with naming(task.name, task.out.parent):
        for file, stretch in _stretches(task):
            entry = (file, stretch.start, stretch.stop, stretch.first_row)
            first, ordinal = len(lengths), 0
            for found in read_part(SourcePart(task.part.source, (stretch,)), task.source, task.copies):
                rows += 1
                if isinstance(found, BadRow):
                    bad += 1
                    continue
                if task.side.has(found):
                    lengths.append(byte_length(found.text))
                    ordinals.append(ordinal)
                    if found.decode_error:
                        undecodable_documents += 1
                        undecodable = [*undecodable, f"{found.file}: {found.decode_error}"][:_SHOWN_FILES]
                    content.update(text_hash(found.text, 0).to_bytes(8, "little"))
                ordinal += 1
            if len(lengths) > first:
                text = sum(lengths[first:])
                for column, value in zip(_COLUMNS, (*entry, stretch.size_bytes, first, text), strict=True):
                    columns[column].append(value)
    arrays = {column: np.array(values, np.int64) for column, values in columns.items()}
    arrays |= {"lengths": np.array(lengths, np.int64), "ordinals": np.array(ordinals, np.int32)}
    arrays["seen"] = np.array([rows, bad])
    arrays["undecodable"] = np.frombuffer(json.dumps([undecodable_documents, undecodable]).encode(), np.uint8)
    arrays["content"] = np.frombuffer(content.digest(), np.uint8)
    save_arrays(task.out, arrays)
    return _counts(arrays)


def _counts(arrays: dict[str, Any]) -> dict[str, Any]:
    # A part that an earlier version indexed lacks it.
    written = arrays["undecodable"].tobytes() if "undecodable" in arrays else b"[0, []]"
    undecodable_documents, undecodable = json.loads(written)
    return {
        "undecodable_documents": undecodable_documents,
        "undecodable": undecodable,
        "documents": int(arrays["lengths"].size),
        "rows": int(arrays["seen"][0]),
        "bad": int(arrays["seen"][1]),
        "content": arrays["content"].tobytes(),
    }


def _stretches(task: _Task) -> Iterator[tuple[int, FilePiece]]:
    """(number of the file, what can be read alone of it)."""
    for number, piece in zip(task.files, task.part.pieces, strict=True):
        if piece.file.format == "jsonl":
            cuts = _lines(piece, task)
        elif piece.file.format in ("parquet", "arrow"):
            units = cut((piece.file, task.source, 1, task.copies))
            last = piece.stop if piece.stop != -1 else units[-1].stop
            cuts = iter([unit for unit in units if unit.stop == -1 or piece.start <= unit.start < last])
        else:
            cuts = iter([piece])
        yield from ((number, stretch) for stretch in cuts)


def _lines(piece: FilePiece, task: _Task) -> Iterator[FilePiece]:
    """JSON lines, cut at about every 64 kB; a compressed file stays whole."""
    file = piece.file
    with open_bytes(file, task.source.storage, task.copies) as opened:
        if compression_of(opened):
            yield piece
            return
        stop = piece.stop if piece.stop != -1 else file.size_bytes
        opened.seek(piece.start)
        wanted = range(_STRETCH_BYTES, stop - piece.start, _STRETCH_BYTES)
        start, row = piece.start, piece.first_row
        for offset, line in line_starts(opened, wanted):
            at = piece.start + offset
            if at >= stop:
                break
            yield FilePiece(file, at - start, start, at, row)
            start, row = at, piece.first_row + line - 1
        yield FilePiece(file, stop - start, start, stop, row)


def _check_bad(name: str, bad: int, rows: int, allowed: float) -> None:
    if bad > allowed * rows:
        raise UserError(
            f"source {name!r}: {bad:,} of {rows:,} rows cannot be read and data.bad_rows allows {allowed:.3g} of them: "
            "correct the files, or write tokenize: ahead to see each of them"
        )


def _join(folder: Path, name: str, tasks: Sequence[_Task], counts: Sequence[dict[str, Any]]) -> None:
    """The parts' arrays one after another, in bounded memory; index.json is the commit."""
    columns: dict[str, list[Ints]] = {column: [] for column in _COLUMNS}
    documents, total = 0, 0
    content = xxhash.xxh3_128()
    with atomic_file(folder / "ends.bin", parents=True) as ends, atomic_file(folder / "ordinals.bin") as ordinals:
        for task, count in zip(tasks, counts, strict=True):
            arrays = load_arrays(task.out)
            arrays["document"] = arrays["document"] + documents
            for column in _COLUMNS:
                columns[column].append(arrays[column])
            taken = total + np.cumsum(arrays["lengths"] + 1)
            ends.write(taken.astype("<i8").tobytes())
            ordinals.write(arrays["ordinals"].astype("<i4").tobytes())
            documents += arrays["lengths"].size
            total = int(taken[-1]) if taken.size else total
            content.update(count["content"])
    save_arrays(folder / "stretches.npz", {column: np.concatenate(found) for column, found in columns.items()})
    about = {
        "source": name,
        "documents": documents,
        "bytes": total,
        "bad_rows": sum(count["bad"] for count in counts),
        "undecodable_documents": sum(count["undecodable_documents"] for count in counts),
        "undecodable": [line for count in counts for line in count["undecodable"]][:_SHOWN_FILES],
        # Of the texts, and not of the files' times: a copy of the corpus is the same corpus.
        "fingerprint": content.hexdigest(),
    }
    with atomic_file(folder / "index.json") as file:
        file.write(json.dumps(about).encode())


def _mapped(path: Path, dtype: np.dtype[Any], items: int) -> npt.NDArray[Any]:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: is missing; delete {path.parent} and run again") from error
    if found != items * dtype.itemsize:
        raise UserError(
            f"{path}: {found:,} bytes instead of {items * dtype.itemsize:,}; delete {path.parent} and run again"
        )
    if not items:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", shape=(items,)).view(np.ndarray)
