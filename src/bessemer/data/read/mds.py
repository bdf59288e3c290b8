"""MosaicML's streaming shards (MDS): each holds its columns' encodings, an index of its samples, and the samples.
Shards pack the columns of a sample one after another, after the sizes of those that have no fixed one. Only the
wanted columns are decoded; an encoding that would run code (pickle) is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import IO, Any

from bessemer.data.read import rows
from bessemer.data.read.rows import Reading, Row, Rows, parse_json
from bessemer.data.read.unpack import Damaged, read_whole, skip
from bessemer.errors import UserError

_Decode = Callable[[bytes], Any]
_Column = tuple[str, str, int | None]  # name, encoding, fixed size

_NUMBERS = {
    "int": "<q", "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q", "uint8": "<B", "uint16": "<H",
    "uint32": "<I", "uint64": "<Q", "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip
_SHORT = "the shard ends too early"
_MOST_HEADER_BYTES = 1 << 20


def read_mds(reading: Reading) -> Rows:
    """One document for each sample of a shard; rows are samples, counted in the shard."""
    with reading.open_unpacked() as file:
        ends, columns = _read_header(file)
        decoders = _decoders(reading, columns)
        at = ends[0]
        for row, end in enumerate(ends[1:], start=1):
            if end - at > rows.LONGEST_ROW_BYTES:
                skip(file, end - at, _SHORT)
                yield reading.bad(row, f"the sample has {end - at:,} bytes; split it or delete it")
            else:
                yield _document(reading, row, read_whole(file, end - at, _SHORT), columns, decoders)
            at = end


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], list[_Column]]:
    """Where the samples begin and end, and the columns; the stream then stands at the first sample."""
    (count,) = struct.unpack("<I", read_whole(file, 4, _SHORT))
    offsets = struct.unpack(f"<{count + 1}I", read_whole(file, 4 * (count + 1), _SHORT))
    length = offsets[0] - 4 * (count + 2)
    if not 0 < length <= _MOST_HEADER_BYTES or any(a > b for a, b in pairwise(offsets)):
        raise Damaged("not readable as an MDS shard (its index makes no sense)")
    try:
        about = json.loads(read_whole(file, length, _SHORT))
        fields = about["column_names"], about["column_encodings"], about["column_sizes"]
        return offsets, list(zip(*fields, strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"not readable as an MDS shard (its header makes no sense: {error})") from error


def _decoders(reading: Reading, columns: list[_Column]) -> dict[str, _Decode]:
    reading.check_columns(name for name, _, _ in columns)
    decoders = {}
    for name, encoding, _ in columns:
        if name in reading.fields:
            decode = _decoder(encoding)
            if decode is None:
                what = f"column {name!r} is encoded as {encoding}, which is not read as text"
                raise UserError(f"{reading.file}: {what}")
            decoders[name] = decode
    return decoders


def _decoder(encoding: str) -> _Decode | None:
    if encoding in ("str", "str_int", "str_float", "str_decimal"):
        return bytes.decode
    if encoding == "bytes":
        return bytes
    if encoding == "json":
        return parse_json
    if encoding in _NUMBERS:
        number = struct.Struct(_NUMBERS[encoding])
        return lambda data: number.unpack(data)[0]
    return None


def _document(
    reading: Reading, row: int, sample: bytes, columns: list[_Column], decoders: dict[str, _Decode]
) -> Row | None:
    values = {}
    try:
        for name, data in _split(sample, columns):
            if name in decoders:
                values[name] = decoders[name](data)
    except (ValueError, struct.error, RecursionError) as error:
        return reading.bad(row, f"not readable as an MDS sample ({error}); write the shard again", sample)
    return reading.document(row, values, None if values else sample)


def _split(sample: bytes, columns: list[_Column]) -> Iterator[tuple[str, bytes]]:
    variable = sum(not size for _, _, size in columns)
    sizes = iter(struct.unpack_from(f"<{variable}I", sample))
    at = 4 * variable
    for name, _, fixed in columns:
        size = fixed or next(sizes)
        if at + size > len(sample):
            raise ValueError(f"column {name!r} ends after the sample")
        yield name, sample[at : at + size]
        at += size
