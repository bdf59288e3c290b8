"""Files behind URLs: listed, read in ranges, kept in a cache, and errors that say what to do."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.data.read import BadRow, Document, divide_source, list_files, read_part
from bessemer.data.read import remote as blocks
from bessemer.data.read.remote import RemoteFile
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

fsspec = pytest.importorskip("fsspec")


def source_of(*paths: str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=list(paths), **fields)


def read(source: SourceSpec, part_bytes: int = 1 << 26, cache: Path | None = None) -> list[Document | BadRow]:
    parts = divide_source("web", list_files(source), source, part_bytes, cache)
    return [row for part in parts for row in read_part(part, source, cache)]


def lines(count: int, start: int = 0) -> bytes:
    return b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(start, start + count))


def parquet_bytes(groups: int, rows: int, width: int) -> bytes:
    """Text that does not pack, so that row groups have their size."""
    import random

    random.seed(1)
    texts = [random.randbytes(width // 2).hex() for _ in range(groups * rows)]
    packed = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), packed, row_group_size=rows, compression="none", use_dictionary=False)
    return packed.getvalue()


# A file system in memory


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    fs.store.clear()


def test_remote_files_folders_and_globs(memory: Any) -> None:
    memory.pipe({"/web/b.jsonl": lines(3), "/web/a.jsonl": lines(2, 10), "/web/deep/c.jsonl.gz": b""})
    memory.pipe({"/web/.hidden/x.jsonl": b"", "/web/README.md": b"hello"})
    one = list_files(source_of("memory://web/a.jsonl"))
    assert [(entry.path, entry.size_bytes, entry.format) for entry in one] == [
        ("memory://web/a.jsonl", len(lines(2, 10)), "jsonl")
    ]
    assert one[0].mtime_ns > 1e18
    folder = [entry.path for entry in list_files(source_of("memory://web"))]
    assert folder == ["memory://web/a.jsonl", "memory://web/b.jsonl", "memory://web/deep/c.jsonl.gz"]
    assert [entry.path for entry in list_files(source_of("memory://web/*.jsonl", "memory://web/a.jsonl"))] == folder[:2]
    assert [entry.path for entry in list_files(source_of("memory://web/**/*.gz"))] == folder[2:]
    assert [row.file for row in read(source_of("memory://web/a.jsonl"))] == ["memory://web/a.jsonl"] * 2


def test_a_missing_remote_path_names_what_exists(memory: Any) -> None:
    memory.pipe({"/web/a.jsonl": b""})
    with pytest.raises(UserError, match=r"no such file or folder: memory://web/b.jsonl; memory://web holds a.jsonl"):
        list_files(source_of("memory://web/b.jsonl"))
    with pytest.raises(UserError, match=r"nothing matches memory://web/\*.csv; memory://web holds a.jsonl"):
        list_files(source_of("memory://web/*.csv"))


def test_remote_source_trees_and_datasets(memory: Any, tmp_path: Path) -> None:
    memory.pipe({"/code/a.py": b"x = 1", "/code/b.c": b"\0binary", "/code/c.py": b"#" * 1_000_001})
    assert [entry.path for entry in list_files(source_of("memory://code"))] == ["memory://code/a.py"]
    table = pa.table({"text": ["a", "b"]})
    packed = io.BytesIO()
    with pa.ipc.new_stream(packed, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-0.arrow"}]}
    memory.pipe(
        {
            "/hf/data-0.arrow": packed.getvalue(),
            "/hf/cache-1.arrow": b"x" * 9999,
            "/hf/state.json": json.dumps(state).encode(),
        }
    )
    assert [row.text for row in read(source_of("memory://hf"))] == ["a", "b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 26])
def test_remote_parts_are_those_of_the_same_local_files(
    memory: Any, tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 700)
    contents = {"a.jsonl": lines(50), "b.jsonl": lines(80, 100)}
    for name, content in contents.items():
        memory.pipe(f"/web/{name}", content)
        (tmp_path / name).write_bytes(content)
    there = read(source_of("memory://web"), part_bytes)
    here = read(source_of(str(tmp_path)), part_bytes)
    assert [(row.text, row.row) for row in there] == [(row.text, row.row) for row in here]  # type: ignore[union-attr]
    sizes = [
        [part.size_bytes for part in divide_source("web", list_files(source), source, part_bytes)]
        for source in (source_of("memory://web"), source_of(str(tmp_path)))
    ]
    assert sizes[0] == sizes[1]


def test_a_remote_file_reads_like_a_file(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10)
    data = bytes(range(256)) * 3
    memory.pipe("/a.txt", data)
    (entry,) = list_files(source_of("memory://a.txt"))
    file, plain = RemoteFile(entry, {}), io.BytesIO(data)
    for offset, whence, size in [(5, 0, 17), (-30, 2, 40), (0, 0, 1), (3, 1, 9), (700, 0, 500), (900, 0, 5)]:
        assert file.seek(offset, whence) == plain.seek(offset, whence)
        while size:
            assert file.tell() == plain.tell()
            some = file.read(size)
            assert some == plain.read(len(some)) and (some or not plain.read(1))
            size = size - len(some) if some else 0
    assert io.BufferedReader(RemoteFile(entry, {}), 8).read() == data


def test_what_was_fetched_once_is_kept(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    memory.pipe("/a.jsonl", lines(200))
    source = source_of("memory://a.jsonl")
    first = read(source, 500, tmp_path)
    assert len(first) == 200
    files = list_files(source)
    parts = divide_source("web", files, source, 500, tmp_path)
    memory.store.clear()  # nothing can come from there any more
    assert [row for part in parts for row in read_part(part, source, tmp_path)] == first
    with pytest.raises(UserError, match=r"memory://a\.jsonl: cannot be read \(no such file\)"):
        list(read_part(parts[0], source))
    damaged = sorted(path for path in tmp_path.rglob("*") if path.is_file())[0]
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    with pytest.raises(UserError, match="no such file"):  # a damaged block is not used
        [row for part in parts for row in read_part(part, source, tmp_path)]


def test_a_new_version_is_not_read_from_the_cache(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/a.jsonl", lines(2))
    assert len(read(source_of("memory://a.jsonl"), cache=tmp_path)) == 2
    memory.pipe("/a.jsonl", lines(2, 5))
    assert [row.text for row in read(source_of("memory://a.jsonl"), cache=tmp_path)] == ["row 5", "row 6"]  # type: ignore[union-attr]


def test_a_full_disk_only_ends_the_keeping(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/a.jsonl", lines(20))

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert len(read(source_of("memory://a.jsonl"), cache=tmp_path)) == 20


def test_a_connection_that_fails_is_tried_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/a.jsonl", lines(3))
    monkeypatch.setattr(blocks, "_PAUSE_S", 0)
    opened = memory.open
    failures = [ConnectionResetError("reset"), TimeoutError(), RuntimeError("at https://h/a?sig=SECRET")]

    def flaky(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return opened(*args, **kwargs)

    monkeypatch.setattr(type(memory), "open", lambda self, *args, **kwargs: flaky(*args, **kwargs))
    assert len(read(source_of("memory://a.jsonl"))) == 3
    failures[:] = [RuntimeError("at https://h/a?sig=SECRET")] * 4
    with pytest.raises(UserError, match=r"RuntimeError: at https://h/a\)") as caught:
        read(source_of("memory://a.jsonl"))
    assert "SECRET" not in str(caught.value)


def test_protocols_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"nope://a: .*correct the URL"):
        list_files(source_of("nope://a"))
    with pytest.raises(UserError, match="chained URLs are not supported"):
        list_files(source_of("simplecache::https://h/a.txt"))
    with pytest.raises(UserError, match=r"gs://b/a\.txt: .*pip install gcsfs"):
        list_files(source_of("gs://b/a.txt"))


# A web server


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a mapping; with or without ranges, sizes and versions."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server: Any = self.server
        path = self.path.partition("?")[0]
        content = server.files.get(path)
        if content is None:
            self.send_error(404)
            return
        if server.token and f"sig={server.token}" not in self.path:
            self.send_error(403)
            return
        asked = self.headers.get("Range") if server.ranges else None
        if asked and body:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            content = content[start:stop]
        else:
            self.send_response(200)
        if server.sizes:
            self.send_header("Content-Length", str(len(content)))
        if server.tags:
            self.send_header("ETag", f'"{hash(server.files[path])}"')
        self.end_headers()
        if body:
            server.sent_bytes += len(content)
            try:
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                return

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture
def web() -> Iterator[Any]:
    pytest.importorskip("aiohttp")
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.sent_bytes, server.token = {}, 0, ""
    server.ranges = server.sizes = server.tags = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("ranges", "sizes"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("cached", [False, True])
def test_files_of_a_web_server(web: Any, tmp_path: Path, ranges: bool, sizes: bool, cached: bool) -> None:
    web.ranges, web.sizes = ranges, sizes
    web.files = {"/a.jsonl": lines(300), "/b.parquet": parquet_bytes(3, 5, 100)}
    cache = tmp_path if cached else None
    source = source_of(f"{web.url}/a.jsonl", f"{web.url}/b.parquet")
    first = read(source, 3000 if sizes else 1 << 26, cache)
    assert [row.row for row in first] == [*range(1, 301), *range(1, 16)]
    assert {row.file for row in first} == {f"{web.url}/a.jsonl", f"{web.url}/b.parquet"}
    sent = web.sent_bytes
    assert read(source, 3000 if sizes else 1 << 26, cache) == first
    if sizes:  # without them, the listing itself asks for the files
        assert (web.sent_bytes == sent) == cached


@pytest.mark.parametrize("ranges", [False, True])
def test_copies_that_were_changed_or_exchanged_are_fetched_again(
    web: Any, tmp_path: Path, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1000)
    web.ranges, web.files = ranges, {"/a.jsonl": lines(300)}
    source = source_of(f"{web.url}/a.jsonl")
    first = read(source, 1 << 26, tmp_path)
    copies = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".sum")
    if ranges:
        first_block, second_block = (path.read_bytes() for path in copies[:2])
        copies[0].write_bytes(second_block)
        copies[1].write_bytes(first_block)
    else:
        copies[0].write_bytes(copies[0].read_bytes().replace(b"e", b"f", 1))
    assert read(source, 1 << 26, tmp_path) == first


def test_a_range_of_a_remote_table_costs_no_more(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 << 10)
    content = parquet_bytes(8, 100, 5000)
    web.files = {"/a.parquet": content}
    source = source_of(f"{web.url}/a.parquet")
    parts = divide_source("web", list_files(source), source, len(content) // 8 + 1000)
    assert len(parts) == 8
    assert web.sent_bytes < 200_000  # the footer alone
    sent = web.sent_bytes
    assert len(list(read_part(parts[5], source))) == 100
    assert web.sent_bytes - sent < 2 * len(content) / 8


def test_an_address_with_a_query_and_a_signature(web: Any) -> None:
    web.files, web.token = {"/a.jsonl": lines(2)}, "S3CRET"
    url = f"{web.url}/a.jsonl?part=1&sig=S3CRET"
    source = source_of(url)
    found = read(source)
    assert [row.file for row in found] == [f"{web.url}/a.jsonl?part=1"] * 2
    (entry,) = list_files(source)
    assert entry.path == url and "S3CRET" not in entry.name
    (part,) = divide_source("web", [entry], source)
    assert "S3CRET" not in part.name
    web.token = "OTHER"
    with pytest.raises(UserError) as caught:
        list(read_part(part, source))
    assert "a.jsonl?part=1: cannot be read" in str(caught.value) and "S3CRET" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        list_files(source)
    assert "S3CRET" not in str(caught.value)


def test_a_missing_web_page_is_named(web: Any) -> None:
    with pytest.raises(UserError, match=r"no such file or folder: http://127\.0\.0\.1:\d+/none\.jsonl"):
        list_files(source_of(f"{web.url}/none.jsonl"))


def test_a_server_that_is_down_is_named(web: Any) -> None:
    url = f"{web.url}/a.jsonl"
    web.shutdown()
    web.server_close()
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be listed \(.*onnect"):
        list_files(source_of(url))
