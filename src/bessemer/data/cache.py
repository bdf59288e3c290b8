"""The folder that prepared data lives in: one process builds an entry while the others wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bessemer.storage import lock_file


@contextlib.contextmanager
def locked(cache: Path, name: str, say: Callable[[str], None]) -> Iterator[bool]:
    """Holds the lock of one entry, which the system frees when its holder dies. Yields False if the file system has no
    locks: then two processes may do the same work, and the first to finish wins."""
    with open(cache / f".{name}.lock", "w") as file:
        has_locks = True
        try:
            if not lock_file(file, wait=False):
                say("waiting for another process that prepares the same data")
                lock_file(file)
        except OSError:
            has_locks = False
        yield has_locks
