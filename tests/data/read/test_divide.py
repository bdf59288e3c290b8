"""Parts depend on the files alone, and together they are the whole: every row once, with its own number."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.read import BadRow, Document, FileEntry, FilePiece, SourcePart, divide_source, list_files, read_part
from bessemer.data.read.parts import find_line_starts
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


def source_of(*paths: Path | str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=[str(path) for path in paths], **fields)


def rows(source: SourceSpec, part_bytes: int) -> list[Document | BadRow]:
    parts = divide_source("web", list_files(source), source, part_bytes)
    return [row for part in parts for row in read_part(part, source)]


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=3, compression="none")


def write_arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_stream(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_csv(path: Path, texts: list[str]) -> None:
    path.write_text("text\n" + "".join(f'"{text}"\n' for text in texts))


def write_tar(path: Path, texts: list[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{number:05d}.txt")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "feather": write_stream,
    "csv": write_csv,
    "tar": write_tar,
    "txt": lambda path, texts: path.write_text("\n".join(texts)) and None,
}

text = st.text("abü\n ", max_size=30)


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=40)
@given(files=st.lists(st.lists(text, max_size=12), min_size=1, max_size=4), part_bytes=st.integers(1, 2000))
def test_the_parts_together_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, kind: str, files: list[list[str]], part_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for number, texts in enumerate(files):
        WRITERS[kind](folder / f"{number}.{kind}", texts)
    source = source_of(folder, format={"tar": "webdataset", "feather": "arrow", "txt": "text"}.get(kind, kind))
    whole = rows(source, 1 << 40)
    assert rows(source, part_bytes) == whole
    if kind != "txt":
        wanted = [
            (str(folder / f"{number}.{kind}"), row, content)
            for number, texts in enumerate(files)
            for row, content in enumerate(texts, start=1)
            if content and not content.isspace()
        ]
        assert [(row.file, row.row, row.text) for row in whole if isinstance(row, Document)] == wanted


@given(
    st.lists(st.sampled_from([b"{}", b"", b" ", b'{"text": "a"}', b"x" * 40, b'{"text": "\xc3\xbc"}\r']), max_size=20),
    st.booleans(),
    st.integers(1, 60),
)
def test_cut_lines_keep_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ended: bool, part_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ended else b""))
    source = source_of(path)
    parts = divide_source("web", list_files(source), source, part_bytes)
    assert [row for part in parts for row in read_part(part, source)] == rows(source, 1 << 40)
    pieces = [piece for part in parts for piece in part.pieces]
    data = path.read_bytes()
    if len(data) > part_bytes:
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == len(data) == sum(part.size_bytes for part in parts)
        for piece in pieces:
            assert piece.start == 0 or data[piece.start - 1 : piece.start] == b"\n"
            assert piece.first_row == 1 + data[: piece.start].count(b"\n")


@given(st.lists(st.integers(0, 12), max_size=40), st.lists(st.integers(1, 300), unique=True))
def test_line_starts_are_those_of_a_plain_search(lengths: list[int], offsets: list[int]) -> None:
    data = b"".join(b"x" * length + b"\n" for length in lengths) + b"tail"
    offsets = [offset for offset in sorted(offsets) if offset < len(data)]
    wanted = []
    for offset in offsets:
        end = data.find(b"\n", offset - 1)
        if end >= 0 and (end + 1, 1 + data[: end + 1].count(b"\n")) not in wanted:
            wanted.append((end + 1, 1 + data[: end + 1].count(b"\n")))
    assert list(find_line_starts(_Slowly(data), offsets)) == wanted  # type: ignore[arg-type]


class _Slowly(io.BytesIO):
    """Gives a few bytes at a time, so that lines and offsets fall on every side of a block's end."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:7])


def test_a_compressed_file_is_one_piece(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000, 0))
    source = source_of(path)
    (part,) = divide_source("web", list_files(source), source, 100)
    assert [piece.stop for piece in part.pieces] == [-1]


def entry(name: str, size_bytes: int, kind: Any = "text", **more: Any) -> FileEntry:
    return FileEntry(name, size_bytes, kind, more.pop("mtime_ns", 7), **more)


