"""Many strings in one file, read by number without loading the others: paths and document ids of a token store.

The strings in UTF-8 one after another, zero bytes up to a multiple of 8, then an int64 offset for every string and
the end. What it costs in memory is the offsets, while writing; while reading nothing, as the file is mapped.

Which tokens of a store count as targets: one bit each, with counts that make any span's sum a lookup.

The `.mask` file is a record for every 64 tokens (how many count before it, and its 64 bits) and one more at the end:
a quarter of a byte per token, and the number of targets in a span costs two records instead of a scan.

The files of a token store: their layout, the `.json` that commits them, and the fingerprint of their content.

A store is a group of files with one prefix. `.bin` and `.idx` are Megatron-LM's indexed dataset, one sequence per
document, so Megatron and NeMo can train from them too; the others are ours:

    .bin      token ids, document after document
    .idx      header, int32 lengths, int64 byte offsets, int64 document numbers
    .starts   int64 token offset of every document, and the end. The same offsets stand in the .idx, but at an odd
              byte: numpy then copies the whole array for every search (0.6 ms per million documents instead of 0.004)
    .origins  per document: number of the file, row, hash of the text
    .files    the paths that the origins number, as a table of strings
    .mask     only where targets are masked: which tokens count as targets (see token_mask.py)
    .ids      only where documents have ids of their own: a table of strings
    .scores   only where documents were scored: float32, NaN for those that were not
    .chunks   digests of the files above, compared when they are read (see chunk_digests.py); older stores have none
    .json     counts, sizes, fingerprints, and a digest of itself. Written last: it is the commit
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import content_digest
from bessemer.errors import UserError
from bessemer.storage import write_atomic

_ALIGNMENT = 8
_COPY_BYTES = 1 << 22


class StringsWriter:
    """Writes a table; `close` appends the offsets."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, text: str) -> None:
        data = text.encode()
        self.file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def append_empty(self, strings: int) -> None:
        self._ends.extend([self._ends[-1]] * strings)

    def append_table(self, table: Strings) -> None:
        """All strings of another table, copied in blocks."""
        for first in range(0, table.text.size, _COPY_BYTES):
            self.file.write(table.text[first : first + _COPY_BYTES].data)
        self._ends.frombytes((table.offsets[1:] + self._ends[-1]).astype(np.int64).tobytes())

    def close(self) -> None:
        self.file.write(bytes(-self._ends[-1] % _ALIGNMENT))
        self.file.write(np.frombuffer(self._ends, np.int64).astype("<i8", copy=False).data)


class Strings:
    """A table of so many strings, over the bytes of its file."""

    def __init__(self, data: npt.NDArray[np.uint8], count: int) -> None:
        cut = data.size - 8 * (count + 1)
        if cut < 0 or cut % _ALIGNMENT:
            raise ValueError(f"{data.size} bytes cannot hold {count} strings")
        self.offsets = data[cut:].view("<i8")
        self.text = data[: int(self.offsets[-1])]
        if cut != self.text.size + -self.text.size % _ALIGNMENT:
            raise ValueError(f"its text ends at byte {self.text.size} instead of {cut}")

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __getitem__(self, number: int) -> str:
        start, stop = self.offsets[number : number + 2].tolist()
        return self.text[start:stop].tobytes().decode()


