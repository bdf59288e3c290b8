"""Files that are one document each: text, source code and HTML pages."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from bessemer.data.read.html import decode_html
from bessemer.data.read.rows import Reading, Row

# UTF-32 first: its little-endian mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_of(head: bytes) -> str:
    """UTF-8, unless a byte-order mark says otherwise; the codec takes the mark away."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8-sig")


def read_text(reading: Reading) -> Iterator[Row]:
    """The file as one document. Bytes that are no UTF-8 become replacement characters."""
    with reading.open_unpacked() as file:
        data = file.read()
    document = reading.text(1, data.decode(encoding_of(data), "replace"))
    if document is not None:
        yield document


def read_html(reading: Reading) -> Iterator[Row]:
    """The page as it stands, labelled for the `extract` step."""
    with reading.open_unpacked() as file:
        data = file.read()
    document = reading.text(1, decode_html(data))
    if document is not None:
        document.labels["type"] = "html"
        yield document