def sizes(parts: list[SourcePart]) -> list[list[int]]:
    return [[piece.size_bytes for piece in part.pieces] for part in parts]


def test_small_files_are_put_together_in_order() -> None:
    files = [entry(f"/{i}.txt", size) for i, size in enumerate([3, 3, 4, 1, 20, 9, 2, 0, 0])]
    parts = divide_source("web", files, source_of("x"), 10)
    assert sizes(parts) == [[3, 3, 4], [1], [20], [9], [2, 0, 0]]
    assert [part.name for part in parts] == ["/0.txt and 2 more", "/3.txt", "/4.txt", "/5.txt", "/6.txt and 2 more"]
    assert [piece.file for part in parts for piece in part.pieces] == files
    assert divide_source("web", [], source_of("x")) == []


def test_a_huge_corpus_gets_larger_parts() -> None:
    files = [entry(f"/{i:06d}.txt", 1 << 26) for i in range(50_000)]
    assert len(divide_source("web", files[:100], source_of("x"))) == 100
    assert len(divide_source("web", files, source_of("x"))) == 16_667  # three files each
    tiny = [entry(f"/{i:06d}.txt", 1) for i in range(9000)]
    assert [len(part.pieces) for part in divide_source("web", tiny, source_of("x"))] == [4096, 4096, 808]


def test_the_key_is_of_what_is_read() -> None:
    part = SourcePart("web", (FilePiece(entry("/a.txt", 3), 3),))
    assert part.key == SourcePart("other", part.pieces).key  # not of the source's name
    others = [
        SourcePart("web", (FilePiece(entry("/b.txt", 3), 3),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 4), 3),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 3, "html"), 3),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 3, mtime_ns=8), 3),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 3, version="v"), 3),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 3), 3, 1),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 3), 3, 0, 2),)),
        SourcePart("web", (FilePiece(entry("/a.txt", 3), 3, 0, -1, 2),)),
        SourcePart("web", part.pieces * 2),
    ]
    assert len({part.key, *(other.key for other in others)}) == len(others) + 1
    signed = [entry(f"https://a.example/a.txt?X-Amz-Signature={n}", 3, version='"tag"', mtime_ns=n) for n in (1, 2)]
    assert len({SourcePart("web", (FilePiece(file, 3),)).key for file in signed}) == 1


def test_a_part_survives_pickle(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["text"] * 100)
    source = source_of(tmp_path)
    parts = divide_source("web", list_files(source), source, 200)
    assert len(parts) > 5
    for part in parts:
        key = part.key
        again = pickle.loads(pickle.dumps(part))
        assert again == part and again.key == key and again.name == part.name
    assert parts[1].name == f"{tmp_path}/a.jsonl bytes {parts[1].pieces[0].start}-{parts[1].pieces[0].stop}"


def test_pieces_of_tables_are_named_by_their_units(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x" * 100] * 9)
    write_arrow(tmp_path / "b.arrow", ["x" * 100] * 9)
    for name, unit in (("a.parquet", "row groups"), ("b.arrow", "batches")):
        source = source_of(tmp_path / name)
        parts = divide_source("web", list_files(source), source, 300)
        assert [part.name for part in parts] == [f"{tmp_path}/{name} {unit} {i}-{i + 1}" for i in range(3)]


def test_workers_may_share_the_cutting(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", ["text"] * 50)
    source = source_of(tmp_path)
    asked = []

    def each(function: Any, tasks: Any) -> Any:
        asked.append(len(tasks))
        return [function(pickle.loads(pickle.dumps(task))) for task in tasks]

    files = list_files(source)
    assert divide_source("web", files, source, 200, each=each) == divide_source("web", files, source, 200)
    assert asked == [3]


def test_a_damaged_file_divides_and_is_told_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + b"no" * 500 + b"PAR1")
    source = source_of(tmp_path)
    (part,) = divide_source("web", list_files(source), source, 100)
    with pytest.raises(UserError, match=r"a\.parquet: not readable as Parquet"):
        list(read_part(part, source))
