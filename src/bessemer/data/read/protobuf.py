"""Protocol buffers without their package: the fields of a message, as TFRecord and SentencePiece write them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
