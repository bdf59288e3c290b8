"""Protocol buffers without their package: the fields of a message, as TFRecord and SentencePiece write them.

MosaicML's streaming shards (MDS): each holds its columns' encodings, an index of its samples, and the samples.
Shards pack the columns of a sample one after another, after the sizes of those that have no fixed one. Only the
wanted columns are decoded; an encoding that would run code (pickle) is refused.

TFRecord files of tf.train.Example: framed records of protocol buffers, parsed here without TensorFlow.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import IO, Any

from bessemer.data.read import rows
from bessemer.data.read.compression import DamagedFile, compression_of, read_whole, skip, unpacked
from bessemer.data.read.rows import Reading, Row, Rows, parse_json
from bessemer.errors import UserError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and value of each field, in order; fixed ones as unsigned integers. ValueError where it is none."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field of unknown kind {kind}")
        content = data[at : at + length]
        if len(content) < length or not tag >> 3:
            raise ValueError("it ends in the middle of a field")
        at += length
        yield tag >> 3, content if kind == _BYTES else int.from_bytes(content, "little")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number that does not end")


def varints(data: bytes) -> Iterator[int]:
    """Packed numbers, signed."""
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield signed(value)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def as_float(value: int | bytes) -> float:
    if isinstance(value, bytes):
        raise ValueError("a message where a number belongs")
    return float(struct.unpack("<f", struct.pack("<I", value))[0])


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
        raise DamagedFile("not readable as an MDS shard (its index makes no sense)")
    try:
        about = json.loads(read_whole(file, length, _SHORT))
        fields = about["column_names"], about["column_encodings"], about["column_sizes"]
        return offsets, list(zip(*fields, strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"not readable as an MDS shard (its header makes no sense: {error})") from error


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


_FRAME = struct.Struct("<QI")
_FOOTER_BYTES = 4  # the checksum of the data, which would cost a second per 5 MB in Python: not checked


def read_tfrecord(reading: Reading) -> Rows:
    """One document for each Example; rows are records. The checksum of every length is checked."""
    with _open(reading) as file:
        row = 0
        while frame := file.read(_FRAME.size):
            row += 1
            length = _length(frame, row)
            if length > rows.LONGEST_ROW_BYTES:
                skip(file, length + _FOOTER_BYTES, f"the file ends inside record {row}")
                yield reading.bad(row, f"the record has {length:,} bytes; split it or delete it")
                continue
            data = read_whole(file, length + _FOOTER_BYTES, f"the file ends inside record {row}")[:length]
            try:
                record = parse_example(data)
            except ValueError as error:
                yield reading.bad(row, f"not a tf.train.Example ({error}); write it again", data)
                continue
            yield reading.document(row, record)


def parse_example(data: bytes) -> dict[str, Any]:
    """The features by name: a single value stands for itself, none is None, several are a list. ValueError where the
    bytes are no Example."""
    record: dict[str, Any] = {}
    for field, features in fields(data):
        if field != 1:
            continue
        for entry_field, entry in fields(as_bytes(features)):
            if entry_field == 1:
                parts = dict(fields(as_bytes(entry)))
                name = as_bytes(parts.get(1, b"")).decode()
                record[name] = _feature(as_bytes(parts.get(2, b"")))
    if data and not record:
        raise ValueError("no features")
    return record


def _feature(data: bytes) -> Any:
    values: list[Any] = []
    for kind, content in fields(data):
        for field, value in fields(as_bytes(content)):
            if field != 1:
                continue
            if kind == 1:
                values.append(as_bytes(value))
            elif isinstance(value, bytes):  # packed: many numbers in one field
                values += _floats(value) if kind == 2 else varints(value)
            else:
                values.append(as_float(value) if kind == 2 else signed(value))
    return values[0] if len(values) == 1 else values or None


def _floats(data: bytes) -> tuple[float, ...]:
    if len(data) % 4:
        raise ValueError("numbers that are cut off")
    return struct.unpack(f"<{len(data) // 4}f", data)


def _open(reading: Reading) -> IO[bytes]:
    """Unpacked where the whole file is compressed. A first record of the right length looks like gzip: its checksum
    tells."""
    opened = reading.open_bytes()
    head = opened.read(_FRAME.size)
    opened.seek(0)
    plain = len(head) == _FRAME.size and _masked_crc(head[:8]) == _FRAME.unpack(head)[1]
    return unpacked(opened, "" if plain else compression_of(opened))


def _length(frame: bytes, row: int) -> int:
    if len(frame) < _FRAME.size:
        raise EOFError(f"the file ends inside record {row}")
    length, checksum = _FRAME.unpack(frame)
    if checksum != _masked_crc(frame[:8]):
        raise DamagedFile(f"not readable as TFRecord (the checksum of record {row}'s length is wrong)")
    return int(length)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, bits reversed
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset as the format wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
