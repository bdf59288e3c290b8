"""What a source names is found: files, folders, globs, and the files that a saved dataset's own index names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.data.read import FileEntry, list_files
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


def source_of(*paths: Path | str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=[str(path) for path in paths], **fields)


def names(source: SourceSpec, root: Path) -> list[str]:
    return [Path(entry.path).relative_to(root).as_posix() for entry in list_files(source)]


def write(path: Path, content: str | bytes = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_source_tree_leaves_out_what_is_not_source(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.rs", "README.md", ".hidden.py", ".git/x.py", "a/__pycache__/x.py", "node_modules/x.js"]:
        write(tmp_path / name)
    write(tmp_path / "binary.c", b"int\0x")
    write(tmp_path / "generated.py", "x = 1\n" * 200_000)
    write(tmp_path / "logo.png", b"\x89PNG")
    source = source_of(tmp_path, format="source")
    assert names(source, tmp_path) == ["README.md", "a/z.rs", "b.py"]
    assert names(source_of(tmp_path), tmp_path) == names(source, tmp_path)


def test_a_file_named_by_hand_is_always_taken(tmp_path: Path) -> None:
    big = write(tmp_path / "generated.py", "x = 1\n" * 200_000)
    odd = write(tmp_path / ".hidden" / "notes.log", b"int\0x")
    assert len(list_files(source_of(big, odd, format="source"))) == 2


def test_long_texts_in_a_folder_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "book.txt", "word " * 300_000)
    assert names(source_of(tmp_path), tmp_path) == ["book.txt"]


def test_include_chooses_inside_a_folder(tmp_path: Path) -> None:
    for name in ["a.py", "b.txt", "lib/c.py", "lib/deep/d.py", "e.log"]:
        write(tmp_path / name)
    assert names(source_of(tmp_path, include=["*.py"]), tmp_path) == ["a.py", "lib/c.py", "lib/deep/d.py"]
    assert names(source_of(tmp_path, include=["lib/**/*.py"]), tmp_path) == ["lib/c.py", "lib/deep/d.py"]
    assert names(source_of(tmp_path, include=["**/*.log"]), tmp_path) == ["e.log"]


def test_exclude_leaves_out_inside_a_folder(tmp_path: Path) -> None:
    for name in ["a.py", "test_a.py", "tests/b.py", "lib/c.py", "lib/tests/d.py"]:
        write(tmp_path / name)
    assert names(source_of(tmp_path, exclude=["tests/*", "test_*"]), tmp_path) == ["a.py", "lib/c.py", "lib/tests/d.py"]
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", "text"),
        ("a.py", "source"),
        ("a.JSONL.gz", "jsonl"),
        ("a.tsv", "csv"),
        ("a.csv.zst", "csv"),
        ("a.parquet", "parquet"),
        ("a.feather", "arrow"),
        ("a.tar", "webdataset"),
        ("a.tar.gz", "webdataset"),
        ("shard.00000.mds.zstd", "mds"),
        ("a.tfrecord", "tfrecord"),
        ("CC-MAIN-2024.warc.gz", "warc"),
        ("CC-MAIN-2024.warc.wet.gz", "warc"),
        ("page.html", "html"),
    ],
)
def test_the_name_of_a_file_tells_its_format(tmp_path: Path, name: str, kind: str) -> None:
    (entry,) = list_files(source_of(write(tmp_path / name)))
    assert entry.format == kind
    assert entry == FileEntry(str(tmp_path / name), 4, entry.format, (tmp_path / name).stat().st_mtime_ns)


def test_a_name_that_tells_nothing_needs_a_format(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", "[]")
    with pytest.raises(UserError, match="set format to text, source, jsonl"):
        list_files(source_of(path))
    assert list_files(source_of(path, format="jsonl"))[0].format == "jsonl"


def test_a_folder_of_json_files_can_be_read_as_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "c4" / "part-0.json.gz")
    assert names(source_of(tmp_path / "c4", format="jsonl"), tmp_path) == ["c4/part-0.json.gz"]
    write(tmp_path / "own" / "rows.jsonl")
    write(tmp_path / "own" / "config.json")
    assert names(source_of(tmp_path / "own", format="jsonl"), tmp_path) == ["own/rows.jsonl"]


def test_code_with_fixtures_of_two_kinds_is_still_code(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "x = 1\n" * 100)
    write(tmp_path / "rows.jsonl")
    write(tmp_path / "rows.csv")
    assert names(source_of(tmp_path), tmp_path) == ["a.py"]


def test_a_folder_of_pages_is_read_as_pages(tmp_path: Path) -> None:
    write(tmp_path / "a.html", "<p>page</p>" * 9)
    write(tmp_path / "b.htm", "<p>page</p>" * 9)
    write(tmp_path / "notes.txt")
    assert [entry.format for entry in list_files(source_of(tmp_path))] == ["html", "html"]


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt")
    write(tmp_path / "sealed" / "b.txt")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("sealed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="sealed: cannot be listed"):
        list_files(source_of(tmp_path))


def saved(folder: Path, *files: str, **more: Any) -> None:
    """A dataset as `save_to_disk` lays it out; what the files hold does not matter here."""
    for file in files:
        write(folder / file)
    write(folder / "cache-1a2b.arrow", "left over from a map, and the largest file of all")
    write(folder / "state.json", json.dumps({"_data_files": [{"filename": file} for file in files], **more}))
    write(folder / "dataset_info.json", "{}")


def test_of_a_saved_dataset_the_files_in_its_state_are_read(tmp_path: Path) -> None:
    saved(tmp_path, "data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    for source in (source_of(tmp_path), source_of(tmp_path, format="hf")):
        assert names(source, tmp_path) == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        assert {entry.format for entry in list_files(source)} == {"hf"}
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"state\.json names data-00001-of-00002\.arrow, not there"):
        list_files(source_of(tmp_path))


def test_of_several_splits_train_is_read_unless_others_are_asked_for(tmp_path: Path) -> None:
    for split in ("test", "train"):
        saved(tmp_path / split, "data-00000-of-00001.arrow")
    write(tmp_path / "dataset_dict.json", '{"splits": ["train", "test"]}')
    assert names(source_of(tmp_path), tmp_path) == ["train/data-00000-of-00001.arrow"]
    assert names(source_of(tmp_path, include=["test/*"]), tmp_path) == ["test/data-00000-of-00001.arrow"]
    assert len(list_files(source_of(tmp_path, include=["*.arrow"]))) == 2
    assert names(source_of(tmp_path, include=["*.arrow"], exclude=["train/*"]), tmp_path) == [
        "test/data-00000-of-00001.arrow"
    ]
    write(tmp_path / "dataset_dict.json", '{"splits": ["test"]}')
    assert len(list_files(source_of(tmp_path, format="hf"))) == 2


def test_splits_that_are_left_out_or_mixed_are_named(tmp_path: Path) -> None:
    for split in ("test", "train"):
        saved(tmp_path / "hf" / split, "data-00000-of-00001.arrow")
        write(tmp_path / "files" / "data" / f"{split}-00000.jsonl", lines({"text": "a"}))
    write(tmp_path / "hf" / "dataset_dict.json", '{"splits": ["train", "test"]}')

    def said(folder: str, **fields: Any) -> list[str]:
        found: list[str] = []
        list_files(source_of(tmp_path / folder, **fields), found.append)
        return found

    [line] = said("hf")
    assert "only its split train is read, not test; `include: ['test/*']` reads another" in line
    [line] = said("files")
    assert "files of several splits are read (test, train)" in line
    assert said("hf", include=["test/*"]) == said("files", exclude=["test*"]) == []
    write(tmp_path / "hf" / "dataset_dict.json", '{"splits": ["a", "b"]}')
    assert "without a split train: all its splits are read (a, b)" in said("hf")[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "a named pipe, which cannot be read twice"),
        (lambda path: path.symlink_to("/dev/zero"), r"a link to a device \(/dev/zero\)"),
        (lambda path: path.symlink_to(path.name), "a symbolic link that leads back to itself"),
        (lambda path: path.symlink_to("gone"), "a symbolic link to gone, which cannot be reached"),
    ],
)
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=rf"a\.jsonl: {words}"):
        list_files(source_of(tmp_path / "a.jsonl"))
    write(tmp_path / "b.jsonl")
    assert names(source_of(tmp_path), tmp_path) == ["b.jsonl"]  # a walk of a folder passes them over


def test_a_link_to_a_folder_above_gives_no_file_twice(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    (tmp_path / "other").symlink_to(tmp_path / "in")
    assert names(source_of(tmp_path / "in" / "**" / "*.jsonl"), tmp_path) == ["in/a.jsonl"]
    assert names(source_of(tmp_path / "other" / "**" / "*.jsonl"), tmp_path) == ["other/a.jsonl"]


def test_a_dataset_with_an_index_over_its_rows_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "data.arrow", _indices_files=[{"filename": "indices.arrow"}])
    with pytest.raises(UserError, match="flatten_indices"):
        list_files(source_of(tmp_path))


def test_of_mds_the_shards_in_its_index_are_read(tmp_path: Path) -> None:
    shards = [
        {"raw_data": {"basename": "shard.00000.mds"}, "zip_data": {"basename": "shard.00000.mds.zstd"}},
        {"raw_data": {"basename": "shard.00001.mds"}, "zip_data": {"basename": "shard.00001.mds.zstd"}},
    ]
    write(tmp_path / "train" / "index.json", json.dumps({"version": 2, "shards": shards}))
    for name in ("shard.00000.mds", "shard.00000.mds.zstd", "shard.00001.mds.zstd", "shard.00002.mds"):
        write(tmp_path / "train" / name)
    assert names(source_of(tmp_path), tmp_path) == ["train/shard.00000.mds", "train/shard.00001.mds.zstd"]
    (tmp_path / "train" / "shard.00001.mds.zstd").unlink()
    with pytest.raises(UserError, match=r"index\.json names train/shard\.00001\.mds, not there"):
        list_files(source_of(tmp_path))


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    assert list_files(source_of(f"file://{path}")) == list_files(source_of(path))


def test_a_name_that_is_no_text_can_be_shown(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write("text")
    (entry,) = list_files(source_of(tmp_path))
    assert entry.name == f"{tmp_path}/caf\\xe9.txt"
    assert os.path.getsize(entry.path) == 4
