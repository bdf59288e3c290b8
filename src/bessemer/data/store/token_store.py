"""Tokens on disk: what `prepare` writes once and the stream reads at random for the rest of the run.

This is one store, on this machine; `shards.py` joins many, here or afar, into one address space with the same methods.
The files are described in `store_format.py` and written by `store_writer.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bessemer.data.store.arrays import chunks
from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import CheckedFile, GroupDigests, content_digest
from bessemer.data.store.format import (
    DTYPE_CODES,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    OFFSET,
    ORIGIN,
    RECORD,
    SCORE,
    StoreInfo,
    Strings,
    damaged,
    index_bytes,
    kept_before,
    mask_bits,
    mask_bytes,
    mask_run,
    mask_windows,
    read_about,
    token_dtype,
)
from bessemer.data.store.writer import StoreWriter

__all__ = ["FORMAT_VERSION", "Origin", "StoreWriter", "TokenSource", "TokenStore", "token_dtype"]

_DTYPES = {"starts": OFFSET, "origins": ORIGIN, "mask": RECORD, "scores": SCORE}  # of other files: bytes
_LONG_RUN = 256  # tokens, on average, from which on runs are copied one by one
_INDEX_ITEMS = 1 << 14

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


class TokenSource(Protocol):
    """What rows are made of: documents, each of at least one token, one after another in one address space."""

    @property
    def tokens(self) -> int: ...
    @property
    def documents(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def masked(self) -> bool: ...

    def gather(self, starts: Ints, length: int, /) -> npt.NDArray[np.integer]:
        """Row i holds the `length` tokens from `starts[i]` on."""
        ...

    def weights(self, starts: Ints, length: int, /) -> Floats | None:
        """What `gather`'s tokens weigh as targets; None when all weigh 1."""
        ...

    def runs(self, starts: Ints, lengths: Ints, /) -> npt.NDArray[np.integer]:
        """The `lengths[i]` tokens from `starts[i]` on, one run after another."""
        ...

    def copy_runs(self, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints, spill: bool = False, /) -> None:
        """Copies the `lengths[i]` tokens from `starts[i]` on to `out[at[i]:]`; `out` is flat. With `spill`, which
        needs rising `at`, what lies between the runs in `out` may be overwritten, and they are copied faster."""
        ...

    def copy_weights(self, starts: Ints, lengths: Ints, out: Floats, at: Ints, spill: bool = False, /) -> None:
        """The same for what the tokens weigh as targets."""
        ...

    def kept_before(self, positions: Ints, /) -> Ints:
        """The sum of the weights of all tokens before each position."""
        ...

    def document_of(self, positions: Ints, /) -> Ints:
        """Number of the document that holds each token."""
        ...

    def documents_in(self, starts: Ints, lengths: Ints, /) -> tuple[Ints, Ints, Ints]:
        """For each window of tokens: its first document, how many more begin inside it, and (flat) where."""
        ...

    def extents(self, documents: Ints, /) -> tuple[Ints, Ints]:
        """The first token of each document and the one behind its last."""
        ...

    def edges(self, first: int, stop: int, /) -> Ints:
        """Where the documents from `first` on begin, and where the one before `stop` ends."""
        ...

    def origin_of_document(self, document: int, /) -> Origin: ...


