"""This machine, by its queue: the process waits for its turn and then becomes the run's torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from bessemer.errors import UserError
from bessemer.launch.job import JobState, LaunchJob
from bessemer.launch.queue import Queue, Ticket
from bessemer.launch.request import LaunchRequest

CLIENT = "bash"


def write(request: LaunchRequest) -> dict[str, str]:
    return {}  # node.sh says it all


def submit(request: LaunchRequest) -> list[str]:
    return ["bash", f"{request.folder}/node.sh"]


def job_id(request: LaunchRequest, printed: str) -> str:
    return str(os.getpid())


def wait_and_run(request: LaunchRequest, queue: Queue, tell: Callable[[str], None]) -> None:
    """Never returns: after its turn this process is node.sh, and then torchrun, under the same number."""
    ticket = queue.join(request.name, request.gpus)
    LaunchJob("local", request.name, str(os.getpid()), str(request.folder), time.time(), 1, request.gpus).save()
    try:
        ready = queue.wait(ticket, tell)
    except BaseException:
        queue.leave(ticket)
        raise
    devices = ",".join(map(str, ready.held))
    tell(f"starting {request.name} on {'GPU ' + devices if devices else 'the CPU'}")
    command = submit(request)
    os.execvpe(command[0], command, {**os.environ, "CUDA_VISIBLE_DEVICES": devices})


def _ticket(job: LaunchJob) -> Ticket | None:
    """Its place in the line, while the process that took it lives."""
    return next((t for t in Queue().tickets() if str(t.pid) == job.id and t.name == job.name), None)


def states(job: LaunchJob) -> list[JobState]:
    ticket = _ticket(job)
    if ticket is None:
        return [JobState(job.id, "ENDED")]
    held = f"GPU {','.join(map(str, ticket.held))}" if ticket.held else ""
    return [JobState(job.id, "RUNNING" if ticket.running else "WAITING", detail=held)]


def logs(job: LaunchJob) -> list[str]:
    raise UserError(
        f"{job.name}: a local run writes to the terminal it was started in; `bessemer runs` tells how it stands"
    )


def cancel(job: LaunchJob) -> list[str]:
    """SIGTERM: a waiting process leaves the line, a running one saves and leaves."""
    if _ticket(job) is None:
        raise UserError(f"{job.name}: process {job.id} is neither waiting nor running here")
    return ["kill", "-TERM", job.id]
