"""One writer per run.

A POSIX record lock on `lock` (released by the kernel when its process dies, not inherited by forked workers, honoured by
NFS), and beside it `owner.json` with host, pid and the process's start time, whose modification time is refreshed as a
heartbeat. The lock file is opened by the writer alone: closing any descriptor of it would drop the lock. Readers, and
file systems without locks, go by the owner file: on the same host a dead or recycled pid is seen at once; another host's
owner counts as dead when its heartbeat is older than STALE_S.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bessemer.errors import UserError

HEARTBEAT_S = 15.0
STALE_S = 120.0


@dataclass(frozen=True)
class Owner:
    """Who writes, or last wrote, a run."""

    host: str
    pid: int
    started: float
    since: float

    @staticmethod
    def me() -> Owner:
        return Owner(socket.gethostname(), os.getpid(), psutil.Process().create_time(), time.time())


def read_owner(folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((folder / "owner.json").read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def is_alive(owner: Owner, folder: Path) -> bool:
    """Whether that owner still runs, as far as this host can tell."""
    if owner.host == socket.gethostname():
        try:
            return abs(psutil.Process(owner.pid).create_time() - owner.started) < 1.0
        except psutil.NoSuchProcess:
            return False
    try:
        return time.time() - (folder / "owner.json").stat().st_mtime < STALE_S
    except FileNotFoundError:
        return False


class Lock:
    """Held from acquire() to release() or the death of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = -1
        self._stop = threading.Event()
        self.taken_from: Owner | None = None

    def acquire(self) -> None:
        """Take the lock, or raise UserError with the host and pid that hold it."""
        before = read_owner(self.folder)
        if before and before.pid == os.getpid() and before.host == socket.gethostname() and is_alive(before, self.folder):
            raise UserError(self._refusal(before))  # record locks do not exclude one's own process
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise UserError(self._refusal(read_owner(self.folder))) from None
            # ENOLCK, EOPNOTSUPP: this file system has no locks; the owner file decides alone.
        if before and is_alive(before, self.folder):
            os.close(fd)
            raise UserError(self._refusal(before))
        self._fd = fd
        self.taken_from = before
        temporary = self.folder / f"owner.json.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(Owner.me())))
        os.replace(temporary, self.folder / "owner.json")
        threading.Thread(target=self._beat, daemon=True, name="run-heartbeat").start()

    def _refusal(self, owner: Owner | None) -> str:
        who = f"process {owner.pid} on {owner.host}" if owner else "another process"
        return f"{self.folder} is being written by {who}; wait for it, stop it, or give this run another name"

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder / "owner.json")

    def release(self) -> None:
        if self._fd < 0:
            return
        self._stop.set()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "owner.json").unlink()
        os.close(self._fd)
        self._fd = -1
