"""WebDataset, MDS and TFRecord against writers of their own, byte by byte, and against the real libraries if there."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import struct
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.read import BadRow, Document, divide_source, list_files, read_part, rows
from bessemer.data.read.records import parse_example
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


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


TEXTS = [f"text {i} ünï 😀\nline" for i in range(20)]


# WebDataset


def tar_of(members: Mapping[str, bytes] | list[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=kind) as archive:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def samples() -> dict[str, bytes]:
    members = {}
    for number, text in enumerate(TEXTS):
        members[f"set.1/{number:04d}.jpg"] = b"\xff\xd8" * 700
        members[f"set.1/{number:04d}.txt"] = text.encode()
        members[f"set.1/{number:04d}.json"] = json.dumps({"id": number, "body": text + "!"}).encode()
    return members


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_text_from_a_member_or_from_the_json_beside_it(tmp_path: Path, kind: int) -> None:
    path = write(tmp_path / "a.tar", tar_of(samples(), kind))
    for field in ("txt", "text"):  # the default name finds .txt, too
        assert read(source_of(path, text_field=field)) == [
            Document(text, str(path), row, f"set.1/{row - 1:04d}") for row, text in enumerate(TEXTS, start=1)
        ]
    found = read(source_of(path, text_field="body", id_field="id"))
    assert found == [Document(text + "!", str(path), i + 1, str(i)) for i, text in enumerate(TEXTS)]


def test_long_names_and_a_packed_archive(tmp_path: Path) -> None:
    long = "deep/" * 60 + "ü" * 120
    path = write(tmp_path / "a.tar.gz", gzip.compress(tar_of({f"{long}.txt": b"a"}, tarfile.PAX_FORMAT)))
    assert read(source_of(path)) == [Document("a", str(path), 1, long)]


def test_archives_put_one_behind_the_other_are_all_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", tar_of({"a.txt": b"a"}) + tar_of({"b.txt": b"b"}))
    assert texts(source_of(path)) == ["a", "b"]


def test_a_sample_that_cannot_be_used_is_set_aside(tmp_path: Path) -> None:
    members = [
        ("a.txt", b"caf\xe9"),
        ("b.json", b"{cut"),
        ("c.json", b"[1]"),
        ("d.jpg", b"x"),
        ("e.txt", b"one"),
        ("e.txt", b"two"),
        ("README", b"no extension"),
        ("f.txt", b" "),
        ("g.TXT", b"seven"),
    ]
    path = write(tmp_path / "a.tar", tar_of(members))
    tally: Counter[str] = Counter()
    found = read(source_of(path), tally)
    reasons = {row.row: row.reason for row in found if isinstance(row, BadRow)}
    assert list(reasons) == [1, 2, 3, 4, 5]
    assert "'text' is not valid UTF-8" in reasons[1]
    assert "b.json is not valid JSON" in reasons[2]
    assert "c.json holds a list" in reasons[3]
    assert "no field 'text'; it has 'jpg'" in reasons[4]
    assert "two members e.txt" in reasons[5]
    assert found[-1] == Document("seven", str(path), 7, "g")
    assert tally == {"empty": 1}


def test_a_member_that_is_too_long_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", 5)
    path = write(tmp_path / "a.tar", tar_of({"a.txt": b"sixsix", "b.txt": b"fives"}))
    bad, good = read(source_of(path))
    assert isinstance(bad, BadRow) and "a.txt has 6 bytes" in bad.reason
    assert isinstance(good, Document) and good.row == 2


def test_a_tar_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = tar_of({"a.txt": b"a" * 600, "b.txt": b"b"})
    content = 512 + 1024 + 512 + 512  # what comes before the blocks of zeros
    for size in (0, 100, 512, 700, 1536, 1600, 2048, 2100, content):
        path = write(tmp_path / "a.tar", whole[:size])
        with pytest.raises(UserError, match=r"a\.tar: "):
            read(source_of(path))
    write(path, whole[: content + 512])
    assert len(read(source_of(path))) == 2  # one block of zeros is enough


def test_a_damaged_header_does_not_end_the_archive_in_silence(tmp_path: Path) -> None:
    whole = bytearray(tar_of({"a.txt": b"a", "b.txt": b"b"}))
    whole[1024 + 150] ^= 1  # in the checksum of the second header
    with pytest.raises(UserError, match=r"a\.tar: not readable as a tar archive"):
        read(source_of(write(tmp_path / "a.tar", bytes(whole))))


def test_an_archive_of_the_library_itself(tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset")
    with library.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number, text in enumerate(TEXTS):
            writer.write({"__key__": f"{number:06d}", "txt": text, "json": {"n": number}, "cls": number})
    assert texts(source_of(tmp_path / "a.tar")) == TEXTS


# TFRecord

_REVERSED = 0x82F63B78


def crc32c(data: bytes) -> int:
    """Bit by bit, as the definition has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_REVERSED if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checksum = masked(data) if len(data) < 1000 else 0  # slow here, and not looked at
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", checksum)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = b""
    while value > 127:
        encoded += bytes([value & 127 | 128])
        value >>= 7
    return encoded + bytes([value])


