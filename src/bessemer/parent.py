"""Ends a process when the process that started it has died, so that SIGKILL of a launcher leaves no orphan that trains.

The starter names itself in the child's environment (`child_environment`), and `import bessemer` calls `end_with_parent`
there before anything else. Workers of somebody else's torchrun call it when they begin. A thread compares
`os.getppid()` with that pid every half second, on every platform. Linux also gets PR_SET_PDEATHSIG, which reaches a
process that is stopped or that holds the interpreter's lock. That signal comes when the *thread* that started the child
ends, so it is only used where the starter is our own code: its starting threads wait for their children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

PARENT = "BESSEMER_PARENT_PID"
POLL_S = 0.5
PR_SET_PDEATHSIG = 1
EXIT = 1

_watched: int | None = None  # the pid of the parent that this process ends with


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a child that is to end with this process."""
    return {**os.environ, PARENT: str(os.getpid()), **more}


def end_with_parent() -> None:
    """Tie this process to the one that started it, if that asked for it (`child_environment`) or is torchrun. Children
    that it starts in turn are not tied by the same variable."""
    global _watched
    named = os.environ.pop(PARENT, None)
    if _watched is not None or (named is None and "TORCHELASTIC_RUN_ID" not in os.environ):
        return
    # torchrun does not name itself: one that died before this line is not noticed, and its workers fail to meet.
    _watched = int(named) if named else os.getppid()
    if named and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != _watched:  # it died before the signal was asked for
        _leave(_watched)
    threading.Thread(target=_watch, args=(_watched,), name="parent-watch", daemon=True).start()


def keep_tie() -> None:
    """Before `exec`, which ends the thread: the program that follows is tied as this one is."""
    if _watched is not None:
        os.environ[PARENT] = str(_watched)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    _leave(parent)


def _leave(parent: int) -> NoReturn:
    """At once, as if killed: the kernel frees the run's lock, and the last checkpoint stands."""
    try:
        os.write(2, f"process {os.getpid()}: process {parent}, which started it, has died; leaving\n".encode())
    finally:  # nobody may be reading any more
        os._exit(EXIT)
