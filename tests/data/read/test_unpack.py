"""Compressed files: found by their first bytes, streamed, and never taken for whole when they are cut off."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.read import divide_source, list_files, read_part
from bessemer.data.read.compression import decompress, detect_compression
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
ROWS = b"".join(json.dumps({"text": f"number {i}"}).encode() + b"\n" for i in range(1000))


def read(path: Path, **fields: Any) -> list[str]:
    source = SourceSpec(path=[str(path)], **fields)
    parts = divide_source("web", list_files(source), source)
    return [row.text for part in parts for row in read_part(part, source)]  # type: ignore[union-attr]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("named", [True, False])
def test_every_compression_is_found_by_name_or_content(tmp_path: Path, kind: str, named: bool) -> None:
    name = f"a.jsonl.{kind}" if named else "a.jsonl"
    assert len(read(write(tmp_path / name, PACKERS[kind](ROWS)))) == 1000


def test_a_name_may_lie(tmp_path: Path) -> None:
    assert len(read(write(tmp_path / "a.jsonl.gz", ROWS))) == 1000
    assert len(read(write(tmp_path / "a.jsonl.gz", zstandard.compress(ROWS)))) == 1000


@pytest.mark.parametrize("kind", PACKERS)
def test_streams_one_behind_the_other(tmp_path: Path, kind: str) -> None:
    packed = b"".join(PACKERS[kind](part) for part in (ROWS[:700], b"", ROWS[700:]))
    assert len(read(write(tmp_path / f"a.jsonl.{kind}", packed))) == 1000


def test_frames_that_parallel_compressors_write(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    assert len(read(write(tmp_path / "a.jsonl.zst", skippable + zstandard.compress(ROWS)))) == 1000


def test_a_long_window_is_allowed(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(ROWS) + packer.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << 28
    assert len(read(write(tmp_path / "a.jsonl.zst", packed))) == 1000


@pytest.mark.parametrize("kind", PACKERS)
def test_a_stream_that_is_cut_off_is_an_error(tmp_path: Path, kind: str) -> None:
    packed = PACKERS[kind](ROWS)
    for size in (11, len(packed) // 2, len(packed) - 1):
        path = write(tmp_path / f"a.jsonl.{kind}", packed[:size])
        with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}: cannot be read .*; its part was not used"):
            read(path)


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tar", "a.tfrecord", "a.mds", "a.html"])
def test_a_cut_is_an_error_in_every_format(tmp_path: Path, kind: str, name: str) -> None:
    packed = PACKERS[kind](b"text\n" + ROWS)
    with pytest.raises(UserError, match=rf"{name}\.{kind}: "):
        read(write(tmp_path / f"{name}.{kind}", packed[: len(packed) // 2]))


@pytest.mark.parametrize("kind", PACKERS)
def test_damaged_content_is_an_error(tmp_path: Path, kind: str) -> None:
    packed = bytearray(PACKERS[kind](ROWS))
    if kind == "zst":
        packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(ROWS))
    packed[len(packed) // 2] ^= 255
    with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}: "):
        read(write(tmp_path / f"a.jsonl.{kind}", bytes(packed)))


@given(st.binary(max_size=3000), st.sampled_from(list(PACKERS)), st.integers(1, 5000))
def test_any_content_comes_back(data: bytes, kind: str, size: int) -> None:
    packed = io.BytesIO(PACKERS[kind](data))
    assert detect_compression(packed) == kind
    stream = decompress(packed, kind)
    parts = iter(lambda: stream.read(size), b"")
    assert b"".join(parts) == data


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ("xz", "bz2") else ()) for kind in PACKERS]
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    """Sixty megabytes of rows, packed to a few kilobytes; xz itself takes 9 MB to unpack."""
    row = json.dumps({"text": "x" * 20_000}).encode() + b"\n"
    path = write(tmp_path / f"a.jsonl.{kind}", PACKERS[kind](row * 3000))
    source = SourceSpec(path=[str(path)])
    (part,) = divide_source("web", list_files(source), source)
    tracemalloc.start()
    assert sum(1 for _ in read_part(part, source)) == 3000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16_000_000
