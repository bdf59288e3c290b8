"""No credential reaches a message, an origin or a key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.read import check_storage_options, list_files, redact
from bessemer.data.read.secrets import redact_message
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("/data/a?b#c.txt", "/data/a?b#c.txt"),
        ("s3://bucket/key.jsonl", "s3://bucket/key.jsonl"),
        ("s3://AKIA123:s3cret@bucket/key", "s3://bucket/key"),
        ("https://me:pw@host:8080/a.txt", "https://host:8080/a.txt"),
        ("https://h/a.txt?file=1&page=2", "https://h/a.txt?file=1&page=2"),
        (
            "https://h/a?X-Amz-Signature=00&X-Amz-Credential=AK%2F1&X-Amz-Expires=60&versionId=7",
            "https://h/a?versionId=7",
        ),
        ("https://x.blob.core.windows.net/c/a.txt?sv=2022&sp=r&sig=abc%3D", "https://x.blob.core.windows.net/c/a.txt"),
        (
            "https://storage.googleapis.com/b/a?GoogleAccessId=me&Expires=1&Signature=zz",
            "https://storage.googleapis.com/b/a",
        ),
        ("https://h/a?access_token=t&apiKey=k&q=1", "https://h/a?q=1"),
        ("https://h/a?TOKEN=t", "https://h/a"),
        ("https://[oops/a?token=t", "https://[oops/a"),
    ],
)
def test_addresses_are_shown_without_credentials(path: str, safe: str) -> None:
    assert redact(path) == safe
    assert redact_message(f"403 for {path!r},\n  try again") == f"403 for {safe!r}, try again"


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=20))
def test_a_secret_is_never_shown(secret: str) -> None:
    marked = f"SECRET{secret}"
    for url in (
        f"s3://{marked}:{marked}@bucket/a",
        f"https://h/a?X-Amz-Security-Token={marked}&b=1",
        f"https://h/a?sig={marked}",
        f"https://{marked}@h/a?client_secret={marked}",
    ):
        assert marked not in redact(url) and marked not in redact_message(f"failed: {url}")


@pytest.mark.parametrize(
    "storage",
    [
        {"key": "AKIA"},
        {"secret": "x"},
        {"token": "ya29.x"},
        {"account_key": "x"},
        {"sas_token": "x"},
        {"connection_string": "x"},
        {"password": "x"},
        {"client_kwargs": {"aws_secret_access_key": "x"}},
        {"headers": {"Authorization": "Bearer x"}},
        {"clientSecret": "x"},
        {"endpoint_url": "https://me:pw@host"},
    ],
)
def test_a_secret_in_the_storage_options_is_refused(storage: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="in the environment") as caught:
        check_storage_options(storage)
    value = str(next(iter(storage.values())))
    assert value not in str(caught.value) or len(value) < 3
    with pytest.raises(UserError, match=r"^storage\."):
        list_files(SourceSpec(path=["s3://bucket/a.txt"], storage=storage))


@pytest.mark.parametrize(
    "storage",
    [
        {},
        {"anon": True},
        {"token": "anon"},
        {"token": "google_default"},
        {"key": None},
        {"profile": "research"},
        {"endpoint_url": "http://127.0.0.1:9000"},
        {"client_kwargs": {"region_name": "eu-west-1"}},
        {"requester_pays": True, "account_name": "me", "monkey": "x", "keyboard": "y"},
    ],
)
def test_other_storage_options_pass(storage: dict[str, Any]) -> None:
    check_storage_options(storage)
