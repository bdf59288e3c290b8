"""One shard of a token store, opened for reading: memory-mapped files whose content is verified when it is first used.

`token_store.py` joins shards into one address space, `format.py` describes the files, `writer.py` writes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import CheckedFile, GroupDigests, content_digest
from bessemer.data.store.format import (
    DTYPE_CODES,
    FIELD,
    HEADER,
    MAGIC,
    OFFSET,
    ORIGIN,
    RECORD,
    SCORE,
    StoreInfo,
    Strings,
    damage_error,
    index_bytes,
    mask_bits,
    mask_bytes,
    mask_run,
    read_info,
    targets_before,
)

_DTYPES = {"starts": OFFSET, "origins": ORIGIN, "mask": RECORD, "scores": SCORE}  # other files hold bytes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Origin:
    """The document that a token belongs to: tokens [start, stop) of the store, read from `row` of `file`."""

    file: str
    row: int
    document_id: str  # the user's own, or the hash of the text
    document: int
    start: int
    stop: int


class Shard:
    """Takes no memory of its own and is safe for many threads.

    What is read is first compared with its digests. `verifiable` is False for a shard of an earlier version, which has
    none.
    """

    def __init__(self, prefix: str | Path, info: StoreInfo | None = None) -> None:
        self.prefix = str(prefix)
        self.info = info = info or read_info(self.prefix)
        self.documents, self.tokens, self.dtype = info.documents, info.tokens, info.dtype
        self._check_sizes()
        self._check_index()
        self._checked: dict[str, CheckedFile] = {}
        self._digests = self._read_digests()
        self._maps: dict[str, npt.NDArray[Any]] = {}
        self._tokens = self._map("bin")
        self._starts: Ints = self._map("starts")
        if self._starts[-1] != self.tokens:
            raise damage_error(self.prefix, "starts", f"ends at token {self._starts[-1]}, not {self.tokens}")
        self._mask = self._map("mask") if "mask" in info.sizes else None

    @property
    def files(self) -> list[str]:
        """The paths that the documents came from."""
        return [self._files[number] for number in range(len(self._files))]

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop), as a read-only view of the file."""
        if (checked := self._checked.get("bin")) is not None:
            checked.check(*slice(start, stop).indices(self.tokens)[:2])
        return self._tokens[start:stop]

    def gather(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Row i holds the `length` tokens from `starts[i]` on."""
        self.check_tokens(starts, length)
        # Overlapping windows, one per token, without copying; taking rows of them copies runs of tokens instead of
        # single ones (1.6 G against 0.4 G tokens/s with an index per token).
        shape, strides = (self.tokens - length + 1, length), (self.dtype.itemsize, self.dtype.itemsize)
        windows = np.lib.stride_tricks.as_strided(self._tokens, shape, strides, writeable=False)
        return windows[starts]

    def tokens_at(self, positions: Ints) -> npt.NDArray[Any]:
        """Single tokens, without verification: call `check_tokens` first. A position outside gives any token."""
        return self._tokens.take(positions, mode="clip")

    def weights_at(self, positions: Ints) -> npt.NDArray[np.uint8]:
        """The weights (0 or 1) of single tokens as targets; call `check_mask` first."""
        return np.ones(positions.shape, np.uint8) if self._mask is None else mask_bits(self._mask, positions)

    def run_weights(self, start: int, length: int) -> npt.NDArray[np.uint8] | int:
        """The weights of one run of tokens, 1 where the shard has no mask; call `check_mask` first."""
        return 1 if self._mask is None else mask_run(self._mask, start, length)

    def targets_before(self, positions: Ints) -> Ints:
        """How many tokens before each position count as targets: a lookup, not a scan."""
        if self._mask is None:
            return positions
        self.check_mask(positions, 1)
        return targets_before(self._mask, positions)

    def scores(self, documents: Ints) -> Floats:
        """The documents' scores; NaN where a document has none."""
        if "scores" not in self.info.sizes:
            return np.full(documents.shape, np.nan, np.float32)
        return self._scores[documents]

    def field(self, name: str) -> npt.NDArray[Any]:
        """(documents, width) of a field of documents, (tokens,) of one of tokens. Verified completely at first use."""
        data, width = self._map_verified(FIELD + name), self.info.fields[name][1]
        return data.reshape(self.documents, width) if width else data

    def document_of(self, positions: Ints) -> Ints:
        """The document that holds each token.

        The binary search reads unverified places, so its result is verified instead: a start that is not after the
        position, and a next start that is, prove it.
        """
        documents = np.searchsorted(self._starts, positions, side="right") - 1
        checked = self._checked.get("starts")
        if checked is not None and not checked.complete and positions.size:
            inside = np.clip(documents, 0, self.documents - 1)
            checked.check_runs(inside, 2)
            if ((self._starts[inside] > positions) | (self._starts[inside + 1] <= positions)).any():
                checked.check_all()  # another chunk misled the search
                raise damage_error(self.prefix, "starts", "changes while it is read")
        return documents

    def documents_in(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """For each window of tokens: its first document, how many more begin inside it, and (flat) where."""
        first, last = self.document_of(starts), self.document_of(starts + (lengths - 1))
        more = last - first
        self._check_starts(first, more + 1)
        return first, more, self._starts[run_indices(first + 1, more)]

    def begins_in(self, start: int, stop: int) -> tuple[int, Ints]:
        """The document that holds token `start`, and the starts of those that begin after it and before `stop`."""
        first, last = (int(self._starts.searchsorted(position, "right")) - 1 for position in (start, stop - 1))
        if "starts" in self._checked and not self._checked["starts"].complete:
            first, last = self.document_of(np.array([start, stop - 1])).tolist()
            self._checked["starts"].check(first, last + 1)
        return first, self._starts[first + 1 : last + 1]

    def extents(self, documents: Ints) -> tuple[Ints, Ints]:
        """Each document's tokens, as [start, stop)."""
        self._check_starts(documents, 2)
        return self._starts[documents], self._starts[documents + 1]

    def edges(self, first: int, stop: int) -> Ints:
        """The starts of documents [first, stop), and the end of the last."""
        if (checked := self._checked.get("starts")) is not None:
            checked.check(first, stop + 1)
        return self._starts[first : stop + 1]

    def origin_of_document(self, document: int) -> Origin:
        file, row, text_hash = self._origins[document].item()
        own_id = "" if self.ids is None else self.ids[document]
        start, stop = self.edges(document, document + 1).tolist()
        return Origin(self._files[file], row, own_id or f"{text_hash:016x}", document, start, stop)

    def origins_of(self, first: int, stop: int) -> npt.NDArray[Any]:
        """A copy of the records of documents [first, stop): index in `files`, row, hash of the text."""
        return self._origins[first:stop].copy()

    @cached_property
    def ids(self) -> Strings | None:
        """The user's ids of the documents, empty where one has none; None where none has."""
        return self._strings("ids", self.documents) if "ids" in self.info.sizes else None

    @property
    def verifiable(self) -> bool:
        return self._digests is not None

    def map_all(self) -> None:
        """Maps every file now: a mapped file can be read even after it was deleted."""
        for suffix in self.info.sizes.keys() - {CHUNKS}:
            self._map(suffix)

    def verify(self) -> None:
        """Compares every byte of every file with its digests; does nothing where the shard has none."""
        for _ in self.verify_files():
            pass

    def verify_files(self, suffixes: Sequence[str] | None = None) -> Iterator[int]:
        """Verifies all files, or those with the given suffixes; yields the bytes compared, some at a time."""
        for suffix in suffixes or sorted(self.info.sizes.keys() - {CHUNKS}):
            self._map(suffix)
            if suffix in self._checked:
                yield from self._checked[suffix].progress()

    def check_tokens(self, starts: Ints, lengths: Ints | int) -> None:
        """Compares runs of tokens with their digests, unless that was done before."""
        if (checked := self._checked.get("bin")) is not None:
            checked.check_runs(starts, lengths)

    def check_mask(self, starts: Ints, lengths: Ints | int) -> None:
        """The same for the mask of these tokens."""
        if (checked := self._checked.get("mask")) is not None and not checked.complete:
            first = starts >> 6
            checked.check_runs(first, ((starts + lengths - 1) >> 6) - first + 1)

    # These columns serve provenance, not batches: each is mapped on first use and then verified completely.
    @cached_property
    def _origins(self) -> npt.NDArray[Any]:
        return self._map_verified("origins")

    @cached_property
    def _scores(self) -> npt.NDArray[Any]:
        return self._map_verified("scores")

    @cached_property
    def _files(self) -> Strings:
        return self._strings("files", self.info.files)

    def _strings(self, suffix: str, count: int) -> Strings:
        try:
            return Strings(self._map_verified(suffix), count)
        except ValueError as error:
            raise damage_error(self.prefix, suffix, f"does not match its .json: {error}") from error

    def _map_verified(self, suffix: str) -> npt.NDArray[Any]:
        data = self._map(suffix)
        if suffix in self._checked:
            self._checked[suffix].check_all()
        return data

    def _map(self, suffix: str) -> npt.NDArray[Any]:
        if suffix not in self._maps:
            dtype = self.dtype if suffix == "bin" else _DTYPES.get(suffix, np.dtype(np.uint8))
            if suffix.startswith(FIELD):
                dtype = np.dtype(self.info.fields[suffix.removeprefix(FIELD)][0])
            data = map_file(f"{self.prefix}.{suffix}", self.info.sizes[suffix], dtype)
            if self._digests is not None:
                self._checked[suffix] = self._digests.checked(suffix, data, partial(damage_error, self.prefix))
            self._maps[suffix] = data
        return self._maps[suffix]

    def _read_digests(self) -> GroupDigests | None:
        if CHUNKS not in self.info.sizes:
            return None
        data = Path(f"{self.prefix}.{CHUNKS}").read_bytes()
        if content_digest(data) != self.info.sums.get(CHUNKS):
            raise damage_error(self.prefix, CHUNKS, "is not what was written")
        try:
            return GroupDigests(data, self.info.sizes)
        except ValueError as error:
            raise damage_error(self.prefix, CHUNKS, str(error)) from error

    def _check_starts(self, documents: Ints, counts: Ints | int) -> None:
        if (checked := self._checked.get("starts")) is not None:
            checked.check_runs(documents, counts)

    def _check_sizes(self) -> None:
        sizes, documents = self.info.sizes, self.documents
        expected = {
            "bin": self.tokens * self.dtype.itemsize,
            "idx": index_bytes(documents),
            "starts": (documents + 1) * OFFSET.itemsize,
            "origins": documents * ORIGIN.itemsize,
            "files": sizes.get("files"),
            "mask": mask_bytes(self.tokens),
            "scores": documents * SCORE.itemsize,
        }
        for name, (dtype, width) in self.info.fields.items():
            expected[FIELD + name] = (width * documents or self.tokens) * np.dtype(dtype).itemsize
        missing = {
            "bin",
            "idx",
            "starts",
            "origins",
            "files",
            *(FIELD + name for name in self.info.fields),
        } - sizes.keys()
        if missing or any(expected.get(suffix, size) != size for suffix, size in sizes.items()):
            raise damage_error(self.prefix, "json", "has sizes that contradict its counts")
        for suffix, size in sizes.items():
            try:
                actual = os.path.getsize(f"{self.prefix}.{suffix}")
            except OSError as error:
                raise damage_error(self.prefix, suffix, "is missing") from error
            if actual != size:
                raise damage_error(self.prefix, suffix, f"has {actual:,} bytes instead of {size:,}")

    def _check_index(self) -> None:
        n = self.documents
        with open(f"{self.prefix}.idx", "rb") as file:
            header = HEADER.unpack(file.read(HEADER.size))
        if header != (MAGIC, 1, DTYPE_CODES[self.dtype.name], n, n + 1):
            raise damage_error(self.prefix, "idx", "has a header that does not match its .json")


def run_indices(starts: Ints, lengths: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... for `lengths[0]` numbers, then from starts[1] on, and so forth."""
    indices = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    indices += np.arange(indices.size)
    return indices


def map_file(path: str, size_bytes: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A file as a read-only array.

    Arrow's map holds no file descriptor, unlike numpy's: three files for each of hundreds of shards would exceed the
    usual limit of 1,024 open files. Images made for training alone may lack Arrow, and have few shards.
    """
    if size_bytes == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    try:
        import pyarrow as pa
    except ImportError:
        return np.memmap(path, dtype, mode="r", shape=(size_bytes // dtype.itemsize,)).view(np.ndarray)
    with pa.memory_map(path) as file:
        return np.frombuffer(file.read_buffer(size_bytes), dtype)