def message(*fields: tuple[int, bytes]) -> bytes:
    return b"".join(varint(number << 3 | 2) + varint(len(data)) + data for number, data in fields)


def example(features: Mapping[str, Any], packed: bool = True) -> bytes:
    entries = []
    for name, values in features.items():
        if isinstance(values, bytes) or (values and isinstance(values[0], bytes)):
            several = [values] if isinstance(values, bytes) else values
            feature = message((1, message(*((1, value) for value in several))))
        elif values and isinstance(values[0], float):
            raw = [struct.pack("<f", value) for value in values]
            body = message((1, b"".join(raw))) if packed else b"".join(varint(1 << 3 | 5) + one for one in raw)
            feature = message((2, body))
        else:
            raw = [varint(value) for value in values]
            body = message((1, b"".join(raw))) if packed else b"".join(varint(1 << 3) + one for one in raw)
            feature = message((3, body))
        entries.append((1, message((1, name.encode()), (2, feature))))
    return message((1, message(*entries)))


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the catalogue of CRCs


@pytest.mark.parametrize("packed", [False, True])
def test_tfrecords_are_examples(tmp_path: Path, packed: bool) -> None:
    records = [
        example({"text": text.encode(), "id": [number - 3], "score": [0.5, 1.5]}, packed)
        for number, text in enumerate(TEXTS)
    ]
    content = b"".join(map(frame, records))
    for name, data in (("a.tfrecord", content), ("a.tfrecord.gz", gzip.compress(content))):
        path = write(tmp_path / name, data)
        assert read(source_of(path, id_field="id")) == [
            Document(text, str(path), number + 1, str(number - 3)) for number, text in enumerate(TEXTS)
        ]


def test_a_record_that_cannot_be_used_is_set_aside(tmp_path: Path) -> None:
    records = [
        example({"text": b"one"}),
        b"plain text is no message",
        example({"text": b"caf\xe9"}),
        example({"body": b"x"}),
        example({"text": [b"a", b"b"]}),
        example({"text": [1]}),
        example({"text": []}),
        example({"text": b"eight"}),
    ]
    path = write(tmp_path / "a.tfrecord", b"".join(map(frame, records)))
    tally: Counter[str] = Counter()
    found = read(source_of(path), tally)
    reasons = {row.row: row.reason for row in found if isinstance(row, BadRow)}
    assert list(reasons) == [2, 3, 4, 5, 6]
    assert "not a tf.train.Example" in reasons[2]
    assert "not valid UTF-8" in reasons[3]
    assert "no field 'text'; it has 'body'" in reasons[4]
    assert "holds a list" in reasons[5] and "holds a int" in reasons[6]
    assert found[-1] == Document("eight", str(path), 8)
    assert tally == {"empty": 1}


