"""One writer per run.

A POSIX record lock on `lock` (released by the kernel when its process dies, not inherited by forked workers, honoured
by NFS), and beside it `owner.json` with host, pid and the process's start time, whose modification time is refreshed as
a heartbeat. The lock file is opened by the writer alone: closing any descriptor of it would drop the lock. Readers, and
file systems without locks, go by the owner file: on the same host a dead or recycled pid is seen at once; another
host's owner counts as dead when its heartbeat is older than STALE_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bessemer.errors import UserError
from bessemer.storage import lock_file, write_atomic

HEARTBEAT_S = 15.0
STALE_S = 120.0
LAST_BREATH_S = 5.0


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
    """The owner on record; None where there is none, or only half a file."""
    try:
        found = json.loads((folder / "owner.json").read_text())
        owner = Owner(str(found["host"]), int(found["pid"]), float(found["started"]), float(found["since"]))
        time.localtime(owner.since)  # it can be told
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return owner if 0 < owner.pid < 2**31 else None


def _silence_s(folder: Path) -> float | None:
    """Seconds since the last heartbeat."""
    try:
        return time.time() - (folder / "owner.json").stat().st_mtime
    except OSError:
        return None


def is_alive(owner: Owner, folder: Path) -> bool:
    """Whether that owner still runs, as far as this host can tell."""
    if owner.host == socket.gethostname():
        try:
            process = psutil.Process(owner.pid)
            # A killed process stays in the table, start time and all, until its parent asks after it.
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - owner.started) < 1.0
        except (psutil.Error, ValueError, OverflowError):
            return False
    silence_s = _silence_s(folder)
    return silence_s is not None and silence_s < STALE_S


class Lock:
    """Held from acquire() to release() or the death of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = -1
        self._stop = threading.Event()
        self.taken_from: Owner | None = None

    def acquire(self) -> None:
        """Take the lock, or raise UserError with the host and pid that hold it."""
        owner = read_owner(self.folder)
        mine = owner is not None and owner.pid == os.getpid() and owner.host == socket.gethostname()
        if owner and mine and is_alive(owner, self.folder):
            raise UserError(self._refusal(owner))  # record locks do not exclude one's own process
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock_file(fd)
            before = read_owner(self.folder)  # again: it may have left while the lock was taken
            if before and is_alive(before, self.folder):
                raise UserError(self._refusal(before))
            write_atomic(self.folder / "owner.json", json.dumps(asdict(Owner.me())), durable=False)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self.taken_from = fd, before
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(self._stop,), daemon=True, name="run-heartbeat").start()

    def _lock_file(self, fd: int) -> None:
        """Take the record lock. A killed process is dead before its last thread lets go of it: that is waited for."""
        give_up = time.monotonic() + LAST_BREATH_S
        while True:
            try:
                if lock_file(fd, wait=False, per_process=True):
                    return
            except OSError:
                return  # this file system has no locks; the owner file decides alone
            owner = read_owner(self.folder)
            if owner is None or is_alive(owner, self.folder) or time.monotonic() > give_up:
                raise UserError(self._refusal(owner))
            time.sleep(0.02)

    def _refusal(self, owner: Owner | None) -> str:
        if owner is None:
            who = "another process"
        else:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.since))
            who = f"process {owner.pid} on {owner.host} since {since}"
        fix = "wait for it, stop it, or give this run another name"
        if owner and owner.host != socket.gethostname():
            silence_s = max(0.0, _silence_s(self.folder) or 0.0)
            fix += f" (last sign of life {silence_s:.0f} s ago; after {STALE_S:.0f} s it counts as dead)"
        return f"{self.folder} is being written by {who}: {fix}"

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.folder / "owner.json")

    def release(self) -> None:
        if self._fd < 0:
            return
        self._stop.set()
        with contextlib.suppress(OSError):
            (self.folder / "owner.json").unlink()
        os.close(self._fd)
        self._fd = -1
