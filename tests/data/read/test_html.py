"""Pages in the encodings that the web uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.read import Document, divide_source, list_files, read_part
from bessemer.data.read.rows import decode_html
from bessemer.spec.data import SourceSpec


@pytest.mark.parametrize(
    ("text", "encoding", "declared"),
    [
        ("grün", "utf-8", ""),
        ("grün", "utf-8", "iso-8859-1"),  # valid UTF-8 is UTF-8, whatever is declared
        ("grün “so”", "cp1252", "iso-8859-1"),  # browsers read Latin 1 as Windows-1252
        ("grün “so”", "cp1252", ""),
        ("жар", "cp1251", "windows-1251"),
        ("жар", "koi8-r", "KOI8-R"),
        ("日本語", "cp932", "shift_jis"),
        ("日本語", "euc_jp", '"euc-jp"'),
        ("日本語", "iso2022_jp", "iso-2022-jp"),
        ("中文字", "gbk", "gb2312"),
        ("中文字", "big5", "big5"),
        ("한국어", "cp949", "euc-kr"),
        ("grün", "utf-16-le", "utf-16le"),
        ("\ufeffgrün", "utf-8", "iso-8859-1"),
        ("\ufeffgrün", "utf-16-be", ""),
        ("grün", "cp1252", "no-such-charset"),
        ("grün", "cp1252", "rot13"),  # a codec of Python's that is no encoding
        ("grün", "cp1252", "unicode_escape"),
    ],
)
def test_bytes_become_the_text_that_was_meant(text: str, encoding: str, declared: str) -> None:
    assert decode_html(text.encode(encoding), declared) == text.removeprefix("\ufeff")


@pytest.mark.parametrize(
    "head",
    [
        '<meta charset="windows-1251">',
        "<META content='text/html; charset=windows-1251' http-equiv=Content-Type>",
        '<?xml version="1.0" encoding="windows-1251"?>',
    ],
)
def test_what_the_page_says_of_itself_counts(head: str) -> None:
    page = head + "<p>жар</p>"
    assert decode_html(page.encode("cp1251")) == page
    assert decode_html(page.encode("cp1251"), "windows-1251") == page


def test_a_page_cannot_declare_itself_to_be_utf16() -> None:
    page = '<meta charset="utf-16"><p>gr\xfcn</p>'
    assert decode_html(page.encode("cp1252")) == page


@given(st.binary(max_size=80), st.sampled_from(["", "utf-8", "gbk", "utf-16", "shift_jis", "hz", "x"]))
def test_any_bytes_give_text(data: bytes, declared: str) -> None:
    decode_html(data, declared).encode()


def test_html_files_are_labelled_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_bytes(b"<p>caf\xe9</p>")
    source = SourceSpec(path=[str(tmp_path)])
    (part,) = divide_source("web", list_files(source), source)
    assert list(read_part(part, source)) == [Document("<p>café</p>", str(path), 1, labels={"type": "html"})]
