"""Launches on this machine through a queue for a shared GPU box: no daemon, only ticket files and waiting processes.

`bessemer launch SPEC --on local` takes a ticket and waits in the foreground. The first in line starts as soon as enough
GPUs are free: assigned to no ticket and used by no process. Nobody overtakes, so a run that needs eight GPUs gets them.
When its turn comes, the process becomes torchrun (exec): the owner of a ticket is the run itself, and the place of a
dead owner is free at once. CPU runs take turns one at a time.
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
from bessemer.launch.job import JobState, LaunchJob
from bessemer.launch.request import LaunchRequest
from bessemer.storage import lock_file, write_atomic

CLIENT = "bash"
POLL_S = 1.0


def write(request: LaunchRequest) -> dict[str, str]:
    return {}  # node.sh is all it needs


def submit(request: LaunchRequest) -> list[str]:
    return ["bash", f"{request.folder}/node.sh"]


def job_id(request: LaunchRequest, output: str) -> str:
    return str(os.getpid())


def wait_and_run(request: LaunchRequest, queue: Queue, report: Callable[[str], None]) -> None:
    """Wait in the queue, then replace this process by node.sh and torchrun under the same pid. Never returns."""
    ticket = queue.join(request.name, request.gpus)
    LaunchJob("local", request.name, str(os.getpid()), str(request.folder), time.time(), 1, request.gpus).save()
    try:
        ready = queue.wait(ticket, report)
    except BaseException:
        queue.leave(ticket)
        raise
    devices = ",".join(map(str, ready.held))
    report(f"starting {request.name} on {'GPU ' + devices if devices else 'the CPU'}")
    command = submit(request)
    os.execvpe(command[0], command, {**os.environ, "CUDA_VISIBLE_DEVICES": devices})


def _find_ticket(job: LaunchJob) -> Ticket | None:
    """The job's place in the queue, while its process lives."""
    return next((t for t in Queue().tickets() if str(t.pid) == job.id and t.name == job.name), None)


def states(job: LaunchJob) -> list[JobState]:
    ticket = _find_ticket(job)
    if ticket is None:
        return [JobState(job.id, "ENDED")]
    gpus = f"GPU {','.join(map(str, ticket.held))}" if ticket.held else ""
    return [JobState(job.id, "RUNNING" if ticket.running else "WAITING", detail=gpus)]


def logs(job: LaunchJob) -> list[str]:
    raise UserError(f"{job.name}: a local run prints to its own terminal; `bessemer runs` shows its state")


def cancel(job: LaunchJob) -> list[str]:
    """SIGTERM: a waiting process leaves the queue, a running one saves and exits."""
    if _find_ticket(job) is None:
        raise UserError(f"{job.name}: process {job.id} is neither waiting nor running here")
    return ["kill", "-TERM", job.id]


@dataclass(frozen=True)
class Ticket:
    """A place in the queue. `held` are the GPUs of a run that has started."""

    number: int
    name: str
    user: str
    pid: int
    started: float  # start time of the process: pids are reused
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
    """One folder for all users of this host; BESSEMER_QUEUE names another."""
    return Path(os.environ.get("BESSEMER_QUEUE") or "/tmp/bessemer-queue") / socket.gethostname()


def idle_gpus() -> dict[int, bool]:
    """Every GPU of this machine, and whether no process uses it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    gpus = _query_gpus("gpu", "index,uuid")
    busy = {row[0] for row in _query_gpus("compute-apps", "gpu_uuid")}
    return {int(index): uuid not in busy for index, uuid in gpus}


def _query_gpus(table: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{table}={fields}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        error = result.stdout.strip() or result.stderr.strip()
        raise UserError(f"nvidia-smi: {error}; the queue needs it to find free GPUs")
    return [[word.strip() for word in row.split(",")] for row in result.stdout.splitlines() if row.strip()]


class Queue:
    """The queue in a folder. One lock guards every read and every change."""

    def __init__(self, folder: Path | None = None, gpus: Callable[[], dict[int, bool]] = idle_gpus) -> None:
        self.folder, self.gpus = folder or queue_folder(), gpus

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            for folder in (self.folder.parent, self.folder):
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    folder.chmod(0o777)  # other users queue here too
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with suppress(PermissionError):  # another user's file, which is already open to all
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
        """Tickets of living owners, in order. Tickets of dead owners are removed, or skipped if that is not allowed."""
        tickets = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = json.loads(path.read_text())
                ticket = Ticket(**{**record, "held": tuple(record["held"])})
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
        """Take a place at the end of the queue."""
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

    def try_start(self, ticket: Ticket) -> Ticket | str:
        """The ticket with its GPUs if its turn has come, else what it is waiting for."""
        with self._locked():
            others = [other for other in self._read() if other.number != ticket.number]
            ahead = [other for other in others if not other.running and other.number < ticket.number]
            if ahead:
                return f"behind {len(ahead)} in line, first {ahead[0].name} of {ahead[0].user}"
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

    def wait(self, ticket: Ticket, report: Callable[[str], None], poll_s: float = POLL_S) -> Ticket:
        """Wait until it is this ticket's turn, reporting every change of what it waits for."""
        reported = ""
        while isinstance(turn := self.try_start(ticket), str):
            if turn != reported:
                report(f"waiting {turn}")
                reported = turn
            time.sleep(poll_s)
        return turn
