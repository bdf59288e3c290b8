"""The files of a token store: their layout, the `.json` that commits them, and the fingerprint of their content.

A store is a group of files with one prefix. `.bin` and `.idx` are Megatron-LM's indexed dataset, one sequence per
document, so Megatron and NeMo can train from them too. The others are Bessemer's:

    .bin      token ids, document after document
    .idx      header, int32 lengths, int64 byte offsets, int64 document numbers
    .starts   int64 token offset of every document, and the end. The .idx has the same offsets, but unaligned: numpy
              then copies the whole array for every search (0.6 ms per million documents instead of 0.004)
    .origins  per document: index of the file, row, hash of the text
    .files    the paths that the origins refer to, as a table of strings
    .mask     only if targets are masked: a record for every 64 tokens and one more at the end, with the number of
              targets before it and its 64 bits. Counting the targets of a span takes two records instead of a scan
    .ids      only if documents have ids: a table of strings
    .scores   only if documents were scored: float32, NaN for those that were not
    .field-X  only if documents have a field X, such as a label: numbers of one type, a fixed number for each document
              or one for each token, as the .json says
    .chunks   digests of the files above, compared when they are read (see digests.py); older stores have none
    .json     counts, sizes, fingerprints, and a digest of itself. Written last: it is the commit

A table of strings is the text in UTF-8, zero bytes up to a multiple of 8, then an int64 offset for every string and the
end. Reading one string loads no others.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from glob import escape
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
    """Writes a table of strings; `close` appends the offsets."""

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
    """A table of `count` strings, over the bytes of its file."""

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
    """Writes a `.mask` in constant memory; `close` writes the remainder."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.tokens, self.kept = file, 0, 0
        self._waiting: list[Bytes] = []
        self._waiting_tokens = self._before = 0

    def append(self, mask: Bytes) -> None:
        """`mask` holds 1 for a token that counts as a target, else 0."""
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


def targets_before(records: npt.NDArray[Any], positions: Ints) -> Ints:
    """How many tokens before each position count as targets; a position may be the end."""
    record, bit = records[positions >> 6], (positions & 63).astype(np.uint64)
    below = record["bits"] & ((np.uint64(1) << bit) - np.uint64(1))
    return record["before"].astype(np.int64) + np.bitwise_count(below)


def mask_bits(records: npt.NDArray[Any], positions: Ints) -> Bytes:
    """1 for each position whose token counts, else 0. Reads bytes: 64-bit words take a third longer."""
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


FORMAT_VERSION = 2
SUFFIXES = ("bin", "idx", "starts", "origins", "files", "mask", "ids", "scores", CHUNKS)

FIELD = "field-"  # beginning of the suffixes of fields

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
ORIGIN = np.dtype([("file", "<u4"), ("row", "<u8"), ("hash", "<u8")])
OFFSET = np.dtype("<i8")
SCORE = np.dtype("<f4")
_HASH_BYTES = 1 << 20
COPY_ITEMS = 1 << 18  # numbers held at once while files are joined


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Two bytes if they suffice, else four. Megatron has no uint32; ids below 2^31 have the same bytes in int32."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<i4")


