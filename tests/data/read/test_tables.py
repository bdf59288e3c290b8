"""CSV, Parquet, Arrow and saved Hugging Face datasets: rows keep their numbers, and missing columns are named."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.read import BadRow, Document, divide_source, list_files, read_part
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


def source_of(*paths: Path | str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=[str(path) for path in paths], **fields)


def read(source: SourceSpec, tally: Counter[str] | None = None) -> list[Document | BadRow]:
    parts = divide_source("web", list_files(source), source)
    return [row for part in parts for row in read_part(part, source, tally=tally)]


def texts(source: SourceSpec) -> list[str]:
    found = read(source)
    assert all(isinstance(row, Document) for row in found), found
    return [row.text for row in found if isinstance(row, Document)]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def arrow_file(path: Path, table: pa.Table, rows: int | None = None, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def arrow_stream(path: Path, table: pa.Table, rows: int | None = None) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def parquet(path: Path, table: pa.Table, rows: int | None = None) -> Path:
    pq.write_table(table, path, row_group_size=rows)
    return path


WRITERS = {"parquet": parquet, "arrow": arrow_file, "arrows": arrow_stream}


# CSV


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv", ";"), ("a.csv", "|")])
def test_csv_rows_follow_the_header(tmp_path: Path, name: str, mark: str) -> None:
    rows = [["1", "one"], ["2", 'two, "quoted"\nover lines;|\t'], ["3", ""], ["4", "fünf\r\n"]]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=mark)
    writer.writerow(["id", "text"])
    writer.writerows(rows)
    path = write(tmp_path / name, "\ufeff" + text.getvalue())
    tally: Counter[str] = Counter()
    assert read(source_of(path, id_field="id"), tally) == [
        Document(content, str(path), int(own_id), own_id) for own_id, content in rows if content
    ]
    assert tally == {"empty": 1}


def test_a_csv_row_that_cannot_be_used_is_set_aside(tmp_path: Path) -> None:
    content = b'id,text\n1,one\n2,two,more\n3,caf\xe9\n4\n5,"a"b\n\n7,seven\n8,"never closed\n9,nine\n'
    path = write(tmp_path / "a.csv", content)
    tally: Counter[str] = Counter()
    found = read(source_of(path), tally)
    assert [(row.row, type(row)) for row in found if isinstance(row, Document)] == [(1, Document), (7, Document)]
    reasons = {row.row: row.reason for row in found if isinstance(row, BadRow)}
    assert list(reasons) == [2, 3, 4, 5, 8]
    assert "3 columns, but the header has 2" in reasons[2]
    assert "not valid UTF-8" in reasons[3]
    assert "1 columns" in reasons[4]
    assert "not valid CSV" in reasons[5] and "not valid CSV" in reasons[8]
    assert found[2].raw == "3,caf\ufffd"  # type: ignore[union-attr]
    assert tally == {"empty": 1}


def test_a_csv_without_the_column_names_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,body\n1,a\n")
    with pytest.raises(UserError, match=r"a\.csv: no column 'text'; it has 'id', 'body': set text_field"):
        read(source_of(path))
    with pytest.raises(UserError, match=r"no column 'url'; .* set url_field"):
        read(source_of(path, text_field="body", url_field="url"))


def test_a_long_field_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text\n" + "x" * 1_000_000 + "\n")
    assert texts(source_of(path)) == ["x" * 1_000_000]


def test_an_empty_csv_has_no_rows(tmp_path: Path) -> None:
    assert read(source_of(write(tmp_path / "a.csv", ""))) == []
    assert read(source_of(write(tmp_path / "a.csv", "text\n"))) == []


def test_csv_in_utf16(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "\ufefftext\ngrün\n".encode("utf-16-le"))
    assert texts(source_of(path)) == ["grün"]


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.text("ab,\"'\n\r\t;")), max_size=5))
def test_any_text_survives_csv(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerows([("text", "other"), *rows])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(text.getvalue().encode())
    wanted = [(row, text) for row, (text, _) in enumerate(rows, start=1) if text and not text.isspace()]
    found = read(source_of(path))
    assert [(row.row, row.text) for row in found if isinstance(row, Document)] == wanted


# Tables by column


@pytest.mark.parametrize("kind", WRITERS)
def test_rows_go_on_over_row_groups(tmp_path: Path, kind: str) -> None:
    column = [None if i == 3 else f"row {i + 1}" for i in range(50)]
    path = tmp_path / f"a.{kind}"
    WRITERS[kind](path, pa.table({"id": range(50), "body": column}), 7)
    tally: Counter[str] = Counter()
    found = read(source_of(path, text_field="body", id_field="id"), tally)
    assert found == [Document(f"row {i + 1}", str(path), i + 1, str(i)) for i in range(50) if i != 3]
    assert tally == {"empty": 1}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    "column", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary(), pa.string_view()], ids=str
)
def test_text_of_other_types(tmp_path: Path, kind: str, column: pa.DataType) -> None:
    if kind == "parquet" and column == pa.string_view():
        pytest.skip("Parquet has no such type")
    path = tmp_path / f"a.{kind}"
    WRITERS[kind](path, pa.table({"text": pa.array(["a", "ü", "a"]).cast(column)}))
    assert texts(source_of(path)) == ["a", "ü", "a"]


@pytest.mark.parametrize("kind", WRITERS)
def test_another_column_names_what_exists(tmp_path: Path, kind: str) -> None:
    path = WRITERS[kind](tmp_path / f"a.{kind}", pa.table({"id": [1], "body": ["a"]}))
    with pytest.raises(UserError, match=rf"a\.{kind}: no column 'text'; it has 'id', 'body'"):
        read(source_of(path))
    with pytest.raises(UserError, match="column 'id' holds int64, not text"):
        read(source_of(path, text_field="id"))


@pytest.mark.parametrize("kind", WRITERS)
def test_bytes_that_are_no_text_spoil_only_their_row(tmp_path: Path, kind: str) -> None:
    values = pa.array([b"one", b"caf\xe9", b"three"])
    column = pa.Array.from_buffers(pa.string(), 3, values.buffers())
    path = WRITERS[kind](tmp_path / f"a.{kind}", pa.table({"id": [1, 2, 3], "text": column}))
    found = read(source_of(path))
    assert [row.row for row in found] == [1, 2, 3]
    assert isinstance(found[1], BadRow) and "not valid UTF-8" in found[1].reason
    assert found[1].raw == "caf\ufffd"


@pytest.mark.parametrize("kind", WRITERS)
def test_messages_of_a_table(tmp_path: Path, kind: str) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = pa.array([chat, None, [*chat, {"role": None, "content": "x"}]])
    path = WRITERS[kind](tmp_path / f"a.{kind}", pa.table({"messages": rows}))
    first, last = read(source_of(path, messages_field="messages"))
    assert first == Document("Hi\n\nHello", str(path), 1, messages=chat)
    assert isinstance(last, BadRow) and last.row == 3 and "message 3 has no role" in last.reason


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_is_damaged_is_named(tmp_path: Path, kind: str) -> None:
    label = "Parquet" if kind == "parquet" else "Arrow"
    path = write(tmp_path / f"a.{kind}", "PAR1 but no more")
    with pytest.raises(UserError, match=rf"a\.{kind}: not readable as {label}.*its part was not used"):
        read(source_of(path))
    write(path, "")
    with pytest.raises(UserError, match=rf"a\.{kind}: not readable as {label}"):
        read(source_of(path))
    WRITERS[kind](path, pa.table({"text": [f"row {i}" * 50 for i in range(1000)]}), 100)
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 20):
        write(path, whole[:size])
        with pytest.raises(UserError, match=rf"a\.{kind}: "):
            read(source_of(path))


def test_a_packed_table_is_refused(tmp_path: Path) -> None:
    import gzip

    path = parquet(tmp_path / "a.parquet", pa.table({"text": ["a"]}))
    packed = write(tmp_path / "a.parquet.gz", gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match=r"compressed \(gz\), but tables are read in ranges; decompress it"):
        read(source_of(packed))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_feather_and_compressed_batches(tmp_path: Path, compression: str | None) -> None:
    table = pa.table({"other": [0] * 9, "text": [f"row {i}" for i in range(9)]})
    pyarrow.feather.write_feather(table, tmp_path / "a.feather", compression=compression or "uncompressed")
    assert texts(source_of(tmp_path / "a.feather")) == table["text"].to_pylist()
    arrow_file(tmp_path / "b.arrow", table, 2, compression)
    assert texts(source_of(tmp_path / "b.arrow")) == table["text"].to_pylist()


@pytest.mark.parametrize("writer", [arrow_file, arrow_stream])
def test_a_mapped_batch_is_not_copied(tmp_path: Path, writer: Any) -> None:
    table = pa.table({"text": ["x" * 1000] * 30_000, "other": ["y" * 100] * 30_000})
    path = writer(tmp_path / "a.arrow", table)
    del table
    source = source_of(path)
    (part,) = divide_source("web", list_files(source), source)
    before = pa.total_allocated_bytes()
    for number, _ in enumerate(read_part(part, source)):
        if number % 1000 == 0:
            assert pa.total_allocated_bytes() - before < 8_000_000


def test_columns_come_in_any_order(tmp_path: Path) -> None:
    table = pa.table({"url": ["u"], "text.raw": ["no"], "text": ["t"], "id": [1.5]})
    for kind, writer in WRITERS.items():
        path = writer(tmp_path / f"a.{kind}", table)
        assert read(source_of(path, id_field="id", url_field="url")) == [Document("t", str(path), 1, "1.5", "u")]


# A folder of the `datasets` library


def test_a_dataset_saved_by_the_library_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"row {i}" for i in range(20)], "id": list(range(20))}
    saved = datasets.Dataset.from_dict(rows)
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    found = read(source_of(tmp_path / "one", id_field="id"))
    assert [(row.text, row.id) for row in found if isinstance(row, Document)] == [
        (f"row {i}", str(i)) for i in range(20)
    ]
    assert len({row.file for row in found}) == 3
    shuffled = saved.shuffle(seed=1).select(range(10))
    shuffled.save_to_disk(tmp_path / "shuffled")
    assert texts(source_of(tmp_path / "shuffled")) == shuffled["text"][:]
    both = datasets.DatasetDict({"train": saved, "test": shuffled})
    both.save_to_disk(tmp_path / "dict")
    assert texts(source_of(tmp_path / "dict")) == rows["text"]
    assert texts(source_of(tmp_path / "dict", include=["test/*"])) == shuffled["text"][:]
