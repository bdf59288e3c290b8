"""Web archives written by warcio: pages are labelled as HTML, plain text is not, and what is cut off is an error."""

from __future__ import annotations

import gzip
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.read import BadRow, Document, divide_source, list_files, read_part, rows
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

pytest.importorskip("warcio")
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter


def source_of(*paths: Path | str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=[str(path) for path in paths], **fields)


def read(source: SourceSpec, tally: Counter[str] | None = None) -> list[Document | BadRow]:
    parts = divide_source("web", list_files(source), source)
    return [row for part in parts for row in read_part(part, source, tally=tally)]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


class Archive:
    def __init__(self, packed: bool = True) -> None:
        self.file = io.BytesIO()
        self.writer = WARCWriter(self.file, gzip=packed)

    def info(self) -> Archive:
        self.writer.write_record(self.writer.create_warcinfo_record("a.warc", {"software": "test"}))
        return self

    def response(
        self,
        url: str,
        body: bytes,
        kind: str = "text/html; charset=utf-8",
        status: str = "200 OK",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> Archive:
        http = StatusAndHeaders(status, [("Content-Type", kind), *headers], protocol="HTTP/1.1")
        record = self.writer.create_warc_record(url, "response", payload=io.BytesIO(body), http_headers=http)
        self.writer.write_record(record)
        return self

    def plain(self, url: str, body: bytes, kind: str = "conversion", content: str = "text/plain") -> Archive:
        record = self.writer.create_warc_record(url, kind, payload=io.BytesIO(body), warc_content_type=content)
        self.writer.write_record(record)
        return self

    def raw(self, url: str, body: bytes) -> Archive:
        """A response whose block is no HTTP."""
        headers = [("WARC-Type", "response"), ("WARC-Target-URI", url), ("Content-Length", str(len(body)))]
        head = "WARC/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        data = head.encode() + body + b"\r\n\r\n"
        self.file.write(gzip.compress(data) if self.writer.gzip else data)
        return self


PAGE = "<html><body><p>grün</p></body></html>"


@pytest.mark.parametrize("packed", [False, True])
def test_pages_and_texts_are_read(tmp_path: Path, packed: bool) -> None:
    archive = Archive(packed).info()
    archive.response("https://a.example/1", PAGE.encode())
    archive.response("https://a.example/2", b"\x89PNG", "image/png")
    archive.response("https://a.example/3", b"<p>not here</p>", status="404 Not Found")
    archive.response("https://a.example/4", "plain ü".encode(), "text/plain")
    archive.response("https://a.example/5", b" \n", "text/html")
    archive.plain("https://a.example/6", b"<p>saved</p>", "resource", "text/html")
    archive.plain("https://a.example/7", b"x", "metadata", "text/plain")
    path = write(tmp_path / ("a.warc.gz" if packed else "a.warc"), archive.file.getvalue())
    tally: Counter[str] = Counter()
    found = [row for row in read(source_of(path), tally) if isinstance(row, Document)]
    assert [(row.text, row.row, row.url, row.labels) for row in found] == [
        (PAGE, 2, "https://a.example/1", {"type": "html"}),
        ("plain ü", 5, "https://a.example/4", {}),
        ("<p>saved</p>", 7, "https://a.example/6", {"type": "html"}),
    ]
    assert all(row.id.startswith("urn:uuid:") and row.file == str(path) for row in found)
    assert tally == {"not text": 4, "empty": 1}  # the info, the image, the 404 and the metadata


def test_wet_files_hold_plain_text(tmp_path: Path) -> None:
    archive = Archive().info()
    for number in range(3):
        archive.plain(f"https://a.example/{number}", f"text {number} ü".encode())
    path = write(tmp_path / "a.warc.wet.gz", archive.file.getvalue())
    found = read(source_of(tmp_path))
    assert [(row.text, row.row, row.url, row.labels) for row in found if isinstance(row, Document)] == [
        (f"text {number} ü", number + 2, f"https://a.example/{number}", {}) for number in range(3)
    ]
    assert found[0].file == str(path)


def test_transfer_encodings_are_undone(tmp_path: Path) -> None:
    chunked = b"5\r\n<p>ch\r\n9\r\nunked</p>\r\n0\r\n\r\n"
    archive = Archive()
    archive.response("https://a.example/1", chunked, headers=(("Transfer-Encoding", "chunked"),))
    archive.response("https://a.example/2", gzip.compress(b"<p>zip</p>"), headers=(("Content-Encoding", "gzip"),))
    path = write(tmp_path / "a.warc.gz", archive.file.getvalue())
    assert [row.text for row in read(source_of(path)) if isinstance(row, Document)] == ["<p>chunked</p>", "<p>zip</p>"]


def test_the_charset_of_the_header_or_of_the_page_is_used(tmp_path: Path) -> None:
    archive = Archive()
    archive.response("https://a.example/1", "жар".encode("cp1251"), "text/html; charset=windows-1251")
    meta = '<meta http-equiv="Content-Type" content="text/html; charset=Shift_JIS"><p>日本</p>'
    archive.response("https://a.example/2", meta.encode("shift_jis"), "text/html")
    archive.response("https://a.example/3", "“grün”".encode("cp1252"), "text/html")
    found = read(source_of(write(tmp_path / "a.warc.gz", archive.file.getvalue())))
    assert [row.text for row in found if isinstance(row, Document)] == ["жар", meta, "“grün”"]


@pytest.mark.parametrize("packed", [False, True])
def test_records_that_are_no_http_do_not_end_the_archive(tmp_path: Path, packed: bool) -> None:
    archive = Archive(packed)
    archive.raw("https://a.example/1", b"").raw("https://a.example/2", b"\r\n").raw("", b"garbage")
    archive.response("https://a.example/4", PAGE.encode())
    path = write(tmp_path / "a.warc", archive.file.getvalue())
    (document,) = read(source_of(path))
    assert isinstance(document, Document) and document.row == 4


def test_an_archive_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    for packed in (False, True):
        archive = Archive(packed).response("https://a.example/1", PAGE.encode())
        boundary = archive.file.tell()
        whole = archive.response("https://a.example/2", PAGE.encode()).file.getvalue()
        path = tmp_path / "a.warc"
        for size in range(boundary + 1, len(whole), 7):
            write(path, whole[:size])
            with pytest.raises(UserError, match=r"a\.warc: "):
                read(source_of(path))
        assert len(read(source_of(write(path, whole[:boundary])))) == 1


def test_a_cut_that_looks_like_an_end_is_an_error(tmp_path: Path) -> None:
    whole = Archive(packed=False).plain("https://a.example/1", b"one\r\n\r\ntwo").file.getvalue()
    path = write(tmp_path / "a.warc", whole[: whole.index(b"two")])
    with pytest.raises(UserError, match="the file ends inside record 1"):
        read(source_of(path))


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.warc", b"just some text\nof two lines\n")
    with pytest.raises(UserError, match=r"a\.warc: not readable as WARC"):
        read(source_of(path))


def test_a_record_that_is_too_long_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive().plain("https://a.example/1", b"x" * 300_000).plain("https://a.example/2", b"yes")
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", 1000)
    bad, good = read(source_of(write(tmp_path / "a.wet.gz", archive.file.getvalue())))
    assert isinstance(bad, BadRow) and (bad.row, bad.reason) == (1, "the record has 300,000 bytes")
    assert isinstance(good, Document) and good.text == "yes"