class TokenStore:
    """A store opened for reading: memory-mapped, so it costs no memory of its own; safe for many threads.

    `fingerprint` depends on the tokens, the document lengths and the mask alone. `text_bytes` is the size of the text
    in UTF-8, which bits per byte are computed from. What is read is compared with its digests first; `verifiable` is
    False for a store of an earlier version, which has none.
    """

    def __init__(self, prefix: str | Path, about: StoreInfo | None = None) -> None:
        self.prefix = str(prefix)
        self.about = about = about or read_about(self.prefix)
        self.documents, self.tokens, self.kept = about.documents, about.tokens, about.kept
        self.text_bytes, self.vocab, self.dtype = about.text_bytes, about.vocab, about.dtype
        self.fingerprint, self.tokenizer_fingerprint = about.fingerprint, about.tokenizer_fingerprint
        self.masked = "mask" in about.sizes
        self._check_sizes()
        self._check_index()
        self._checked: dict[str, CheckedFile] = {}
        self._digests = self._read_digests()
        self._maps: dict[str, npt.NDArray[Any]] = {}
        self._tokens = self._map("bin")
        self._starts: Ints = self._map("starts")
        if self._starts[-1] != self.tokens:
            raise damaged(self.prefix, "starts", f"ends at token {self._starts[-1]}, not {self.tokens}")
        self._mask = self._map("mask") if self.masked else None

    def __len__(self) -> int:
        return self.tokens

    def __reduce__(self) -> tuple[type[TokenStore], tuple[str]]:
        return TokenStore, (self.prefix,)  # pickling the maps would copy them; a worker maps the files itself

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
        """Row i holds the `length` tokens from `starts[i]` on, in the store's type."""
        starts = np.asarray(starts, dtype=np.int64)
        self._check_runs(starts, length)
        if starts.size == 0:
            return np.empty((0, length), self.dtype)
        self.check_tokens(starts, length)
        # Overlapping windows, one per token, without copying; taking rows of them copies runs of tokens instead of
        # single ones (1.6 G against 0.4 G tokens/s with an index per token).
        strides = (self.dtype.itemsize, self.dtype.itemsize)
        shape = (self.tokens - length + 1, length)
        windows = np.lib.stride_tricks.as_strided(self._tokens, shape, strides, writeable=False)
        return windows[starts]

    def weights(self, starts: Ints, length: int) -> Floats | None:
        """What `gather`'s tokens weigh as targets, 0 or 1; None when the store has no mask."""
        if self._mask is None:
            return None
        self._check_runs(starts, length)
        self.check_mask(starts, length)
        return mask_windows(self._mask, starts, length).astype(np.float32)

    def runs(self, starts: Ints, lengths: Ints) -> npt.NDArray[Any]:
        """The `lengths[i]` tokens from `starts[i]` on, one run after another, in the store's type."""
        out = np.empty(int(lengths.sum()), self.dtype)
        self.copy_runs(starts, lengths, out, np.cumsum(lengths) - lengths)
        return out

    def copy_runs(self, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints, spill: bool = False) -> None:
        """Copies the `lengths[i]` tokens from `starts[i]` on to `out[at[i]:]`; `spill`: also between the runs."""
        self._check_runs(starts, lengths)
        self.check_tokens(starts, lengths)
        if are_long(lengths):
            for start, length, to in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
                out[to : to + length] = self._tokens[start : start + length]
        else:
            copy_by_index(self.tokens_at, starts, lengths, out, at, spill)

    def copy_weights(self, starts: Ints, lengths: Ints, out: Floats, at: Ints, spill: bool = False) -> None:
        """The same for what the tokens weigh as targets, 0 or 1."""
        self._check_runs(starts, lengths)
        self.check_mask(starts, lengths)
        if are_long(lengths):
            for start, length, to in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
                out[to : to + length] = self.run_weights(start, length)
        else:
            copy_by_index(self.weights_at, starts, lengths, out, at, spill)

    def tokens_at(self, positions: Ints) -> npt.NDArray[Any]:
        """Single tokens, not compared with their digests: call `check_tokens`. A position outside gives any token."""
        return self._tokens.take(positions, mode="clip")

    def weights_at(self, positions: Ints) -> npt.NDArray[np.uint8]:
        """What single tokens weigh, 0 or 1; call `check_mask` first."""
        return np.ones(positions.shape, np.uint8) if self._mask is None else mask_bits(self._mask, positions)

    def run_weights(self, start: int, length: int) -> npt.NDArray[np.uint8] | int:
        """What the tokens of one run weigh; 1 where all weigh that; call `check_mask` first."""
        return 1 if self._mask is None else mask_run(self._mask, start, length)

    def kept_before(self, positions: Ints) -> Ints:
        """The sum of the weights of all tokens before each position: a lookup, not a scan."""
        if self._mask is None:
            return positions
        self.check_mask(positions, 1)
        return kept_before(self._mask, positions)

    def scores(self, documents: Ints) -> Floats:
        """What each document was scored with; NaN where it was not."""
        if "scores" not in self.about.sizes:
            return np.full(documents.shape, np.nan, np.float32)
        return self._scores[documents]

    def document_of(self, positions: Ints) -> Ints:
        """Number of the document that holds each token."""
        positions = np.asarray(positions, dtype=np.int64)
        self._check_runs(positions, 1)
        return self._search(positions)

    def documents_in(self, starts: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """For each window of tokens: its first document, how many more begin inside it, and (flat) where."""
        first, last = self._search(starts), self._search(starts + (lengths - 1))
        more = last - first
        self._check_starts(first, more + 1)
        return first, more, self._starts[run_indices(first + 1, more)]

    def begins_in(self, start: int, stop: int) -> tuple[int, Ints]:
        """The document that holds token `start`, and the starts of those that begin after it and before `stop`."""
        first, last = (int(self._starts.searchsorted(position, "right")) - 1 for position in (start, stop - 1))
        if "starts" in self._checked and not self._checked["starts"].complete:
            first, last = self._search(np.array([start, stop - 1])).tolist()
            self._checked["starts"].check(first, last + 1)
        return first, self._starts[first + 1 : last + 1]

    def extents(self, documents: Ints) -> tuple[Ints, Ints]:
        """The first token of each document and the one behind its last."""
        self._check_starts(documents, 2)
        return self._starts[documents], self._starts[documents + 1]

    def edges(self, first: int, stop: int) -> Ints:
        """Where the documents from `first` on begin, and where the one before `stop` ends."""
        if (checked := self._checked.get("starts")) is not None:
            checked.check(first, stop + 1)
        return self._starts[first : stop + 1]

    def origin(self, position: int) -> Origin:
        """Where the token at `position` came from."""
        return self.origin_of_document(int(self.document_of(np.array([position]))[0]))

    def origin_of_document(self, document: int) -> Origin:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document}, but {self.documents} in all")
        file, row, text_hash = self._origins[document].item()
        own_id = "" if self.ids is None else self.ids[document]
        start, stop = self.edges(document, document + 1).tolist()
        return Origin(self._files[file], row, own_id or f"{text_hash:016x}", document, start, stop)

    def origins_of(self, first: int, stop: int) -> npt.NDArray[Any]:
        """A copy of the records of documents [first, stop): number in `files`, row, hash of the text."""
        return self._origins[first:stop].copy()

    @cached_property
    def ids(self) -> Strings | None:
        """The documents' own ids, empty where one has none; None where none has."""
        return self._strings("ids", self.documents) if "ids" in self.about.sizes else None

    @property
    def verifiable(self) -> bool:
        return self._digests is not None

    def map_all(self) -> None:
        """Maps every file now: what is mapped can be read even after the files were deleted."""
        for suffix in self.about.sizes.keys() - {CHUNKS}:
            self._map(suffix)

    def verify(self) -> None:
        """Compares every byte of every file with its digests; does nothing where the store has none."""
        for _ in self.verify_files():
            pass

    def verify_files(self, suffixes: Sequence[str] | None = None) -> Iterator[int]:
        """The same, or for some of the files; yields the bytes compared, some at a time."""
        for suffix in suffixes or sorted(self.about.sizes.keys() - {CHUNKS}):
            self._map(suffix)
            if suffix in self._checked:
                yield from self._checked[suffix].progress()

    def check_tokens(self, starts: Ints, lengths: Ints | int) -> None:
        """Compares these runs of tokens with their digests, unless that was done before."""
        if (checked := self._checked.get("bin")) is not None:
            checked.check_runs(starts, lengths)

    def check_mask(self, starts: Ints, lengths: Ints | int) -> None:
        """The same for what the tokens weigh."""
        if (checked := self._checked.get("mask")) is not None and not checked.complete:
            first = starts >> 6
            checked.check_runs(first, ((starts + lengths - 1) >> 6) - first + 1)

    # The columns below are for people, not for batches: mapped only when asked for, and then verified whole.
    @cached_property
    def _origins(self) -> npt.NDArray[Any]:
        return self._map_whole("origins")

    @cached_property
    def _scores(self) -> npt.NDArray[Any]:
        return self._map_whole("scores")

    @cached_property
    def _files(self) -> Strings:
        return self._strings("files", self.about.files)

    def _strings(self, suffix: str, count: int) -> Strings:
        try:
            return Strings(self._map_whole(suffix), count)
        except ValueError as error:
            raise damaged(self.prefix, suffix, f"is not what its .json tells: {error}") from error

    def _map_whole(self, suffix: str) -> npt.NDArray[Any]:
        data = self._map(suffix)
        if suffix in self._checked:
            self._checked[suffix].check_all()
        return data

    def _map(self, suffix: str) -> npt.NDArray[Any]:
        if suffix not in self._maps:
            dtype = self.dtype if suffix == "bin" else _DTYPES.get(suffix, np.dtype(np.uint8))
            data = map_file(f"{self.prefix}.{suffix}", self.about.sizes[suffix], dtype)
            if self._digests is not None:
                self._checked[suffix] = self._digests.checked(suffix, data, partial(damaged, self.prefix))
            self._maps[suffix] = data
        return self._maps[suffix]

    def _read_digests(self) -> GroupDigests | None:
        if CHUNKS not in self.about.sizes:
            return None
        data = Path(f"{self.prefix}.{CHUNKS}").read_bytes()
        if content_digest(data) != self.about.sums.get(CHUNKS):
            raise damaged(self.prefix, CHUNKS, "is not what was written")
        try:
            return GroupDigests(data, self.about.sizes)
        except ValueError as error:
            raise damaged(self.prefix, CHUNKS, str(error)) from error

    def _search(self, positions: Ints) -> Ints:
        """The document of each position. The search reads at random, so its result is checked and not its way: a
        start that is not after the position and a next one that is prove it, once these two are verified."""
        found = np.searchsorted(self._starts, positions, side="right") - 1
        checked = self._checked.get("starts")
        if checked is not None and not checked.complete and positions.size:
            inside = np.clip(found, 0, self.documents - 1)
            checked.check_runs(inside, 2)
            if ((self._starts[inside] > positions) | (self._starts[inside + 1] <= positions)).any():
                checked.check_all()  # some other chunk led astray
                raise damaged(self.prefix, "starts", "changes while it is read")
        return found

    def _check_starts(self, documents: Ints, counts: Ints | int) -> None:
        if (checked := self._checked.get("starts")) is not None:
            checked.check_runs(documents, counts)

    def _check_runs(self, starts: Ints, lengths: Ints | int) -> None:
        if starts.size and (int(starts.min()) < 0 or int((starts + lengths).max()) > self.tokens):
            most = np.max(lengths)
            raise IndexError(f"{most} tokens from {starts.min()}..{starts.max()}, but {self.tokens} in all")

    def _check_sizes(self) -> None:
        sizes, documents = self.about.sizes, self.documents
        expected = {
            "bin": self.tokens * self.dtype.itemsize,
            "idx": index_bytes(documents),
            "starts": (documents + 1) * OFFSET.itemsize,
            "origins": documents * ORIGIN.itemsize,
            "files": sizes.get("files"),
            "mask": mask_bytes(self.tokens),
            "scores": documents * SCORE.itemsize,
        }
        missing = {"bin", "idx", "starts", "origins", "files"} - sizes.keys()
        if missing or any(expected.get(suffix, size) != size for suffix, size in sizes.items()):
            raise damaged(self.prefix, "json", "contradicts itself about its sizes")
        for suffix, size in sizes.items():
            try:
                found = os.path.getsize(f"{self.prefix}.{suffix}")
            except OSError as error:
                raise damaged(self.prefix, suffix, "is missing") from error
            if found != size:
                raise damaged(self.prefix, suffix, f"has {found:,} bytes instead of {size:,}")

    def _check_index(self) -> None:
        n = self.documents
        with open(f"{self.prefix}.idx", "rb") as file:
            header = HEADER.unpack(file.read(HEADER.size))
        if header != (MAGIC, 1, DTYPE_CODES[self.dtype.name], n, n + 1):
            raise damaged(self.prefix, "idx", "has another header than its .json tells")