@dataclass(frozen=True)
class StoreInfo:
    """The content of a store's `.json`. `kept` counts the tokens that are targets: all of them without a mask."""

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
    fields: dict[str, tuple[str, int]] = field(default_factory=dict)  # numpy type, and numbers a document; 0: a token

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.vocab)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def digest(self) -> str:
        """Digest of everything else in the `.json`."""
        return content_digest(json.dumps(self._content()).encode())

    def to_json(self) -> dict[str, Any]:
        return self._content() | {"digest": self.digest}

    def _content(self) -> dict[str, Any]:
        info: dict[str, Any] = {"format_version": FORMAT_VERSION, "dtype": self.dtype.name, **asdict(self)}
        if not self.fields:  # as in stores of earlier versions
            del info["fields"]
        else:
            info["fields"] = {name: list(kind) for name, kind in sorted(self.fields.items())}
        return info | {"sizes": dict(sorted(self.sizes.items())), "sums": dict(sorted(self.sums.items()))}

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError if this is not the `.json` of a store."""
        if info["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {info['format_version']} instead of {FORMAT_VERSION}")
        content = {each.name: info[each.name] for each in fields(cls) if each.name != "fields"}
        stored = {name: (str(dtype), int(width)) for name, (dtype, width) in info.get("fields", {}).items()}
        made = cls(**content, fields=stored)
        if info.get("digest", made.digest) != made.digest:
            raise ValueError("its content does not match its digest")
        return made


def read_info(prefix: str) -> StoreInfo:
    """The `.json` of a local store. Costs one small file, however large the store."""
    try:
        with open(f"{prefix}.json", encoding="utf-8") as file:
            return StoreInfo.from_json(json.load(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damage_error(prefix, "json", f"cannot be read ({error})") from error


def commit_store(prefix: str, info: StoreInfo) -> None:
    """Turns the files, which have been synced, into a store that survives a crash."""
    write_atomic(f"{prefix}.json", json.dumps(info.to_json(), indent=1))


def check_tokenizers(prefixes: Sequence[str], infos: Sequence[StoreInfo]) -> None:
    """Refuses stores that different tokenizers wrote."""
    for prefix, info in zip(prefixes, infos, strict=True):
        if (info.vocab, info.tokenizer_fingerprint) != (infos[0].vocab, infos[0].tokenizer_fingerprint):
            raise UserError(
                f"{prefix}: was tokenized by another tokenizer than {prefixes[0]}; prepare one of them again"
            )


def damage_error(prefix: str, suffix: str, problem: str) -> UserError:
    return UserError(f"{prefix}.{suffix}: {problem}; {repair_hint(os.path.dirname(prefix) or '.')}")


LOCKS = ".locks"  # the folder of locks in a cache of remote shards
PREPARE_COMMAND = "bessemer data prepare SPEC"  # the command line fills in the spec's path


def repair_hint(folder: str | Path) -> str:
    """How to replace damaged data in this folder."""
    if (Path(folder).parent / LOCKS).exists():  # a shard of published data
        return f"delete the folder {folder}; the next start fetches it again"
    return f"delete the folder {folder} and prepare the data again: {PREPARE_COMMAND}"


class StoreContent:
    """The fingerprint of a sequence of documents: the same however they were divided into parts and shards.

    It is a polynomial in the documents' hashes modulo a Mersenne prime near 2^127, so the fingerprint of a
    concatenation follows from those of its parts. It guards against mistakes, not against an adversary.
    """

    _PRIME = (1 << 127) - 1
    _FACTOR = 0x5DEECE66D9E3779B97F4A7C15F39CC06

    def __init__(self, fingerprint: str = "0", documents: int = 0) -> None:
        self._value, self.documents = int(fingerprint, 16), documents

    def add(self, tokens: memoryview, mask: memoryview | None = None, fields: bytes = b"") -> None:
        """Adds a document. A mask changes the fingerprint, unless every token counts, and so do fields."""
        if fields:
            state = xxhash.xxh3_128(tokens, seed=2)
            state.update(mask or b"")
            state.update(fields)
            digest = state.intdigest()
        elif mask is None:
            digest = xxhash.xxh3_128_intdigest(tokens)
        else:
            state = xxhash.xxh3_128(tokens, seed=1)
            state.update(mask)
            digest = state.intdigest()
        self._value = (self._value * self._FACTOR + digest) % self._PRIME
        self.documents += 1

    def join(self, other: StoreContent) -> None:
        """Appends the documents of `other`."""
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
    """Deletes a store, the `.json` first: it never describes files that are gone."""
    for suffix in ("json", *SUFFIXES):
        Path(f"{prefix}.{suffix}").unlink(missing_ok=True)
    for path in Path(prefix).parent.glob(f"{escape(Path(prefix).name)}.{FIELD}*"):
        path.unlink(missing_ok=True)


def file_digest(path: str) -> str:
    """xxh3_128 of a file's content."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_HASH_BYTES):
            state.update(block)
    digest: str = state.hexdigest()
    return digest
