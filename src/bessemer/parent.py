"""Ends a process when its parent has died, so that killing a launcher with SIGKILL leaves no orphans that train.

The parent puts its pid into the child's environment (`child_environment`), and `import bessemer` calls
`end_with_parent` in the child before anything else. Workers of a foreign torchrun call it at their start. A thread
compares `os.getppid()` with that pid every half second. Linux also sets PR_SET_PDEATHSIG, which reaches a process that
is stopped or holds the GIL. That signal is sent when the *thread* that started the child ends, so it is only used for
children of Bessemer, whose starting threads wait for them.
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

_parent_pid: int | None = None  # this process ends with that one


def child_environment(**more: str) -> dict[str, str]:
    """The environment for a child that must end with this process."""
    return {**os.environ, PARENT: str(os.getpid()), **more}


def end_with_parent() -> None:
    """End with the parent, if it used `child_environment` or is torchrun. The variable is not inherited by further
    children."""
    global _parent_pid
    named = os.environ.pop(PARENT, None)
    if _parent_pid is not None or (named is None and "TORCHELASTIC_RUN_ID" not in os.environ):
        return
    # torchrun does not set the variable: if it died before this line, its workers fail at the rendezvous.
    _parent_pid = int(named) if named else os.getppid()
    if named and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != _parent_pid:  # it died before prctl
        _exit_now(_parent_pid)
    threading.Thread(target=_watch, args=(_parent_pid,), name="parent-watch", daemon=True).start()


def keep_parent() -> None:
    """Call before `exec`, which ends the thread: the new program then ends with the same parent."""
    if _parent_pid is not None:
        os.environ[PARENT] = str(_parent_pid)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    _exit_now(parent)


def _exit_now(parent: int) -> NoReturn:
    """Exit at once, as if killed: the kernel frees the run's lock, and the last checkpoint stays valid."""
    try:
        os.write(2, f"process {os.getpid()}: its parent process {parent} has died; exiting\n".encode())
    finally:  # stderr may be closed
        os._exit(EXIT)
