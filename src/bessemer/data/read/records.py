"""Readers of record files: MDS shards (MosaicML Streaming), TFRecord files of tf.train.Example, web archives (WARC,
WET) and WebDataset tar archives. Also parses protocol buffers, which TFRecord and SentencePiece use, without their
package."""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import IO, Any, Self

from bessemer.data.read import rows
from bessemer.data.read.compression import DamagedFile, decompress, detect_compression, read_exactly, skip
from bessemer.data.read.entry import Document
from bessemer.data.read.rows import PieceReader, Row, Rows, decode_html, parse_json
from bessemer.errors import UserError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and value of each field, in order; fixed-size fields as unsigned integers. ValueError where the
    bytes are no message."""
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
    """Packed integers, signed."""
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
_TRUNCATED = "the shard ends too early"
_MAX_HEADER_BYTES = 1 << 20


def read_mds(reading: PieceReader) -> Rows:
    """One document per sample of a shard. Only the needed columns are decoded; encodings that run code (pickle) are
    refused."""
    with reading.open_unpacked() as file:
        ends, columns = _read_header(file)
        decoders = _decoders(reading, columns)
        at = ends[0]
        for row, end in enumerate(ends[1:], start=1):
            if end - at > rows.LONGEST_ROW_BYTES:
                skip(file, end - at, _TRUNCATED)
                yield reading.bad(row, f"the sample has {end - at:,} bytes; split it or delete it")
            else:
                yield _document(reading, row, read_exactly(file, end - at, _TRUNCATED), columns, decoders)
            at = end


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], list[_Column]]:
    """The offsets of the samples, and the columns. Leaves the stream at the first sample."""
    (count,) = struct.unpack("<I", read_exactly(file, 4, _TRUNCATED))
    offsets = struct.unpack(f"<{count + 1}I", read_exactly(file, 4 * (count + 1), _TRUNCATED))
    length = offsets[0] - 4 * (count + 2)
    if not 0 < length <= _MAX_HEADER_BYTES or any(a > b for a, b in pairwise(offsets)):
        raise DamagedFile("not readable as an MDS shard (its index makes no sense)")
    try:
        header = json.loads(read_exactly(file, length, _TRUNCATED))
        columns = header["column_names"], header["column_encodings"], header["column_sizes"]
        return offsets, list(zip(*columns, strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"not readable as an MDS shard (its header makes no sense: {error})") from error


def _decode_number(layout: str, data: bytes) -> Any:
    return struct.unpack(layout, data)[0]


def _decoders(reading: PieceReader, columns: list[_Column]) -> dict[str, _Decode]:
    reading.check_columns(name for name, _, _ in columns)
    decoders: dict[str, _Decode] = {}
    for name, encoding, _ in columns:
        if name not in reading.fields:
            continue
        if encoding in ("str", "str_int", "str_float", "str_decimal"):
            decoders[name] = bytes.decode
        elif encoding in ("bytes", "json"):
            decoders[name] = bytes if encoding == "bytes" else parse_json
        elif encoding in _NUMBERS:
            decoders[name] = partial(_decode_number, _NUMBERS[encoding])
        else:
            raise UserError(f"{reading.file}: column {name!r} is encoded as {encoding}, which is not read as text")
    return decoders


def _document(
    reading: PieceReader, row: int, sample: bytes, columns: list[_Column], decoders: dict[str, _Decode]
) -> Row | None:
    record = {}
    try:
        for name, data in _split(sample, columns):
            if name in decoders:
                record[name] = decoders[name](data)
    except (ValueError, struct.error, RecursionError) as error:
        return reading.bad(row, f"not readable as an MDS sample ({error}); write the shard again", sample)
    return reading.document(row, record, None if record else sample)


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
_FOOTER_BYTES = 4  # the checksum of the data; not checked, since Python takes a second per 5 MB


def read_tfrecord(reading: PieceReader) -> Rows:
    """One document per Example. Checks the checksum of every length."""
    opened = reading.open_bytes()
    head = opened.read(_FRAME.size)
    opened.seek(0)
    # The first length may look like gzip's magic bytes; its checksum decides.
    plain = len(head) == _FRAME.size and _masked_crc(head[:8]) == _FRAME.unpack(head)[1]
    with decompress(opened, "" if plain else detect_compression(opened)) as file:
        row = 0
        while frame := file.read(_FRAME.size):
            row += 1
            length = _length(frame, row)
            if length > rows.LONGEST_ROW_BYTES:
                skip(file, length + _FOOTER_BYTES, f"the file ends inside record {row}")
                yield reading.bad(row, f"the record has {length:,} bytes; split it or delete it")
                continue
            data = read_exactly(file, length + _FOOTER_BYTES, f"the file ends inside record {row}")[:length]
            try:
                record = parse_example(data)
            except ValueError as error:
                yield reading.bad(row, f"not a tf.train.Example ({error}); write it again", data)
                continue
            yield reading.document(row, record)


def parse_example(data: bytes) -> dict[str, Any]:
    """Features by name: a single value as itself, no value as None, several as a list. ValueError where the bytes are
    no Example."""
    record: dict[str, Any] = {}
    for number, features in parse_fields(data):
        if number != 1:
            continue
        for entry_number, entry in parse_fields(as_bytes(features)):
            if entry_number == 1:
                parts = dict(parse_fields(as_bytes(entry)))
                name = as_bytes(parts.get(1, b"")).decode()
                record[name] = _feature(as_bytes(parts.get(2, b"")))
    if data and not record:
        raise ValueError("no features")
    return record


def _feature(data: bytes) -> Any:
    values: list[Any] = []
    for kind, content in parse_fields(data):
        for number, value in parse_fields(as_bytes(content)):
            if number != 1:
                continue
            if kind == 1:
                values.append(as_bytes(value))
            elif isinstance(value, bytes):  # packed numbers
                if kind == 2 and len(value) % 4:
                    raise ValueError("packed floats are truncated")
                values += struct.unpack(f"<{len(value) // 4}f", value) if kind == 2 else varints(value)
            else:
                values.append(as_float(value) if kind == 2 else signed(value))
    return values[0] if len(values) == 1 else values or None


def _length(frame: bytes, row: int) -> int:
    if len(frame) < _FRAME.size:
        raise EOFError(f"the file ends inside record {row}")
    length, checksum = _FRAME.unpack(frame)
    if checksum != _masked_crc(frame[:8]):
        raise DamagedFile(f"not readable as TFRecord (the checksum of record {row}'s length is wrong)")
    return int(length)


_CRC_TABLE = list(range(256))
for _ in range(8):  # Castagnoli's polynomial, bits reversed
    _CRC_TABLE = [byte >> 1 ^ (0x82F63B78 if byte & 1 else 0) for byte in _CRC_TABLE]


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset as TFRecord defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("text/plain",)


def read_warc(reading: PieceReader) -> Rows:
    """One document per page served with success (labelled for the `extract` step) and per plain text. Rows are records;
    other records count as "not text"."""
    try:
        from warcio.archiveiterator import ArchiveIterator  # type: ignore[import-untyped]
        from warcio.exceptions import ArchiveLoadFailed  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"{reading.file}: reading WARC files: pip install 'bessemer[data]'") from error

    with reading.open_unpacked() as file:
        # The library takes a truncated file for a complete one and stops silently at a page without HTTP headers, so
        # decompression, the end of the file and HTTP headers are handled here.
        ending = _Ending(file)
        try:
            for row, record in enumerate(ArchiveIterator(ending, no_record_parse=True), start=1):
                yield _page_document(reading, row, record)
                while record.raw_stream.read(1 << 16):
                    continue
                if getattr(record.raw_stream, "limit", 0) > 0:  # the library returns a truncated record without error
                    raise EOFError(f"the file ends inside record {row}")
        except ArchiveLoadFailed as error:
            raise DamagedFile(f"not readable as WARC ({error})") from error
        ending.check()


def _page_document(reading: PieceReader, row: int, record: Any) -> Row | None:
    kind, charset = _content(record)
    if kind not in _HTML + _TEXT:
        reading.tally["not text"] += 1
        return None
    if (record.length or 0) > rows.LONGEST_ROW_BYTES:
        return reading.bad(row, f"the record has {record.length:,} bytes")
    try:
        data = record.content_stream().read()
    except Exception as error:  # from the transfer encodings: chunked, gzip, brotli
        return reading.bad(row, f"the content cannot be decoded ({error})")
    document_id = (record.rec_headers.get_header("WARC-Record-ID") or "").strip("<>")
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    document = reading.text(row, decode_html(data, charset), document_id, url)
    if document is not None and kind in _HTML:
        document.labels["type"] = "html"
    return document


def _content(record: Any) -> tuple[str, str]:
    """The media type and charset of a record; empty where it is no page or text."""
    header = ""
    if record.rec_type in ("conversion", "resource"):
        header = record.rec_headers.get_header("Content-Type") or ""
    elif record.rec_type == "response":
        from warcio.statusandheaders import StatusAndHeadersParser  # type: ignore[import-untyped]

        try:
            record.http_headers = StatusAndHeadersParser([], verify=False).parse(record.raw_stream)
        except EOFError:  # an empty record
            return "", ""
        if (record.http_headers.get_statuscode() or "").startswith("2"):
            header = record.http_headers.get_header("Content-Type") or ""
    kind, _, rest = header.partition(";")
    _, _, charset = rest.lower().partition("charset=")
    return kind.strip().lower(), charset.partition(";")[0].strip(" \"'")


class _Ending:
    """Remembers the last bytes read: every record ends with two empty lines. Turns EOFError, which the library takes
    for the end of the archive, into DamagedFile."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._last = b""

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError as error:
            raise DamagedFile(f"cannot be read ({error})") from error
        self._last = (self._last + data[-4:])[-4:]
        return data

    def check(self) -> None:
        if self._last and not self._last.endswith((b"\r\n\r\n", b"\n\n")):
            raise EOFError("the file ends inside a record")


