"""Web archives: WARC files with the pages as they were served, and WET files with their plain text."""

from __future__ import annotations

from typing import IO, Any

from bessemer.data.read import rows
from bessemer.data.read.rows import Reading, Row, Rows
from bessemer.data.read.unpack import Damaged
from bessemer.data.read.whole import decode_html
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
                yield _document(reading, row, record)
                _finish(record, row)
        except ArchiveLoadFailed as error:
            raise Damaged(f"not readable as WARC ({error})") from error
        ending.check()


def _document(reading: Reading, row: int, record: Any) -> Row | None:
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
            raise Damaged(f"cannot be read ({error})") from error
        self._last = (self._last + data[-4:])[-4:]
        return data

    def check(self) -> None:
        if self._last and not self._last.endswith((b"\r\n\r\n", b"\n\n")):
            raise EOFError("the file ends inside a record")