def run_indices(starts: Ints, lengths: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... for `lengths[0]` numbers, then from starts[1] on, and so forth."""
    indices = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    indices += np.arange(indices.size)
    return indices


def are_long(lengths: Ints) -> bool:
    """Runs are long enough to be copied one by one."""
    return bool(lengths.sum() >= _LONG_RUN * lengths.size)


def copy_by_index(
    read: Callable[[Ints], npt.NDArray[Any]], starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints, spill: bool
) -> None:
    """Copies runs with an index for every item: for short ones, where a copy of each costs more (27 against 5 ns a
    token at 20 tokens). Some thousand items at a time, whose indices stay in the processor's cache (9 ns if not).
    Runs without gaps are written as one, so with `spill` they go on to where the next begins."""
    if spill:
        lengths = np.diff(at, append=at[-1:] + lengths[-1:])
    for first, stop, begin, end in chunks(lengths, _INDEX_ITEMS):
        these = slice(first, stop)
        values, to = read(run_indices(starts[these], lengths[these])), int(at[first])
        if at[stop - 1] + lengths[stop - 1] - to == end - begin:
            out[to : to + end - begin] = values
        else:
            out[run_indices(at[these], lengths[these])] = values


def map_file(path: str, size_bytes: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A file as a read-only array, which lasts as long as it is used.

    Arrow's map holds no file descriptor, as numpy's does: with three files for each of hundreds of shards the usual
    limit of 1,024 open files would be reached. Images made for training alone may lack Arrow, and have few shards.
    """
    if size_bytes == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    try:
        import pyarrow as pa
    except ImportError:
        return np.memmap(path, dtype, mode="r", shape=(size_bytes // dtype.itemsize,)).view(np.ndarray)
    with pa.memory_map(path) as file:
        return np.frombuffer(file.read_buffer(size_bytes), dtype)
