"""S3, against a server that speaks its protocol: listing, ranges, the cache, and what is told when access fails."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.data.read import divide_source, list_files, read_part
from bessemer.data.read import remote as blocks
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec

pytest.importorskip("s3fs")


@pytest.fixture
def bucket(s3_server: str) -> Iterator[Any]:
    """A client of an empty bucket; the credentials come from the environment, as a user's do."""
    import boto3

    client = boto3.client("s3", endpoint_url=s3_server)
    client.create_bucket(Bucket="corpus")
    yield client
    for item in client.list_objects_v2(Bucket="corpus").get("Contents", []):
        client.delete_object(Bucket="corpus", Key=item["Key"])
    client.delete_bucket(Bucket="corpus")


def source_of(server: str, *paths: str, **fields: Any) -> SourceSpec:
    return SourceSpec(path=list(paths), storage={"endpoint_url": server}, **fields)


def lines(count: int) -> bytes:
    return b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(count))


def test_a_bucket_is_listed_and_read(bucket: Any, s3_server: str) -> None:
    bucket.put_object(Bucket="corpus", Key="web/a.jsonl", Body=lines(40))
    bucket.put_object(Bucket="corpus", Key="web/deep/b.jsonl", Body=lines(3))
    bucket.put_object(Bucket="corpus", Key="web/", Body=b"")  # the console makes such a key for a folder
    bucket.put_object(Bucket="corpus", Key="web/_SUCCESS", Body=b"")
    for path in ("s3://corpus/web", "s3://corpus/web/", "s3://corpus/web/**/*.jsonl", "s3://corpus"):
        entries = list_files(source_of(s3_server, path))
        assert [entry.path for entry in entries] == ["s3://corpus/web/a.jsonl", "s3://corpus/web/deep/b.jsonl"], path
        assert all(entry.version.startswith('"') and entry.mtime_ns > 1e18 for entry in entries)
    source = source_of(s3_server, "s3://corpus/web")
    parts = [pickle.loads(pickle.dumps(part)) for part in divide_source("web", list_files(source), source, 300)]
    assert len(parts) > 2
    found = [row for part in parts for row in read_part(part, source)]
    assert [(row.file, row.row) for row in found] == [
        *(("s3://corpus/web/a.jsonl", row) for row in range(1, 41)),
        *(("s3://corpus/web/deep/b.jsonl", row) for row in range(1, 4)),
    ]


def test_an_upload_of_the_same_content_is_the_same_part(bucket: Any, s3_server: str) -> None:
    source = source_of(s3_server, "s3://corpus/a.jsonl")
    keys = []
    for content in (lines(3), lines(3), lines(4)):
        bucket.put_object(Bucket="corpus", Key="a.jsonl", Body=content)
        (part,) = divide_source("web", list_files(source), source)
        keys.append(part.key)
    assert keys[0] == keys[1] != keys[2]


def test_one_row_group_is_fetched_and_kept(
    bucket: Any, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 64 << 10)
    packed = io.BytesIO()
    texts = [f"{i:06d}" * 400 for i in range(1600)]
    pq.write_table(
        pa.table({"text": texts, "other": texts}), packed, row_group_size=100, compression="none", use_dictionary=False
    )
    size = len(packed.getvalue())
    bucket.put_object(Bucket="corpus", Key="a.parquet", Body=packed.getvalue())
    fetched: list[int] = []
    fetch = blocks.RemoteFile._fetch

    def counted(self: Any, start: int, length: int) -> bytes:
        fetched.append(length)
        return fetch(self, start, length)

    monkeypatch.setattr(blocks.RemoteFile, "_fetch", counted)
    source = source_of(s3_server, "s3://corpus/a.parquet")
    parts = divide_source("web", list_files(source), source, size // 16 + 2000, tmp_path)
    assert len(parts) == 16
    rows = list(read_part(parts[7], source, tmp_path))
    assert [row.row for row in rows] == list(range(701, 801))
    assert sum(fetched) < size / 8  # the footer and the wanted column of a sixteenth
    fetched.clear()
    bucket.delete_object(Bucket="corpus", Key="a.parquet")
    assert list(read_part(parts[7], source, tmp_path)) == rows
    assert not fetched


def test_what_is_not_there_is_named(bucket: Any, s3_server: str) -> None:
    bucket.put_object(Bucket="corpus", Key="web/a.jsonl", Body=b"")
    with pytest.raises(
        UserError, match=r"no such file or folder: s3://corpus/web/b\.jsonl; s3://corpus/web holds a\.jsonl"
    ):
        list_files(source_of(s3_server, "s3://corpus/web/b.jsonl"))
    with pytest.raises(UserError, match=r"nothing matches s3://corpus/web/\*\.csv; s3://corpus/web holds a\.jsonl"):
        list_files(source_of(s3_server, "s3://corpus/web/*.csv"))
    with pytest.raises(UserError, match=r"no such file or folder: s3://no-such-bucket/a\.jsonl"):
        list_files(source_of(s3_server, "s3://no-such-bucket/a.jsonl"))
    with pytest.raises(UserError, match=r"(nothing matches|no such file or folder:) s3://no-such-bucket/\*"):
        list_files(source_of(s3_server, "s3://no-such-bucket/*"))


def test_a_file_that_was_replaced_is_not_read(bucket: Any, s3_server: str) -> None:
    bucket.put_object(Bucket="corpus", Key="a.jsonl", Body=lines(3))
    source = source_of(s3_server, "s3://corpus/a.jsonl")
    (part,) = divide_source("web", list_files(source), source)
    bucket.put_object(Bucket="corpus", Key="a.jsonl", Body=lines(3).replace(b"row", b"new"))
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(it has changed since it was listed"):
        list(read_part(part, source))
    bucket.delete_object(Bucket="corpus", Key="a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read \(no such file\)"):
        list(read_part(part, source))


def test_access_without_credentials_says_where_they_come_from(
    bucket: Any, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    source = SourceSpec(path=["s3://corpus/a.jsonl"], storage={"endpoint_url": s3_server, "use_listings_cache": False})
    with pytest.raises(UserError, match=r"credentials.*AWS_PROFILE"):
        list_files(source)