def test_a_tfrecord_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = frame(example({"text": b"one"})) + frame(example({"text": b"two"}))
    half = len(whole) // 2
    for size in set(range(1, len(whole))) - {half}:
        path = write(tmp_path / "a.tfrecord", whole[:size])
        with pytest.raises(UserError, match=r"a\.tfrecord: cannot be read \(the file ends inside record"):
            read(source_of(path))
    assert read(source_of(write(path, b""))) == []


def test_a_length_that_was_damaged_is_an_error(tmp_path: Path) -> None:
    whole = bytearray(frame(example({"text": b"one"})) * 2)
    whole[len(whole) // 2] ^= 4
    with pytest.raises(UserError, match=r"the checksum of record 2's length is wrong"):
        read(source_of(write(tmp_path / "a.tfrecord", bytes(whole))))


def test_a_record_that_looks_like_gzip_is_none(tmp_path: Path) -> None:
    text = b"x" * (0x088B1F - 100)
    data = example({"text": text})
    text += b"x" * (0x088B1F - len(data))
    data = example({"text": text})
    assert frame(data)[:3] == gzip.compress(b"")[:3]
    assert texts(source_of(write(tmp_path / "a.tfrecord", frame(data)))) == [text.decode()]


def test_a_record_that_is_too_long_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = example({"text": b"x" * 2_000_000}), example({"text": b"y"})
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", len(short))
    path = write(tmp_path / "a.tfrecord", frame(long) + frame(short))
    bad, good = read(source_of(path))
    assert isinstance(bad, BadRow) and f"{len(long):,} bytes" in bad.reason
    assert isinstance(good, Document) and good.row == 2


@given(st.binary(max_size=60))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_example(data), dict)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.lists(st.binary(max_size=9), min_size=1, max_size=3)
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3)
        | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_any_example_is_parsed(features: dict[str, list[Any]], packed: bool) -> None:
    parsed = parse_example(example(features, packed))
    assert parsed == {name: values if len(values) > 1 else values[0] for name, values in features.items()}


def test_a_file_of_the_library_itself(tmp_path: Path) -> None:
    library = pytest.importorskip("tfrecord")
    writer = library.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    for number, text in enumerate(TEXTS):
        writer.write({"text": (text.encode(), "byte"), "id": (-number, "int"), "f": ([0.5], "float")})
    writer.close()
    found = read(source_of(tmp_path / "a.tfrecord", id_field="id"))
    assert [(row.text, row.id) for row in found if isinstance(row, Document)] == [
        (text, str(-number)) for number, text in enumerate(TEXTS)
    ]


# MDS

COLUMNS = {"id": ("int", 8), "text": ("str", None), "n": ("uint16", 2), "meta": ("json", None), "x": ("bytes", None)}


def shard_of(rows: list[dict[str, bytes]], columns: Mapping[str, tuple[str, int | None]] = COLUMNS) -> bytes:
    about = {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "format": "mds",
        "version": 2,
    }
    header = json.dumps(about).encode()
    packed = []
    for row in rows:
        sizes = b"".join(struct.pack("<I", len(row[name])) for name, (_, size) in columns.items() if not size)
        packed.append(sizes + b"".join(row[name] for name in columns))
    offsets = [4 + 4 * (len(rows) + 1) + len(header)]
    for sample in packed:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<I{len(offsets)}I", len(rows), *offsets) + header + b"".join(packed)


def mds_row(number: int, text: bytes) -> dict[str, bytes]:
    meta = json.dumps({"u": f"https://a.example/{number}"}).encode()
    return {
        "id": struct.pack("<q", -number),
        "text": text,
        "n": struct.pack("<H", number),
        "meta": meta,
        "x": b"\0" * number,
    }


def test_mds_shards_are_read(tmp_path: Path) -> None:
    import zstandard

    shard = shard_of([mds_row(number, text.encode()) for number, text in enumerate(TEXTS)])
    for name, data in (("a.mds", shard), ("a.mds.zstd", zstandard.compress(shard)), ("a.mds.gz", gzip.compress(shard))):
        path = write(tmp_path / name, data)
        assert read(source_of(path, id_field="id", url_field="n")) == [
            Document(text, str(path), number + 1, str(-number), str(number)) for number, text in enumerate(TEXTS)
        ]


