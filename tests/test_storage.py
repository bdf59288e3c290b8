"""Atomic writes, folder commits, locks and retries."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer import storage
from bessemer.storage import atomic_file, atomic_path, backoff_s, commit_folder, lock_file, retry, write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_by_the_complete_new_one(tmp_path: Path) -> None:
    write_atomic(tmp_path / "spec.yaml", "old")
    write_atomic(tmp_path / "spec.yaml", "größe")
    assert (tmp_path / "spec.yaml").read_text(encoding="utf-8") == "größe"
    assert names(tmp_path) == ["spec.yaml"]


def test_parents_are_created_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "a" / "b", b"")
    write_atomic(tmp_path / "a" / "b", b"1", parents=True)
    assert (tmp_path / "a" / "b").read_bytes() == b"1"


@pytest.mark.parametrize("durable", [True, False])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path, durable: bool) -> None:
    write_atomic(tmp_path / "a", "old")
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a", durable=durable) as file:
        file.write(b"half" * (1 // 0))
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_content_is_on_the_disk_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = os.replace
    monkeypatch.setattr(storage, "sync_path", lambda path: order.append("folder" if Path(path).is_dir() else "file"))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("rename"), real(*paths)))
    with atomic_path(tmp_path / "a") as path:
        path.write_text("x")
    assert order == ["file", "rename", "folder"]
    order.clear()
    write_atomic(tmp_path / "a", "x", durable=False)
    assert order == ["rename"]


def test_a_folder_gets_its_name_and_replaces_another_only_on_request(tmp_path: Path) -> None:
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.raises(OSError) as caught:
        commit_folder(tmp_path / "new", tmp_path / "target")
    assert caught.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    assert names(tmp_path / "target") == ["target"]
    commit_folder(tmp_path / "new", tmp_path / "target", overwrite=True)
    assert names(tmp_path) == ["target"]
    assert names(tmp_path / "target") == ["new"]


@pytest.mark.parametrize("per_process", [True, False])
def test_a_lock_excludes_another_process_until_the_file_is_closed(tmp_path: Path, per_process: bool) -> None:
    path = tmp_path / "lock"
    code = f"from bessemer.storage import lock_file; f = open({str(path)!r}, 'r+'); "
    code += f"print(lock_file(f, wait=False, per_process={per_process}))"

    def elsewhere() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    with path.open("w") as file:
        assert lock_file(file, wait=False, per_process=per_process)
        assert elsewhere() == "False"
    assert elsewhere() == "True"


def test_shared_locks_do_not_exclude_each_other(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert lock_file(first, shared=True) and lock_file(second, shared=True, wait=False)
        assert not lock_file(second, wait=False)


def test_pauses_double_up_to_a_limit_and_leave_the_random_state_alone() -> None:
    state = random.getstate()
    for attempt, middle in enumerate([1.0, 2.0, 4.0, 5.0, 5.0]):
        assert 0.5 * middle <= backoff_s(attempt, 1.0, longest_s=5.0) <= 1.5 * middle
    assert random.getstate() == state


def test_a_request_is_retried_until_it_succeeds_or_the_attempts_are_spent() -> None:
    calls: list[int] = []

    def request() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError(str(len(calls)))
        return "ok"

    def is_connection(error: Exception) -> bool:
        return isinstance(error, ConnectionError)

    assert retry(request, attempts=3, pause_s=0, should_retry=is_connection) == "ok"
    calls.clear()
    with pytest.raises(ConnectionError, match="2"):
        retry(request, attempts=2, pause_s=0, should_retry=is_connection)
    calls.clear()
    with pytest.raises(ConnectionError, match="1"):
        retry(request, attempts=5, pause_s=0, should_retry=lambda error: False)
