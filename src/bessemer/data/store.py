"""Tokens on disk: what `prepare` writes once and the stream reads at random for the rest of the run.

A store is a group of files with one prefix. `.bin` and `.idx` are Megatron-LM's indexed dataset, one sequence per
document, so Megatron and NeMo can train from them too; the others are ours:

    .bin      token ids, document after document
    .idx      header, int32 lengths, int64 byte offsets, int64 document numbers
    .starts   int64 token offset of every document, and the end. The same offsets stand in the .idx, but at an odd
              byte: numpy then copies the whole array for every search (0.6 ms per million documents instead of 0.004)
    .origins  per document: number of the file, row, hash of the text
    .json     counts, names of the files, fingerprints. Written last: it is the commit
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.errors import UserError

FORMAT_VERSION = 1

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
_DTYPE_CODES = {"uint16": 8, "int32": 4}
_ORIGIN = np.dtype([("file", "<u4"), ("row", "<u8"), ("hash", "<u8")])
_COPY_ITEMS = 1 << 18  # numbers held at once while the .idx is assembled

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Origin:
    """The document that a token belongs to: tokens [start, stop) of the store, read from `row` of `file`."""

    file: str
    row: int
    document_id: str
    document: int
    start: int
    stop: int


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Two bytes while they suffice. Megatron has no uint32; ids stay below 2^31, where int32 has the same bytes."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<i4")


class StoreWriter:
    """Writes a store, one document at a time, in memory that does not grow with it.

    Leaving the `with` block commits; leaving it by an exception deletes what was written.
    """

    def __init__(self, prefix: str | Path, vocab: int, tokenizer_fingerprint: str) -> None:
        self.prefix = str(prefix)
        self.vocab = vocab
        self.dtype = token_dtype(vocab)
        self.documents = 0
        self.tokens = 0
        self.text_bytes = 0
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._content = xxhash.xxh3_128()
        self._files: dict[str, int] = {}
        os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
        self._parts: dict[str, IO[bytes]] = {
            name: open(f"{self.prefix}.{name}", "wb")  # noqa: SIM115 (closed in __exit__)
            for name in ("bin", "starts", "origins", "lengths.tmp")
        }

    def __enter__(self) -> Self:
        return self

    def add(self, tokens: npt.ArrayLike, file: str, row: int, text_hash: int, text_bytes: int) -> None:
        """Appends a document. `tokens` ends with the end-of-document id; `file` is the path to show to a user."""
        ids = np.asarray(tokens)
        assert ids.ndim == 1 and 0 < ids.size < 1 << 31, "a document has between 1 and 2^31 - 1 tokens"
        assert ids.min() >= 0 and ids.max() < self.vocab, "a token id lies outside the vocabulary"
        data = np.ascontiguousarray(ids, dtype=self.dtype).data
        length = struct.pack("<i", ids.size)
        number = self._files.setdefault(file, len(self._files))
        self._parts["bin"].write(data)
        self._parts["lengths.tmp"].write(length)
        self._parts["starts"].write(struct.pack("<q", self.tokens))
        self._parts["origins"].write(struct.pack("<IQQ", number, row, text_hash))
        self._content.update(length)
        self._content.update(data)
        self.documents += 1
        self.tokens += ids.size
        self.text_bytes += text_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._parts["starts"].write(struct.pack("<q", self.tokens))
            for file in self._parts.values():
                _sync(file)
                file.close()
            self._write_index()
            os.unlink(f"{self.prefix}.lengths.tmp")
            self._commit()
        else:
            for name, file in self._parts.items():
                file.close()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.prefix}.{name}")

    def _write_index(self) -> None:
        code = _DTYPE_CODES[self.dtype.name]
        with (
            open(f"{self.prefix}.idx", "wb") as index,
            open(f"{self.prefix}.lengths.tmp", "rb") as lengths,
            open(f"{self.prefix}.starts", "rb") as starts,
        ):
            index.write(_HEADER.pack(_MAGIC, 1, code, self.documents, self.documents + 1))
            while block := lengths.read(4 * _COPY_ITEMS):
                index.write(block)
            for first in range(0, self.documents, _COPY_ITEMS):
                items = min(_COPY_ITEMS, self.documents - first)
                block = starts.read(8 * items)
                index.write((np.frombuffer(block, "<i8") * self.dtype.itemsize).tobytes())
            for first in range(0, self.documents + 1, _COPY_ITEMS):
                stop = min(first + _COPY_ITEMS, self.documents + 1)
                index.write(np.arange(first, stop, dtype="<i8").tobytes())
            _sync(index)

    def _commit(self) -> None:
        about = {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            "vocab": self.vocab,
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "fingerprint": self._content.hexdigest(),
            "tokenizer_fingerprint": self._tokenizer_fingerprint,
            "files": [{"path": path, "size_bytes": _size(path)} for path in self._files],
        }
        with open(f"{self.prefix}.json.tmp", "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1)
            _sync(file)
        os.replace(f"{self.prefix}.json.tmp", f"{self.prefix}.json")
        sync(os.path.dirname(self.prefix) or ".")


class TokenStore:
    """A store opened for reading: memory-mapped, so it costs no memory of its own; safe for many threads.

    `fingerprint` depends on the tokens and document lengths alone. `text_bytes` is the size of the text in UTF-8,
    which bits per byte are computed from.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        try:
            with open(f"{self.prefix}.json", encoding="utf-8") as file:
                about = json.load(file)
            if about["format_version"] != FORMAT_VERSION:
                raise self._damaged("json", f"has format {about['format_version']}, not {FORMAT_VERSION}")
            self.documents: int = about["documents"]
            self.tokens: int = about["tokens"]
            self.text_bytes: int = about["text_bytes"]
            self.vocab: int = about["vocab"]
            self.fingerprint: str = about["fingerprint"]
            self.tokenizer_fingerprint: str = about["tokenizer_fingerprint"]
            self.files: list[str] = [file["path"] for file in about["files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged("json", f"cannot be read ({error})") from error
        self.dtype = token_dtype(self.vocab)
        self._check_index()
        self._tokens = self._map("bin", self.dtype, self.tokens)
        self.starts: Ints = self._map("starts", np.dtype("<i8"), self.documents + 1)
        self._origins = self._map("origins", _ORIGIN, self.documents)
        if self.starts[-1] != self.tokens:
            raise self._damaged("starts", f"ends at token {self.starts[-1]}, not {self.tokens}")

    def __len__(self) -> int:
        return self.tokens

    def __reduce__(self) -> tuple[type[TokenStore], tuple[str]]:
        return TokenStore, (self.prefix,)  # pickling the maps would copy them; a worker maps the files itself

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop), as a read-only view of the file."""
        return self._tokens[start:stop]

    def gather(self, starts: Ints, length: int) -> Ints:
        """Row i holds the `length` tokens from `starts[i]` on. With the pages in memory, 1.5 G tokens/s for
        32 rows of 1,025 or more; small calls are bound by overhead (0.07 G for 8 rows of 129)."""
        starts = np.asarray(starts, dtype=np.int64)
        last = self.tokens - length
        if starts.size == 0:
            return np.empty((0, length), dtype=np.int64)
        if starts.min() < 0 or starts.max() > last:
            raise IndexError(f"{length} tokens from {starts.min()}..{starts.max()}, but {self.tokens} in all")
        # Overlapping windows, one per token, without copying; taking rows of them copies runs of tokens instead of
        # single ones (1.6 G against 0.4 G tokens/s with an index per token).
        strides = (self.dtype.itemsize, self.dtype.itemsize)
        windows = np.lib.stride_tricks.as_strided(self._tokens, (last + 1, length), strides, writeable=False)
        return windows[starts].astype(np.int64)

    def document_of(self, positions: Ints) -> Ints:
        """Number of the document that holds each token."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and (positions.min() < 0 or positions.max() >= self.tokens):
            raise IndexError(f"positions {positions.min()}..{positions.max()}, but {self.tokens} in all")
        return np.searchsorted(self.starts, positions, side="right") - 1

    def origin(self, position: int) -> Origin:
        """Where the token at `position` came from."""
        return self.origin_of_document(int(self.document_of(np.array([position]))[0]))

    def origin_of_document(self, document: int) -> Origin:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document}, but {self.documents} in all")
        file, row, text_hash = self._origins[document].item()
        start, stop = self.starts[document : document + 2].tolist()
        return Origin(self.files[file], row, f"{text_hash:016x}", document, start, stop)

    def _map(self, name: str, dtype: np.dtype[Any], items: int) -> npt.NDArray[Any]:
        path = f"{self.prefix}.{name}"
        self._check_size(name, items * dtype.itemsize)
        if items == 0:
            return np.empty(0, dtype)  # an empty file cannot be mapped
        return np.memmap(path, dtype=dtype, mode="r", shape=(items,)).view(np.ndarray)

    def _check_index(self) -> None:
        n = self.documents
        self._check_size("idx", _HEADER.size + 4 * n + 8 * n + 8 * (n + 1))
        with open(f"{self.prefix}.idx", "rb") as file:
            header = _HEADER.unpack(file.read(_HEADER.size))
        if header != (_MAGIC, 1, _DTYPE_CODES[self.dtype.name], n, n + 1):
            raise self._damaged("idx", "has another header than its .json tells")

    def _check_size(self, name: str, size_bytes: int) -> None:
        try:
            found = os.path.getsize(f"{self.prefix}.{name}")
        except OSError as error:
            raise self._damaged(name, "is missing") from error
        if found != size_bytes:
            raise self._damaged(name, f"has {found:,} bytes instead of {size_bytes:,}")

    def _damaged(self, name: str, what: str) -> UserError:
        folder = os.path.dirname(self.prefix) or "."
        return UserError(f"{self.prefix}.{name} {what}; delete the folder {folder} and run again")


def sync(path: str | Path) -> None:
    """Makes a file's content, or the names inside a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None
