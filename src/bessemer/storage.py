"""Files: atomic writes, locks and retries, for every layer of the package.

Each guarantee is stated once, here. Nothing in this module imports another part of the package, and it raises only
OSError: the caller knows which value, key or run to name in its message.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

Result = TypeVar("Result")

_JITTER = random.Random()  # its own state: waiting must not change the draws of the training


def sync_path(path: str | Path) -> None:
    """Make a file's content, or the names inside a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(file: IO[Any]) -> None:
    """Make what was written to an open file survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def temporary_path(path: str | Path) -> Path:
    """A path next to `path`, ending in `.tmp`, that no other writer uses on this machine or another."""
    path = Path(path)
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def commit_file(temporary: Path, path: Path) -> None:
    """Rename a complete file to its final name, so that content and name survive a power cut."""
    sync_path(temporary)
    os.replace(temporary, path)
    sync_path(path.parent)


@contextmanager
def atomic_path(path: str | Path, *, parents: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; leaving the block gives the file its name.

    A reader, also after a kill, sees the old file or the complete new one. An exception deletes the temporary file and
    leaves the old one. With `durable` the new file survives a power cut from here on: the content is on the disk before
    the rename, the name after it. Without, a power cut may leave an empty or partial file under the name: only for
    content that is checked when it is read and can be computed again. `parents` creates missing parent folders.
    """
    path = Path(path)
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        if durable:
            commit_file(temporary, path)
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_file(path: str | Path, *, parents: bool = False, durable: bool = True) -> Iterator[IO[bytes]]:
    """The same as `atomic_path`, with the temporary file opened for reading and writing bytes."""
    with atomic_path(path, parents=parents, durable=durable) as temporary, open(temporary, "w+b") as file:
        yield file


def write_atomic(path: str | Path, content: str | bytes, *, parents: bool = False, durable: bool = True) -> None:
    """Replace a file by `content` (text as UTF-8), with the guarantees of `atomic_path`."""
    with atomic_path(path, parents=parents, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def commit_folder(partial: Path, target: Path, *, overwrite: bool = False) -> None:
    """Rename a complete folder to its final name. The rename is the commit, and survives a power cut.

    The files inside must have been synced by whoever wrote them. With `overwrite` an existing target is first renamed
    to `.NAME.old-ID` and deleted at the end, so that a kill never leaves a mixture under the name. Without, an existing
    target that is not an empty folder is an OSError (ENOTEMPTY, EEXIST).
    """
    sync_path(partial)
    replaced = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:12]}")
    if overwrite and target.exists():
        os.rename(target, replaced)
    os.replace(partial, target)
    sync_path(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def lock_file(file: IO[Any] | int, *, shared: bool = False, wait: bool = True, per_process: bool = False) -> bool:
    """Lock an open file, or change the kind of its lock; False if another holds it and `wait` is False.

    The system frees the lock when the file is closed or its holder dies, so a kill leaves nothing to clean up. Never
    delete a lock file: a process that has just opened the old one and a process that creates a new one would both hold
    it. OSError means that the file system has no locks.

    The default is flock(2): the lock belongs to the open file, and forked children share it. `per_process` is a POSIX
    record lock: NFS honours it across hosts and children do not inherit it, but it does not exclude its own process,
    and closing *any* descriptor of the file frees it.
    """
    mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        (fcntl.lockf if per_process else fcntl.flock)(file, mode)
    except BlockingIOError:
        return False
    except PermissionError:  # the same, as some systems say it of record locks
        if per_process:
            return False
        raise
    return True


def backoff_s(attempt: int, first_s: float, longest_s: float = 60.0) -> float:
    """Seconds to wait after failed attempt number `attempt` (0, 1, ...): doubling from `first_s` up to `longest_s`,
    times a random factor from 0.5 to 1.5, so that the processes of a cluster do not all come back at once."""
    return min(first_s * 2.0**attempt, longest_s) * _JITTER.uniform(0.5, 1.5)


def retry(
    request: Callable[[], Result], *, attempts: int, pause_s: float, should_retry: Callable[[Exception], bool]
) -> Result:
    """Call `request` until it returns, at most `attempts` times, with pauses of `backoff_s(attempt, pause_s)`.

    An error that `should_retry` refuses, and the error of the last attempt, are raised as they are. `should_retry` is
    called once for every failed attempt, so it may count failures or reset a connection.
    """
    for attempt in range(attempts):
        try:
            return request()
        except Exception as error:
            if not should_retry(error) or attempt == attempts - 1:
                raise
        time.sleep(backoff_s(attempt, pause_s))
    raise AssertionError("at least one attempt")
