"""The lock of a run: one writer at a time.

A POSIX record lock on the file `lock`, and `owner.json` with host, pid and start time of the process, whose
modification time is a heartbeat. Only the writer opens the lock file, because closing any descriptor of it frees the
lock. Readers, and file systems without locks, use the owner file: on the same host a dead or reused pid is noticed at
once; the owner on another host counts as dead when its heartbeat is older than STALE_S.
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
EXIT_GRACE_S = 5.0


@dataclass(frozen=True)
class Owner:
    """The process that writes a run, or wrote it last."""

    host: str
    pid: int
    started: float
    since: float

    @staticmethod
    def this_process() -> Owner:
        return Owner(socket.gethostname(), os.getpid(), psutil.Process().create_time(), time.time())


def read_owner(folder: Path) -> Owner | None:
    """The recorded owner; None if there is no complete record."""
    try:
        record = json.loads((folder / "owner.json").read_text())
        owner = Owner(str(record["host"]), int(record["pid"]), float(record["started"]), float(record["since"]))
        time.localtime(owner.since)  # refuses times that cannot be printed
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    return owner if 0 < owner.pid < 2**31 else None


def _heartbeat_age_s(folder: Path) -> float | None:
    """Seconds since the last heartbeat."""
    try:
        return time.time() - (folder / "owner.json").stat().st_mtime
    except OSError:
        return None


def is_alive(owner: Owner, folder: Path) -> bool:
    """Whether the owner is still running, as far as this host can see."""
    if owner.host == socket.gethostname():
        try:
            process = psutil.Process(owner.pid)
            # A killed process stays in the process table as a zombie until its parent waits for it.
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - owner.started) < 1.0
        except (psutil.Error, ValueError, OverflowError):
            return False
    age_s = _heartbeat_age_s(folder)
    return age_s is not None and age_s < STALE_S


class Lock:
    """Held from acquire() until release() or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = -1
        self._stop = threading.Event()
        self.previous_owner: Owner | None = None

    def acquire(self) -> None:
        """Take the lock. UserError names the host and pid that hold it."""
        owner = read_owner(self.folder)
        is_self = owner is not None and owner.pid == os.getpid() and owner.host == socket.gethostname()
        if owner and is_self and is_alive(owner, self.folder):
            raise UserError(self._refusal(owner))  # record locks do not exclude their own process
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock_file(fd)
            before = read_owner(self.folder)  # again: the owner may have exited meanwhile
            if before and is_alive(before, self.folder):
                raise UserError(self._refusal(before))
            write_atomic(self.folder / "owner.json", json.dumps(asdict(Owner.this_process())), durable=False)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self.previous_owner = fd, before
        self._stop = threading.Event()
        threading.Thread(target=self._heartbeat, args=(self._stop,), daemon=True, name="run-heartbeat").start()

    def _lock_file(self, fd: int) -> None:
        """Take the record lock. Waits for a killed owner whose last thread has not released it yet."""
        give_up = time.monotonic() + EXIT_GRACE_S
        while True:
            try:
                if lock_file(fd, wait=False, per_process=True):
                    return
            except OSError:
                return  # this file system has no locks: only the owner file counts
            owner = read_owner(self.folder)
            if owner is None or is_alive(owner, self.folder) or time.monotonic() > give_up:
                raise UserError(self._refusal(owner))
            time.sleep(0.02)

    def _refusal(self, owner: Owner | None) -> str:
        if owner is None:
            holder = "another process"
        else:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.since))
            holder = f"process {owner.pid} on {owner.host} since {since}"
        fix = "wait for it, stop it, or choose another name for this run"
        if owner and owner.host != socket.gethostname():
            age_s = max(0.0, _heartbeat_age_s(self.folder) or 0.0)
            fix += f" (last heartbeat {age_s:.0f} s ago; after {STALE_S:.0f} s it counts as dead)"
        return f"{self.folder} is being written by {holder}: {fix}"

    def _heartbeat(self, stop: threading.Event) -> None:
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
