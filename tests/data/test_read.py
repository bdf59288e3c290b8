"""What a source names is found, and every document comes out with its file and row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.data.read import Document, list_files, read_documents
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


def source_of(*paths: Path | str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=[str(path) for path in paths], **fields)


def documents(source: SourceSpec) -> list[Document]:
    return list(read_documents(list_files(source), source))


def names(source: SourceSpec, root: Path) -> list[str]:
    return [Path(entry.path).relative_to(root).as_posix() for entry in list_files(source)]


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_text_files_are_whole_documents(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", "one\r\ntwo\n")
    second = write(tmp_path / "b.md", "\ufeff# title")
    assert documents(source_of(tmp_path)) == [
        Document("one\r\ntwo\n", str(first), 1),
        Document("# title", str(second), 1),
    ]


def test_bad_utf8_in_text_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"caf\xe9 ok")
    assert documents(source_of(tmp_path))[0].text == "caf\ufffd ok"


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_jsonl_rows_are_line_numbers(tmp_path: Path, name: str) -> None:
    content = (
        lines({"text": "one"})
        + "\n"
        + lines({"text": ""}, {"text": None}, {"text": "fünf"}).replace("\n", "\r\n")
    )
    data = content.encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    assert documents(source_of(path)) == [Document("one", str(path), 1), Document("fünf", str(path), 5)]


def test_half_a_surrogate_pair_in_json_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", r'{"text": "a\ud83d b\ud83d\ude00"}' + "\n")
    assert documents(source_of(path))[0].text == "a\ufffd b\U0001f600"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "cut', "not valid JSON"),
        ('{"content": "a", "id": 7}', "no field 'text'; it has 'content', 'id': set text_field"),
        ('{"text": ["a"]}', "'text' holds a list, not text"),
        ("7", "a int; each line must be like"),
        (b'{"text": "caf\xe9"}', "not valid JSON in UTF-8"),
    ],
)
def test_a_bad_json_row_is_named_with_its_fix(tmp_path: Path, line: str | bytes, told: str) -> None:
    data = line.encode() if isinstance(line, str) else line
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + data + b"\n")
    with pytest.raises(UserError) as caught:
        documents(source_of(path))
    assert f"{path}:2: " in str(caught.value) and told in str(caught.value)


def test_a_json_array_is_told_from_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '[\n{"text": "one"}\n]')
    with pytest.raises(UserError, match="set format to text, source, jsonl"):
        documents(source_of(path))
    with pytest.raises(UserError, match="one object per line, not an array"):
        documents(source_of(path, format="jsonl"))


def test_a_truncated_gzip_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(lines(*({"text": f"number {i}"} for i in range(1000))).encode())
    path = write(tmp_path / "a.jsonl.gz", packed[: len(packed) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read"):
        documents(source_of(path))


def test_parquet_rows_go_on_over_row_groups(tmp_path: Path) -> None:
    texts = [None if i == 3 else f"row {i + 1}" for i in range(50)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(50), "body": texts}), path, row_group_size=7)
    found = documents(source_of(path, text_field="body"))
    assert found == [Document(f"row {i + 1}", str(path), i + 1) for i in range(50) if i != 3]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_text_of_other_string_types(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)}), tmp_path / "a.parquet")
    assert [document.text for document in documents(source_of(tmp_path))] == ["a", "b", "a"]


def test_parquet_with_another_column_names_what_exists(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["a"]}), path)
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text'; it has 'id', 'body'"):
        documents(source_of(path))
    with pytest.raises(UserError, match="column 'id' holds int64, not text"):
        documents(source_of(path, text_field="id"))


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", "PAR1 but no more")
    with pytest.raises(UserError, match=r"a\.parquet: not readable as Parquet"):
        documents(source_of(path))


def test_a_source_tree_leaves_out_what_is_not_source(tmp_path: Path) -> None:
    for name in [
        "b.py",
        "a/z.rs",
        "README.md",
        ".hidden.py",
        ".git/x.py",
        "a/__pycache__/x.py",
        "node_modules/x.js",
    ]:
        write(tmp_path / name)
    write(tmp_path / "binary.c", b"int\0x")
    write(tmp_path / "generated.py", "x = 1\n" * 200_000)
    write(tmp_path / "logo.png", b"\x89PNG")
    source = source_of(tmp_path, format="source")
    assert names(source, tmp_path) == ["README.md", "a/z.rs", "b.py"]
    assert names(source_of(tmp_path), tmp_path) == names(source, tmp_path)


def test_a_file_named_by_hand_is_always_read(tmp_path: Path) -> None:
    big = write(tmp_path / "generated.py", "x = 1\n" * 200_000)
    odd = write(tmp_path / ".hidden" / "notes.log", b"int\0x")
    assert len(documents(source_of(big, odd, format="source"))) == 2


def test_long_texts_in_a_folder_are_read(tmp_path: Path) -> None:
    write(tmp_path / "book.txt", "word " * 300_000)
    assert len(documents(source_of(tmp_path))[0].text) == 1_500_000


def test_include_chooses_inside_a_folder(tmp_path: Path) -> None:
    for name in ["a.py", "b.txt", "lib/c.py", "lib/deep/d.py", "e.log"]:
        write(tmp_path / name)
    assert names(source_of(tmp_path, include=["*.py"]), tmp_path) == ["a.py", "lib/c.py", "lib/deep/d.py"]
    assert names(source_of(tmp_path, include=["lib/**/*.py"]), tmp_path) == ["lib/c.py", "lib/deep/d.py"]
    assert names(source_of(tmp_path, include=["**/*.log"]), tmp_path) == ["e.log"]


def test_exclude_leaves_out_inside_a_folder(tmp_path: Path) -> None:
    for name in ["a.py", "test_a.py", "tests/b.py", "lib/c.py", "lib/tests/d.py"]:
        write(tmp_path / name)
    assert names(source_of(tmp_path, exclude=["tests/*", "test_*"]), tmp_path) == [
        "a.py",
        "lib/c.py",
        "lib/tests/d.py",
    ]
    assert names(source_of(tmp_path, exclude=["**/tests/*", "test_*"]), tmp_path) == ["a.py", "lib/c.py"]


def test_a_folder_is_read_as_what_most_of_it_is(tmp_path: Path) -> None:
    write(tmp_path / "code" / "a.py", "x = 1\n" * 100)
    write(tmp_path / "code" / "fixture.jsonl", lines({"text": "a"}))
    write(tmp_path / "data" / "a.jsonl", lines(*({"text": f"{i}"} for i in range(99))))
    write(tmp_path / "data" / "README.md")
    assert names(source_of(tmp_path / "code"), tmp_path) == ["code/a.py"]
    assert names(source_of(tmp_path / "data"), tmp_path) == ["data/a.jsonl"]


def test_a_folder_with_jsonl_and_parquet_needs_a_choice(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", lines({"text": "a"}))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="set format"):
        list_files(source_of(tmp_path))
    assert names(source_of(tmp_path, format="parquet"), tmp_path) == ["a.parquet"]


def test_a_file_matched_twice_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["b.txt", "a.txt", "sub/c.txt"]:
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    source = source_of("b.txt", "*.txt", tmp_path, "**/*.txt")
    assert names(source, tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]


def test_a_missing_path_names_what_exists(tmp_path: Path) -> None:
    write(tmp_path / "web.jsonl")
    with pytest.raises(UserError, match=r"no such file or folder: .*wbe\.jsonl; .* holds web\.jsonl"):
        list_files(source_of(tmp_path / "wbe.jsonl"))
    with pytest.raises(UserError, match=r"nothing matches .*holds web\.jsonl"):
        list_files(source_of(tmp_path / "*.parquet"))


def test_a_folder_with_nothing_to_read_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "a.py")
    with pytest.raises(UserError, match=r"no text file to read .*1 x \.py; set format or include"):
        list_files(source_of(tmp_path, format="text"))
