"""The wire format of protocol buffers, as far as event files need it: fields by number, without message classes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

Field = tuple[int, int, int | bytes]  # number, wire type, value: an int of type 0, else bytes
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are not a message."""


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message in their order."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, kind_of_value = tag >> 3, tag & 7
        if kind_of_value == VARINT:
            value, at = _varint(data, at)
            yield number, VARINT, value
            continue
        if kind_of_value == BYTES:
            size, at = _varint(data, at)
        elif kind_of_value in (FIXED64, FIXED32):
            size = 8 if kind_of_value == FIXED64 else 4
        else:
            raise WireError(f"unknown wire type {kind_of_value}")
        if at + size > end:
            raise WireError("a field is cut off")
        yield number, kind_of_value, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            break
    raise WireError("a number is cut off")


def message(data: bytes) -> dict[int, int | bytes]:
    """The fields of a message without repeated fields, by number."""
    return {number: value for number, _, value in fields(data)}


def signed(value: int) -> int:
    """An int64 from its varint."""
    return value - (1 << 64) if value >= 1 << 63 else value


def zigzag(value: int) -> int:
    """A sint64 from its varint."""
    return (value >> 1) ^ -(value & 1)


def number(value: int | bytes) -> float:
    """A float, a double or an integer."""
    if isinstance(value, int):
        return float(signed(value))
    return float(struct.unpack("<f" if len(value) == 4 else "<d", value)[0])


def text(value: int | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def sub(value: int | bytes | None) -> bytes:
    """A nested message; empty if it is missing."""
    return value if isinstance(value, bytes) else b""