def test_an_mds_folder_is_read_through_its_index(tmp_path: Path) -> None:
    infos = []
    for number in range(3):
        name = f"shard.{number:05d}.mds"
        write(tmp_path / name, shard_of([mds_row(number, f"shard {number}".encode())]))
        infos.append({"raw_data": {"basename": name}, "zip_data": None, "format": "mds", "version": 2})
    write(tmp_path / "index.json", json.dumps({"version": 2, "shards": infos[:2]}).encode())
    assert texts(source_of(tmp_path)) == ["shard 0", "shard 1"]


def test_a_sample_of_mds_that_cannot_be_used_is_set_aside(tmp_path: Path) -> None:
    samples = [b"one", b"caf\xe9", b" ", b"four"]
    path = write(tmp_path / "a.mds", shard_of([mds_row(i, text) for i, text in enumerate(samples)]))
    tally: Counter[str] = Counter()
    one, bad, four = read(source_of(path), tally)
    assert isinstance(bad, BadRow) and bad.row == 2 and "not readable as an MDS sample" in bad.reason
    assert (one.row, four.row) == (1, 4) and tally == {"empty": 1}


def test_a_sample_of_mds_with_a_wrong_size_is_set_aside(tmp_path: Path) -> None:
    shard = bytearray(shard_of([mds_row(1, b"one"), mds_row(2, b"two")]))
    (start,) = struct.unpack_from("<I", shard, 4)
    shard[start : start + 4] = struct.pack("<I", 1000)  # the size of the first sample's text
    bad, good = read(source_of(write(tmp_path / "a.mds", bytes(shard))))
    assert isinstance(bad, BadRow) and "column 'text' ends after the sample" in bad.reason
    assert isinstance(good, Document) and good.text == "two"


def test_mds_columns_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mds", shard_of([{"text": b"x", "p": b"p"}], {"text": ("pkl", None), "p": ("str", None)}))
    with pytest.raises(UserError, match="column 'text' is encoded as pkl"):
        read(source_of(path))
    with pytest.raises(UserError, match="no column 'body'; it has 'text', 'p'"):
        read(source_of(path, text_field="body"))
    assert texts(source_of(path, text_field="p")) == ["p"]
    write(path, shard_of([mds_row(1, b"one")]))
    (bad,) = read(source_of(path, text_field="id"))
    assert isinstance(bad, BadRow) and "'id' holds a int, not text" in bad.reason


def test_an_mds_shard_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = shard_of([mds_row(1, b"one"), mds_row(2, b"two")])
    for size in range(len(whole)):
        path = write(tmp_path / "a.mds", whole[:size])
        with pytest.raises(UserError, match=r"a\.mds: "):
            read(source_of(path))


def test_a_damaged_mds_header_is_an_error(tmp_path: Path) -> None:
    whole = bytearray(shard_of([mds_row(1, b"one"), mds_row(2, b"two")]))
    for at, flip in ((0, 1), (4, 255), (9, 255), (20, 255)):
        damaged = bytearray(whole)
        damaged[at] ^= flip
        with pytest.raises(UserError, match=r"a\.mds: "):
            read(source_of(write(tmp_path / "a.mds", bytes(damaged))))


def test_a_folder_of_the_streaming_library_itself(tmp_path: Path) -> None:
    try:
        from streaming import MDSWriter
    except Exception:  # it imports much that may be missing
        pytest.skip("mosaicml-streaming is not installed")
    for compression in (None, "zstd:3"):
        folder = tmp_path / str(compression)
        columns = {"text": "str", "id": "int", "meta": "json"}
        with MDSWriter(out=str(folder), columns=columns, compression=compression, size_limit=400) as writer:
            for number, text in enumerate(TEXTS):
                writer.write({"text": text, "id": number, "meta": {"n": number}})
        assert texts(source_of(folder)) == TEXTS
