"""A queue for a GPU box that people share: no daemon, only tickets in a folder and processes that wait their turn.

`bessemer launch SPEC --on local` takes a ticket and waits in the foreground. The first in line starts as soon as enough
GPUs are free: held by no ticket, and with no process of anybody on them. Nobody overtakes, so a run that wants eight
GPUs gets them. When its turn comes the process becomes torchrun (exec), so a ticket's owner is the run itself, and the
place of a dead owner is free at once. Runs without a GPU take turns one at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from bessemer.errors import UserError
from bessemer.storage import lock_file, write_atomic

POLL_S = 1.0


@dataclass(frozen=True)
class Ticket:
    """A place in the line. `held` are the GPUs of a run that has started."""

    number: int
    name: str
    user: str
    pid: int
    started: float  # of the process: pids are used again
    since: float
    gpus: int
    running: bool = False
    held: tuple[int, ...] = ()

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def queue_folder() -> Path:
    """One for all users of this host; BESSEMER_QUEUE names another."""
    return Path(os.environ.get("BESSEMER_QUEUE") or "/tmp/bessemer-queue") / socket.gethostname()


def idle_gpus() -> dict[int, bool]:
    """Every GPU of this box, and whether no process computes on it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    gpus = _ask("gpu", "index,uuid")
    busy = {row[0] for row in _ask("compute-apps", "gpu_uuid")}
    return {int(index): uuid not in busy for index, uuid in gpus}


def _ask(what: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"nvidia-smi: {done.stdout.strip() or done.stderr.strip()}; without it no GPU can be shared out"
        )
    return [[word.strip() for word in row.split(",")] for row in done.stdout.splitlines() if row.strip()]


class Queue:
    """The line in a folder. Every look and every change is made under one lock."""

    def __init__(self, folder: Path | None = None, gpus: Callable[[], dict[int, bool]] = idle_gpus) -> None:
        self.folder, self.gpus = folder or queue_folder(), gpus

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            for folder in (self.folder.parent, self.folder):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    folder.chmod(0o777)  # others queue here too
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with suppress(PermissionError):  # somebody else's file, which is open to all already
                os.fchmod(fd, 0o666)
        except OSError as error:
            raise UserError(f"{self.folder}: {error.strerror}; set BESSEMER_QUEUE to a folder of yours") from None
        try:
            lock_file(fd)
            yield
        finally:
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.json"

    def _read(self) -> list[Ticket]:
        """Tickets of living owners, in order. Those of dead ones are removed, or passed over if they are not ours."""
        tickets = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found = json.loads(path.read_text())
                ticket = Ticket(**{**found, "held": tuple(found["held"])})
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if ticket.alive:
                tickets.append(ticket)
            else:
                with suppress(OSError):
                    path.unlink()
        return tickets

    def _write(self, ticket: Ticket) -> None:
        write_atomic(self._path(ticket.number), json.dumps(asdict(ticket)), durable=False)

    def tickets(self) -> list[Ticket]:
        if not self.folder.is_dir():
            return []
        with self._locked():
            return self._read()

    def join(self, name: str, gpus: int) -> Ticket:
        """Take a place at the end of the line."""
        present = len(self.gpus())
        if gpus > present:
            raise UserError(f"--gpus {gpus}: this machine has {present}; ask for fewer, or for 0 to train on the CPU")
        me = psutil.Process()
        with self._locked():
            last = max((int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit()), default=0)
            ticket = Ticket(last + 1, name, me.username(), me.pid, me.create_time(), time.time(), gpus)
            self._write(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        with self._locked():
            self._path(ticket.number).unlink(missing_ok=True)

    def step_forward(self, ticket: Ticket) -> Ticket | str:
        """The ticket with its GPUs if its turn has come, else what it waits for."""
        with self._locked():
            others = [other for other in self._read() if other.number != ticket.number]
            before = [other for other in others if not other.running and other.number < ticket.number]
            if before:
                return f"behind {len(before)} in line, first {before[0].name} of {before[0].user}"
            running = [other for other in others if other.running]
            held = {gpu for other in running for gpu in other.held}
            if ticket.gpus == 0:
                on_cpu = [other for other in running if other.gpus == 0]
                if on_cpu:
                    return f"for {on_cpu[0].name} of {on_cpu[0].user}, which runs on the CPU"
                ready = replace(ticket, running=True)
            else:
                free = [gpu for gpu, idle in self.gpus().items() if idle and gpu not in held]
                if len(free) < ticket.gpus:
                    return f"first in line, for {ticket.gpus} GPUs; {len(free)} are free"
                ready = replace(ticket, running=True, held=tuple(free[: ticket.gpus]))
            self._write(ready)
            return ready

    def wait(self, ticket: Ticket, tell: Callable[[str], None], poll_s: float = POLL_S) -> Ticket:
        """Stand in line until it is our turn; every change of what is waited for is told."""
        told = ""
        while isinstance(turn := self.step_forward(ticket), str):
            if turn != told:
                tell(f"waiting {turn}")
                told = turn
            time.sleep(poll_s)
        return turn