def read_webdataset(reading: PieceReader) -> Rows:
    """One document per sample, with the key as id unless the source names a field. The text field is a member's
    extension (`txt`) or a field of the `json` member; `text` also means `txt`. Other members, such as images, are
    skipped without being held."""
    extensions = {*reading.fields, "json"} | ({"txt"} if "text" in reading.fields else set())
    with reading.open_unpacked() as file:
        for row, sample in enumerate(_samples(file, extensions), start=1):
            yield _sample_document(reading, row, sample)


@dataclass
class _Sample:
    key: str
    members: dict[str, bytes | None] = field(default_factory=dict)  # by extension; None: skipped or too long
    problem: str = ""


def _samples(file: IO[bytes], extensions: set[str]) -> Iterator[_Sample]:
    """Consecutive members with one key form a sample."""
    sample: _Sample | None = None
    for member, content in _members(file, extensions):
        key, extension = _split_member_name(member.name)
        if not extension:
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if extension in sample.members:
            sample.problem = f"two members {member.name}; give every sample its own key"
        if extension in extensions and content is None:
            sample.problem = f"{member.name} has {member.size:,} bytes; split it or delete it"
        sample.members[extension] = content
    if sample is not None:
        yield sample


def _sample_document(reading: PieceReader, row: int, sample: _Sample) -> Row | None:
    if sample.problem:
        return reading.bad(row, sample.problem, sample.key)
    record: dict[str, Any] = {}
    raw_json = sample.members.get("json")
    if raw_json is not None:
        try:
            record = parse_json(raw_json, "utf-8-sig")
        except (ValueError, RecursionError) as error:
            reason = f"{sample.key}.json is not valid JSON in UTF-8 ({error}); correct or delete it"
            return reading.bad(row, reason, raw_json)
        if not isinstance(record, dict):
            reason = f"{sample.key}.json holds a {type(record).__name__}, not an object"
            return reading.bad(row, reason, raw_json)
    if sample.members.get("txt") is not None:
        record.setdefault("text", sample.members["txt"])
    document = reading.document(row, {**record, **sample.members})
    if isinstance(document, Document) and not reading.source.id_field:
        document.id = sample.key
    return document


