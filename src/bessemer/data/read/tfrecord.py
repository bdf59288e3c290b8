"""TFRecord files of tf.train.Example: framed records of protocol buffers, parsed here without TensorFlow."""

from __future__ import annotations

import struct
from typing import IO, Any

from bessemer.data.read import rows
from bessemer.data.read.protobuf import as_bytes, as_float, fields, signed, varints
from bessemer.data.read.rows import Reading, Rows
from bessemer.data.read.unpack import Damaged, compression_of, read_whole, skip, unpacked

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
        raise Damaged(f"not readable as TFRecord (the checksum of record {row}'s length is wrong)")
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
