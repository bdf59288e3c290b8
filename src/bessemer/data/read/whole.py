"""Files that are one document each: text, source code and HTML pages."""

from __future__ import annotations

import codecs
import re

from bessemer.data.read.rows import Reading, Rows

_UTF16_ZEROS, _UTF32_ZEROS = 0.3, 0.6  # of mostly ASCII, half the bytes of UTF-16 and three quarters of UTF-32 are zero


def encoding_of(head: bytes) -> str:
    """UTF-8, unless a byte-order mark says otherwise; the codec takes the mark away."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"  # first: its little-endian mark begins with UTF-16's
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def wide_encoding(text: bytes) -> str:
    """UTF-32 or UTF-16 where bytes tell it: by a byte-order mark, or by the zero bytes of ASCII in it. Else empty."""
    marked = encoding_of(text)
    if marked != "utf-8-sig":
        return marked.upper()
    zeros = text.count(0) / max(len(text), 1)
    return "UTF-32" if zeros > _UTF32_ZEROS else "UTF-16" if zeros > _UTF16_ZEROS else ""


def read_text(reading: Reading) -> Rows:
    """The file as one document. Bytes that are not UTF-8 become U+FFFD, and its `decode_error` names the first."""
    with reading.open_unpacked() as file:
        data = file.read()
    text, decode_error = decode_text(data)
    document = reading.text(1, text)
    if document is not None:
        document.decode_error = decode_error
    yield document


def decode_text(data: bytes) -> tuple[str, str]:
    """The text, and "not UTF-8 (byte N)" for the first invalid byte (counted from 0), or an empty string."""
    encoding = encoding_of(data)
    try:
        return data.decode(encoding), ""
    except UnicodeDecodeError as error:
        # The codec `utf-8-sig` counts from after the byte-order mark.
        start = error.start + (len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0)
        return data.decode(encoding, "replace"), f"not {encoding.removesuffix('-sig').upper()} (byte {start:,})"


def read_html(reading: Reading) -> Rows:
    """The page as it stands, labelled for the `extract` step."""
    with reading.open_unpacked() as file:
        data = file.read()
    document = reading.text(1, decode_html(data))
    if document is not None:
        document.labels["type"] = "html"
    yield document


_META = re.compile(rb"<meta[^>]{0,500}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]{2,40})", re.IGNORECASE)
_XML = re.compile(rb"^\s*<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9_:.+-]{2,40})", re.IGNORECASE)
_HEAD_BYTES = 4096  # browsers look at 1024; real pages put scripts first
# The superset that browsers use for each name, as Python spells it.
_SUPERSETS = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874",
    "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),  # first: one begins as UTF-16's does
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_PLAIN = re.compile(
    r"utf-8|utf-16(-le|-be)?|cp125\d|cp866|cp874|cp932|cp949|iso8859-\d+|koi8-[ru]|mac-(roman|cyrillic)|gb18030"
    r"|big5hkscs|euc_jp|iso2022_jp"
)


def decode_html(data: bytes, declared: str = "") -> str:
    """A page's text. `declared` is the charset of the HTTP header. A byte-order mark wins. Then valid UTF-8 is taken
    for UTF-8 whatever the page declares, since text in another encoding is hardly ever valid UTF-8 by chance; else
    the declared encoding, and else Windows-1252."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace")
    in_page = _XML.search(data[:_HEAD_BYTES]) or _META.search(data[:_HEAD_BYTES])
    by_header = _codec(declared)
    # What a page says of itself cannot be UTF-16, or it could not have been read.
    by_page = _codec(in_page.group(1).decode("ascii")) if in_page else ""
    named = by_header or ("" if by_page.startswith("utf-16") else by_page)
    if named.startswith("utf-16") or named == "iso2022_jp":  # may be valid UTF-8 and mean something else
        return data.decode(named, "replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode(named or "cp1252", "replace")


def _codec(name: str) -> str:
    """Python's codec for a charset's name, or nothing where it is unknown or no encoding of text."""
    try:
        found = codecs.lookup(name.strip(" \t\"'")).name if name else ""
    except (LookupError, ValueError):
        return ""
    found = _SUPERSETS.get(found, found)
    return found if _PLAIN.fullmatch(found) else ""