RECORD = np.dtype([("before", "<u8"), ("bits", "<u8")])
_BITS = 64
_FLUSH_TOKENS = 1 << 16

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def mask_bytes(tokens: int) -> int:
    """The size of the file."""
    return (tokens // _BITS + 1) * RECORD.itemsize


class MaskWriter:
    """Appends to a `.mask`, in memory that does not grow; `close` writes what is left."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.tokens, self.kept = file, 0, 0
        self._waiting: list[Bytes] = []
        self._waiting_tokens = self._before = 0

    def append(self, mask: Bytes) -> None:
        """1 for a token that counts, 0 for one that does not; nothing else."""
        self._waiting.append(mask)
        self._waiting_tokens += mask.size
        self.tokens += mask.size
        self.kept += int(np.count_nonzero(mask))
        if self._waiting_tokens >= _FLUSH_TOKENS:
            self._flush(self._waiting_tokens // _BITS * _BITS)

    def append_ones(self, tokens: int) -> None:
        for first in range(0, tokens, _FLUSH_TOKENS):
            self.append(np.ones(min(_FLUSH_TOKENS, tokens - first), np.uint8))

    def close(self) -> None:
        self._flush(self._waiting_tokens // _BITS * _BITS)
        self._waiting.append(np.zeros(_BITS - self._waiting_tokens, np.uint8))
        self._flush(_BITS)

    def _flush(self, tokens: int) -> None:
        flat = np.concatenate([*self._waiting, np.empty(0, np.uint8)])
        records = np.empty(tokens // _BITS, RECORD)
        records["bits"] = np.packbits(flat[:tokens], bitorder="little").view("<u8")
        counts = np.bitwise_count(records["bits"]).astype(np.int64)
        records["before"] = self._before + np.cumsum(counts) - counts
        self._before += int(counts.sum())
        self.file.write(records.tobytes())
        self._waiting, self._waiting_tokens = [flat[tokens:]], flat.size - tokens


def kept_before(records: npt.NDArray[Any], positions: Ints) -> Ints:
    """How many tokens before each position count; a position may be the end."""
    word, bit = positions >> 6, (positions & 63).astype(np.uint64)
    found = records[word]
    below = found["bits"] & ((np.uint64(1) << bit) - np.uint64(1))
    return found["before"].astype(np.int64) + np.bitwise_count(below)


def mask_bits(records: npt.NDArray[Any], positions: Ints) -> Bytes:
    """1 for each position whose token counts, else 0. By bytes: words of 64 bits take a third longer."""
    byte = positions >> 3
    byte += (byte & ~7) + 8  # every eight bytes of bits follow eight bytes of a count
    bits: Bytes = records.view(np.uint8).take(byte, mode="clip")
    bits >>= positions.astype(np.uint8) & np.uint8(7)
    bits &= np.uint8(1)
    return bits


def mask_run(records: npt.NDArray[Any], start: int, length: int) -> Bytes:
    """The mask of one run of tokens."""
    words = np.ascontiguousarray(records["bits"][start >> 6 : (start + length + _BITS - 1) >> 6])
    begin = start & 63
    return np.unpackbits(words.view(np.uint8), bitorder="little")[begin : begin + length]


def mask_windows(records: npt.NDArray[Any], starts: Ints, length: int) -> Bytes:
    """Row i is the mask of the `length` tokens from `starts[i]` on."""
    words = (length + 2 * _BITS - 2) // _BITS  # as many as the worst alignment touches
    columns = (starts >> 6)[:, None] + np.arange(words)
    bits = records["bits"][np.minimum(columns, records.size - 1)]
    flat = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little").ravel()
    # Each row begins inside its first word: overlapping windows over the flat bits move it to its place.
    windows = np.lib.stride_tricks.as_strided(flat, (max(0, flat.size - length + 1), length), (1, 1), writeable=False)
    return windows[np.arange(starts.size) * words * _BITS + (starts & 63)]


FORMAT_VERSION = 2
SUFFIXES = ("bin", "idx", "starts", "origins", "files", "mask", "ids", "scores", CHUNKS)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
ORIGIN = np.dtype([("file", "<u4"), ("row", "<u8"), ("hash", "<u8")])
OFFSET = np.dtype("<i8")
SCORE = np.dtype("<f4")
_HASH_BYTES = 1 << 20
COPY_ITEMS = 1 << 18  # numbers held at once while files are put together


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Two bytes while they suffice. Megatron has no uint32; ids stay below 2^31, where int32 has the same bytes."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<i4")


@dataclass(frozen=True)
class StoreInfo:
    """What the `.json` of a store says. `kept` counts the tokens that weigh as targets: all, without a mask."""

    vocab: int
    documents: int
    tokens: int
    kept: int
    text_bytes: int
    files: int
    fingerprint: str
    tokenizer_fingerprint: str
    sizes: dict[str, int]  # bytes of each file, by its suffix
    sums: dict[str, str]  # xxh3_128 of the .chunks, and once published of every file

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocab)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def digest(self) -> str:
        """Of everything that the `.json` says."""
        return content_digest(json.dumps(self._content()).encode())

    def to_json(self) -> dict[str, Any]:
        return self._content() | {"digest": self.digest}

    def _content(self) -> dict[str, Any]:
        about: dict[str, Any] = {"format_version": FORMAT_VERSION, "dtype": self.dtype.name, **asdict(self)}
        return about | {"sizes": dict(sorted(self.sizes.items())), "sums": dict(sorted(self.sums.items()))}

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError when it is not one of ours."""
        if about["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {about['format_version']} instead of {FORMAT_VERSION}")
        made = cls(**{field.name: about[field.name] for field in fields(cls)})
        if about.get("digest", made.digest) != made.digest:
            raise ValueError("its content does not have the digest that it was written with")
        return made


def read_about(prefix: str) -> StoreInfo:
    """The `.json` of a local store. Costs one small file, however large the store."""
    try:
        with open(f"{prefix}.json", encoding="utf-8") as file:
            return StoreInfo.from_json(json.load(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(prefix, "json", f"cannot be read ({error})") from error


def commit(prefix: str, about: StoreInfo) -> None:
    """Makes the files a store. They have been synced; from here on a crash no longer loses it."""
    write_atomic(f"{prefix}.json", json.dumps(about.to_json(), indent=1))


def damaged(prefix: str, suffix: str, what: str) -> UserError:
    folder = os.path.dirname(prefix) or "."
    return UserError(f"{prefix}.{suffix}: {what}; {prepare_again(folder)}")


LOCKS = ".locks"  # the folder of locks in a cache of remote shards
PREPARE_COMMAND = "bessemer data prepare SPEC"  # commands that know the spec put its path in


def prepare_again(folder: str | Path) -> str:
    if (Path(folder).parent / LOCKS).exists():  # a shard of published data
        return f"delete the folder {folder}; the next start fetches it again"
    return f"delete the folder {folder} and prepare the data again: {PREPARE_COMMAND}"


class StoreContent:
    """The fingerprint of a sequence of documents: the same however they were divided into parts and shards.

    It is a polynomial in the documents' hashes, so that of a concatenation follows from those of its parts. Modulo a
    Mersenne prime near 2^127 two corpora meet by chance about as often as two 128-bit hashes do. It guards against
    mistakes, not against an adversary.
    """

    _PRIME = (1 << 127) - 1
    _FACTOR = 0x5DEECE66D9E3779B97F4A7C15F39CC06

    def __init__(self, fingerprint: str = "0", documents: int = 0) -> None:
        self._value, self.documents = int(fingerprint, 16), documents

    def add(self, tokens: memoryview, mask: memoryview | None = None) -> None:
        """One more document. A mask counts, since it decides what is learnt; one that keeps every token does not."""
        if mask is None:
            digest = xxhash.xxh3_128_intdigest(tokens)
        else:
            state = xxhash.xxh3_128(tokens, seed=1)
            state.update(mask)
            digest = state.intdigest()
        self._value = (self._value * self._FACTOR + digest) % self._PRIME
        self.documents += 1

    def join(self, other: StoreContent) -> None:
        """The documents of `other`, after ours."""
        shifted = self._value * pow(self._FACTOR, other.documents, self._PRIME)
        self._value = (shifted + other._value) % self._PRIME
        self.documents += other.documents

    def hexdigest(self) -> str:
        return f"{self._value:032x}"


def write_index(index: IO[bytes], starts_path: str, documents: int, dtype: np.dtype[Any]) -> None:
    """Megatron's `.idx`, from the `.starts`, in blocks."""
    with open(starts_path, "rb") as starts:
        index.write(HEADER.pack(MAGIC, 1, DTYPE_CODES[dtype.name], documents, documents + 1))
        blocks = [(first, min(first + COPY_ITEMS, documents)) for first in range(0, documents, COPY_ITEMS)]
        for first, stop in blocks:
            starts.seek(first * OFFSET.itemsize)
            edges = np.frombuffer(starts.read((stop - first + 1) * OFFSET.itemsize), OFFSET)
            index.write(np.diff(edges).astype("<i4").tobytes())
        for first, stop in blocks:
            starts.seek(first * OFFSET.itemsize)
            block = np.frombuffer(starts.read((stop - first) * OFFSET.itemsize), OFFSET)
            index.write((block * dtype.itemsize).tobytes())
        for first in range(0, documents + 1, COPY_ITEMS):
            index.write(np.arange(first, min(first + COPY_ITEMS, documents + 1), dtype="<i8").tobytes())


def index_bytes(documents: int) -> int:
    return HEADER.size + 12 * documents + 8 * (documents + 1)


def remove_store(prefix: str) -> None:
    """Deletes a store; the `.json` goes first, so it never claims too much."""
    for suffix in ("json", *SUFFIXES):
        Path(f"{prefix}.{suffix}").unlink(missing_ok=True)


def file_sum(path: str) -> str:
    """xxh3_128 of a file's content."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_HASH_BYTES):
            state.update(block)
    digest: str = state.hexdigest()
    return digest
