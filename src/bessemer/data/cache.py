"""The folder that prepared data lives in: one process builds an entry while the others wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(cache: Path, name: str, say: Callable[[str], None]) -> Iterator[bool]:
    """Holds the lock of one entry, which the system frees when its holder dies. False: the file system has no locks.

    Lock files stay, since deleting one that another process has just opened would let two hold it.
    """
    import fcntl

    with open(cache / f".{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
            yield True
        except OSError:  # a file system without locks: both may work, the first to finish wins
            yield False
        else:
            yield True
