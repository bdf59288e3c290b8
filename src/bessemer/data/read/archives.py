"""Web archives: WARC files with the pages as they were served, and WET files with their plain text.

WebDataset archives: tar files in which `key.txt` and `key.json` are members of one sample.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Self

from bessemer.data.document import Document
from bessemer.data.read import rows
from bessemer.data.read.compression import DamagedFile
from bessemer.data.read.rows import Reading, Row, Rows, decode_html, parse_json
from bessemer.errors import UserError

_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("text/plain",)


def read_warc(reading: Reading) -> Rows:
    """One document for each page that was served with success, labelled for the `extract` step, and for each plain
    text; rows are records, and what is neither is counted as "not text"."""
    try:
        from warcio.archiveiterator import ArchiveIterator  # type: ignore[import-untyped]
        from warcio.exceptions import ArchiveLoadFailed  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"{reading.file}: reading WARC files: pip install 'bessemer[data]'") from error

    with reading.open_unpacked() as file:
        # Unpacked here, and the end checked here: the library takes a file that was cut off for one that ended. It
        # would also end in silence at a page without HTTP headers, so those are left to us.
        ending = _Ending(file)
        try:
            for row, record in enumerate(ArchiveIterator(ending, no_record_parse=True), start=1):
                yield _page_document(reading, row, record)
                _finish(record, row)
        except ArchiveLoadFailed as error:
            raise DamagedFile(f"not readable as WARC ({error})") from error
        ending.check()


def _page_document(reading: Reading, row: int, record: Any) -> Row | None:
    kind, charset = _content(record)
    if kind not in _HTML + _TEXT:
        reading.tally["not text"] += 1
        return None
    if (record.length or 0) > rows.LONGEST_ROW_BYTES:
        return reading.bad(row, f"the record has {record.length:,} bytes")
    try:
        data = record.content_stream().read()
    except Exception as error:  # of the transfer's own encodings: chunked, gzip, brotli
        return reading.bad(row, f"the content cannot be decoded ({error})")
    own_id = (record.rec_headers.get_header("WARC-Record-ID") or "").strip("<>")
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    document = reading.text(row, decode_html(data, charset), own_id, url)
    if document is not None and kind in _HTML:
        document.labels["type"] = "html"
    return document


def _content(record: Any) -> tuple[str, str]:
    """The media type and charset of what a record holds; nothing where that is no page or text."""
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


def _finish(record: Any, row: int) -> None:
    """The library hands out what there is of a record; the rest of it has to be there."""
    while record.raw_stream.read(1 << 16):
        continue
    if getattr(record.raw_stream, "limit", 0) > 0:
        raise EOFError(f"the file ends inside record {row}")


class _Ending:
    """Remembers the last bytes that were read: every record ends with two empty lines. An EOFError gets another name
    on its way through the library, which takes one for the end of the archive."""

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


def read_webdataset(reading: Reading) -> Rows:
    """One document for each sample, with the key as its id unless the source names a field. The text field is a
    member's extension (`txt`) or a field of the `json` member; `text` stands for `txt`, too. Members that are not
    wanted, such as images, are passed over without being held."""
    wanted = {*reading.fields, "json"} | ({"txt"} if "text" in reading.fields else set())
    with reading.open_unpacked() as file:
        for row, sample in enumerate(_samples(file, wanted), start=1):
            yield _sample_document(reading, row, sample)


@dataclass
class _Sample:
    key: str
    members: dict[str, bytes | None] = field(default_factory=dict)  # by extension; None: not wanted
    problem: str = ""


def _samples(file: IO[bytes], wanted: set[str]) -> Iterator[_Sample]:
    """Members that follow each other with one key are a sample."""
    sample: _Sample | None = None
    for member, content in _members(file, wanted):
        key, extension = _split(member.name)
        if not extension:
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        if extension in sample.members:
            sample.problem = f"two members {member.name}; give every sample a key of its own"
        if extension in wanted and content is None:
            sample.problem = f"{member.name} has {member.size:,} bytes; split it or delete it"
        sample.members[extension] = content
    if sample is not None:
        yield sample


def _sample_document(reading: Reading, row: int, sample: _Sample) -> Row | None:
    if sample.problem:
        return reading.bad(row, sample.problem, sample.key)
    record: dict[str, Any] = {}
    described = sample.members.get("json")
    if described is not None:
        try:
            record = parse_json(described, "utf-8-sig")
        except (ValueError, RecursionError) as error:
            reason = f"{sample.key}.json is not valid JSON in UTF-8 ({error}); correct or delete it"
            return reading.bad(row, reason, described)
        if not isinstance(record, dict):
            reason = f"{sample.key}.json holds a {type(record).__name__}, not an object"
            return reading.bad(row, reason, described)
    if sample.members.get("txt") is not None:
        record.setdefault("text", sample.members["txt"])
    document = reading.document(row, {**record, **sample.members})
    if isinstance(document, Document) and not reading.source.id_field:
        document.id = sample.key
    return document


def _members(file: IO[bytes], wanted: set[str]) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The files in order, with the content of those that are wanted and not too long."""
    try:
        # Archives that were put one behind the other are read to the end.
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member, ignore_zeros=True) as archive:
            while (member := archive.next()) is not None:
                if member.isfile():
                    content = None
                    if _split(member.name)[1] in wanted and member.size <= rows.LONGEST_ROW_BYTES:
                        taken = archive.extractfile(member)
                        content = taken.read() if taken is not None else b""
                    yield member, content
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile remembers every member, about 1 KB each
    except tarfile.TarError as error:
        raise DamagedFile(f"not readable as a tar archive ({error})") from error


class _Member(tarfile.TarInfo):
    """tarfile ends in silence where a header is damaged or the file is cut off; this does not."""

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


def _split(name: str) -> tuple[str, str]:
    """The sample's key and the extension: what follows the first dot of the file's own name."""
    folder, slash, own = name.rpartition("/")
    stem, _, extension = own.partition(".")
    return folder + slash + stem, extension.lower() if stem else ""