def _members(file: IO[bytes], extensions: set[str]) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The files in order, with the content of wanted ones that are not too long."""
    try:
        # Concatenated archives are read to the end.
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member, ignore_zeros=True) as archive:
            while (member := archive.next()) is not None:
                if member.isfile():
                    content = None
                    if _split_member_name(member.name)[1] in extensions and member.size <= rows.LONGEST_ROW_BYTES:
                        stream = archive.extractfile(member)
                        content = stream.read() if stream is not None else b""
                    yield member, content
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps 1 KB per member
    except tarfile.TarError as error:
        raise DamagedFile(f"not readable as a tar archive ({error})") from error


class _Member(tarfile.TarInfo):
    """Raises where a header is damaged or the file is truncated; tarfile would end silently."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> Self:
        zeros = getattr(tarfile_, "at_zeros", False)
        tarfile_.at_zeros = False
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tarfile_.at_zeros = True
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            if not zeros:
                raise EOFError("the archive ends without its end marker") from None
            tarfile_.at_zeros = True
            raise
        except tarfile.HeaderError as error:
            raise DamagedFile(f"not readable as a tar archive ({error})") from error


def _split_member_name(name: str) -> tuple[str, str]:
    """The sample's key and the extension: everything after the first dot of the base name."""
    folder, slash, basename = name.rpartition("/")
    stem, _, extension = basename.partition(".")
    return folder + slash + stem, extension.lower() if stem else ""
