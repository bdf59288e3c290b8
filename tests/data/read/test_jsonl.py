"""Text and JSON lines: every document comes out with its file and row, and every row that is none with its reason."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bessemer.data.read import BadRow, Document, divide_source, list_files, read_documents, read_part, rows
from bessemer.data.read.compression import detect_compression
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


def source_of(*paths: Path | str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=[str(path) for path in paths], **fields)


def read(source: SourceSpec, tally: Counter[str] | None = None) -> list[Document | BadRow]:
    parts = divide_source("web", list_files(source), source)
    return [row for part in parts for row in read_part(part, source, tally=tally)]


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_text_files_are_whole_documents(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", "one\r\ntwo\n")
    second = write(tmp_path / "b.md", "\ufeff# title")
    assert read(source_of(tmp_path)) == [Document("one\r\ntwo\n", str(first), 1), Document("# title", str(second), 1)]


def test_bad_utf8_in_text_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"caf\xe9 ok\0")
    assert read(source_of(tmp_path))[0].text == "caf\ufffd ok\0"  # type: ignore[union-attr]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-8"])
def test_a_byte_order_mark_tells_the_encoding(tmp_path: Path, encoding: str) -> None:
    write(tmp_path / "a.txt", "\ufeffgrün 😀".encode(encoding))
    assert read(source_of(tmp_path))[0].text == "grün 😀"  # type: ignore[union-attr]


def test_empty_texts_are_counted(tmp_path: Path) -> None:
    for number, content in enumerate(["", " \n\u00a0", "\ufeff", "x"]):
        write(tmp_path / f"{number}.txt", content)
    tally: Counter[str] = Counter()
    assert [row.row for row in read(source_of(tmp_path), tally)] == [1]
    assert tally == {"empty": 3}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_jsonl_rows_are_line_numbers(tmp_path: Path, name: str) -> None:
    content = (
        lines({"text": "one"})
        + "\n"
        + lines({"text": ""}, {"text": None}, {"text": "fünf"}, {"text": " \n"}).replace("\n", "\r\n")
    )
    data = content.encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    tally: Counter[str] = Counter()
    assert read(source_of(path), tally) == [Document("one", str(path), 1), Document("fünf", str(path), 5)]
    assert tally == {"empty": 3}


def test_a_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\ufeff{"text": "a"}\n{"text": "b"}')
    assert read(source_of(path)) == [Document("a", str(path), 1), Document("b", str(path), 2)]


def test_half_a_surrogate_pair_in_json_becomes_a_replacement_character(tmp_path: Path) -> None:
    line = r'{"text": "a\ud83d b\ud83d\ude00", "id": "\udc00", "url": "u\ud800"}'
    path = write(tmp_path / "a.jsonl", line + "\n")
    assert read(source_of(path, id_field="id", url_field="url")) == [
        Document("a\ufffd b\U0001f600", str(path), 1, id="\ufffd", url="u\ufffd")
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "cut', "not valid JSON"),
        ('{"content": "a", "id": 7}', "no field 'text'; it has 'content', 'id': set text_field"),
        ('{"text": ["a"]}', "'text' holds a list, not text"),
        ('{"text": 7}', "'text' holds a int, not text"),
        ("7", "a int; each line must be like"),
        (b'{"text": "caf\xe9"}', "not valid JSON in UTF-8"),
        (b'{"text": "a\0b"}', "not valid JSON"),
        ('{"text": ' + "[" * 100_000, "not valid JSON"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_bad_json_row_is_set_aside_with_its_fix(tmp_path: Path, line: str | bytes, told: str) -> None:
    data = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + data + b'\n{"text": "also"}\n')
    first, bad, last = read(source_of(path))
    assert isinstance(bad, BadRow) and (bad.file, bad.row) == (str(path), 2)
    assert told in bad.reason
    assert bad.raw == (data + b"\n").decode("utf-8", "replace")[:500]
    assert (first, last) == (Document("fine", str(path), 1), Document("also", str(path), 3))
    with pytest.raises(UserError, match=r"a\.jsonl:2: "):
        list(read_documents(list_files(source_of(path)), source_of(path)))


def test_a_field_that_no_row_has_is_told_row_by_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"body": "a"}, {"body": "b"}))
    assert [type(row) for row in read(source_of(path))] == [BadRow, BadRow]
    assert [row.text for row in read(source_of(path, text_field="body"))] == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (b'[\n{"text": "one"}\n]', "one object per line, not an array"),
        ('\ufeff{"text": "one"}\n'.encode("utf-16-le"), "the file is in UTF-16, not in UTF-8; convert it"),
        ('{"text": "one"}\n'.encode("utf-16-be"), "the file is in UTF-16, not in UTF-8; convert it"),
        ('\ufeff{"text": "one"}\n'.encode("utf-32-le"), "the file is in UTF-32, not in UTF-8; convert it"),
        ('{"text": "one"}\n'.encode("utf-32-be"), "the file is in UTF-32, not in UTF-8; convert it"),
    ],
)
def test_what_is_no_jsonl_at_all_is_told(tmp_path: Path, content: bytes, fix: str) -> None:
    first = read(source_of(write(tmp_path / "a.json", content), format="jsonl"))[0]
    assert isinstance(first, BadRow) and fix in first.reason


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", 50)
    fits = '{"text": "' + "x" * 37 + '"}\n'
    assert len(fits) == 50
    long = '{"text": "' + "y" * 3_000_000 + '"}'
    path = write(tmp_path / "a.jsonl", fits + long + ("\n" + fits if end else ""))
    found = read(source_of(path))
    assert isinstance(found[1], BadRow) and found[1].reason.startswith(f"the line has {len(long + end):,} bytes")
    assert [row.row for row in found] == ([1, 2, 3] if end else [1, 2])


def test_id_and_url_are_taken_where_they_are_named(tmp_path: Path) -> None:
    records = [
        {"text": "a", "id": "x1", "url": "https://a.example/"},
        {"text": "b", "id": 17},
        {"text": "c", "id": None, "url": None},
        {"text": "d", "id": ["no"]},
    ]
    path = write(tmp_path / "a.jsonl", lines(*records))
    *good, bad = read(source_of(path, id_field="id", url_field="url"))
    assert [(row.id, row.url) for row in good] == [("x1", "https://a.example/"), ("17", ""), ("", "")]  # type: ignore[union-attr]
    assert isinstance(bad, BadRow) and "'id' holds a list" in bad.reason
    assert all((row.id, row.url) == ("", "") for row in read(source_of(path)))  # type: ignore[union-attr]


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    "value",
    [
        CHAT,
        [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        [{"from": None, "value": None, **message} for message in CHAT],
        json.dumps(CHAT),
    ],
)
def test_messages_are_role_and_content(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "a.jsonl", lines({"chat": value}))
    assert read(source_of(path, messages_field="chat")) == [Document("Hi\n\nHello", str(path), 1, messages=CHAT)]


def test_more_than_role_and_content_is_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    path = write(tmp_path / "a.jsonl", lines({"messages": [CHAT[0], call]}))
    (document,) = read(source_of(path, messages_field="messages"))
    assert isinstance(document, Document) and document.text == "Hi"
    assert document.messages == [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"role": "user"}, "holds a dict, not a list of messages"),
        (["Hi"], "message 1 is a str"),
        ([CHAT[0], {"role": "user"}], "message 2 has no content"),
        ([{"content": "Hi"}], "message 1 has no role"),
        ([{"role": "user", "content": ["Hi"]}], "content holds a list, not text"),
        ([{"from": 3, "value": "Hi"}], "from holds a int, not text"),
        ([{"role": "user", "content": None}], "message 1 has no content"),
        ("not json", "is no JSON list of messages"),
    ],
)
def test_what_is_no_conversation_is_set_aside(tmp_path: Path, value: Any, told: str) -> None:
    path = write(tmp_path / "a.jsonl", lines({"messages": value}))
    (bad,) = read(source_of(path, messages_field="messages"))
    assert isinstance(bad, BadRow) and told in bad.reason and "'messages'" in bad.reason


def test_a_conversation_without_text_is_empty(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        lines({"messages": []}, {"messages": None}, {"messages": [{"role": "user", "content": " "}]}),
    )
    tally: Counter[str] = Counter()
    assert read(source_of(path, messages_field="messages"), tally) == []
    assert tally == {"empty": 3}


def test_a_file_that_changed_since_it_was_listed_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": "a"}))
    source = source_of(path)
    (part,) = divide_source("web", list_files(source), source)
    write(path, lines({"text": "other"}))
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(it has changed since it was listed"):
        list(read_part(part, source))


def test_a_file_that_is_gone_is_named_with_its_part(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write(tmp_path / name, lines({"text": name}))
    source = source_of(tmp_path)
    (part,) = divide_source("web", list_files(source), source)
    (tmp_path / "b.jsonl").unlink()
    reading = read_part(part, source)
    assert next(reading).file == str(tmp_path / "a.jsonl")
    with pytest.raises(UserError) as caught:
        next(reading)
    told = str(caught.value)
    assert "b.jsonl: cannot be read (No such file or directory)" in told
    assert f"its part ({tmp_path / 'a.jsonl'} and 2 more) was not used" in told


json_text = st.text(st.characters(exclude_categories=[]))  # half surrogates and all


@given(st.lists(st.none() | json_text, max_size=6), st.booleans(), st.booleans())
def test_any_text_survives_json(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None], ascii_only: bool, carriage: bool
) -> None:
    written = [json.dumps({"text": text}, ensure_ascii=ascii_only or not _whole(text)).encode() for text in texts]
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes((b"\r\n" if carriage else b"\n").join(written))
    found = read(source_of(path))
    wanted = [
        (row, text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        for row, text in enumerate(texts, start=1)
        if text and not text.isspace()
    ]
    assert [(row.row, row.text) for row in found if isinstance(row, Document)] == wanted
    assert len(found) == len(wanted)
    for _, text in wanted:
        text.encode()


def _whole(text: str | None) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text or "")


@given(st.binary(max_size=200))
def test_any_bytes_give_documents_or_bad_rows(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    assume(not detect_compression(io.BytesIO(data)))
    folder = tmp_path_factory.mktemp("any")
    write(folder / "a.jsonl", data)
    found = read(source_of(folder / "a.jsonl"))
    assert [row.row for row in found] == [
        number for number, line in enumerate(_lines(data), start=1) if not line.isspace()
    ]
    for row in found:
        (row.raw if isinstance(row, BadRow) else row.text).encode()
    for row in read(source_of(write(folder / "a.txt", data))):
        assert isinstance(row, Document) and row.text.encode()


def _lines(data: bytes) -> list[bytes]:
    cut = data.split(b"\n")
    return [line + b"\n" for line in cut[:-1]] + ([cut[-1]] if cut[-1] else [])
