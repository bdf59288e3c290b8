"""TFRecord files of tf.train.Example: framed records of protocol buffers, parsed here without TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any

from bessemer.data.read import rows
from bessemer.data.read.rows import Reading, Row
from bessemer.data.read.unpack import Damaged, compression_of, unpacked

_FRAME = struct.Struct("<QI")
_FOOTER_BYTES = 4  # the checksum of the data, which would cost a second per 5 MB in Python: not checked
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_tfrecord(reading: Reading) -> Iterator[Row]:
    """One document for each Example; rows are records. The checksum of every length is checked."""
    with _open(reading) as file:
        row = 0
        while frame := file.read(_FRAME.size):
            row += 1
            length = _length(frame, row)
            if length > rows.LONGEST_ROW_BYTES:
                _skip(file, length + _FOOTER_BYTES, row)
                yield reading.bad(row, f"the record has {length:,} bytes; split it or delete it")
                continue
            data = _read(file, length + _FOOTER_BYTES, row)[:length]
            try:
                record = parse_example(data)
            except ValueError as error:
                yield reading.bad(row, f"not a tf.train.Example ({error}); write it again", data)
                continue
            document = reading.document(row, record)
            if document is not None:
                yield document


def parse_example(data: bytes) -> dict[str, Any]:
    """The features by name: a single value stands for itself, none is None, several are a list. ValueError where the
    bytes are no Example."""
    record: dict[str, Any] = {}
    for field, features in _fields(data):
        if field != 1:
            continue
        for entry_field, entry in _fields(_as_bytes(features)):
            if entry_field == 1:
                parts = dict(_fields(_as_bytes(entry)))
                name = _as_bytes(parts.get(1, b"")).decode()
                record[name] = _feature(_as_bytes(parts.get(2, b"")))
    if data and not record:
        raise ValueError("no features")
    return record


def _feature(data: bytes) -> Any:
    values: list[Any] = []
    for kind, content in _fields(data):
        for field, value in _fields(_as_bytes(content)):
            if field != 1:
                continue
            if kind == 1:
                values.append(_as_bytes(value))
            elif isinstance(value, bytes):  # packed: many numbers in one field
                values += _floats(value) if kind == 2 else _varints(value)
            else:
                values.append(
                    struct.unpack("<f", struct.pack("<I", value))[0] if kind == 2 else _signed(value)
                )
    return values[0] if len(values) == 1 else values or None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one protocol buffer message, in order."""
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
            raise ValueError("a field that ends after the record")
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


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield _signed(value)


def _floats(data: bytes) -> tuple[float, ...]:
    if len(data) % 4:
        raise ValueError("numbers that are cut off")
    return struct.unpack(f"<{len(data) // 4}f", data)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


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
        raise Damaged(f"not readable as TFRecord (the checksum of record {row}'s length is wrong)")
    return int(length)


def _read(file: IO[bytes], length: int, row: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise EOFError(f"the file ends inside record {row}")
    return data


def _skip(file: IO[bytes], length: int, row: int) -> None:
    while length:
        length -= len(_read(file, min(length, 1 << 20), row))


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
