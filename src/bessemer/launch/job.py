"""Job: what was submitted, as written in launch/job.json; and how a target's client is asked about it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bessemer.errors import UserError
from bessemer.launch.request import LaunchRequest
from bessemer.storage import write_atomic

RECORD = "job.json"


@dataclass(frozen=True)
class LaunchJob:
    """One submission. `where` is a Kubernetes namespace, or the first of the hosts."""

    on: str
    name: str
    id: str
    folder: str
    submitted: float
    nodes: int
    gpus: int
    where: str = ""

    def save(self) -> None:
        write_atomic(Path(self.folder) / RECORD, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class JobState:
    """One line of `bessemer launch status`: a job, or a part of one."""

    what: str
    state: str
    time: str = ""
    detail: str = ""


class LaunchTarget(Protocol):
    """A place that runs are sent to; each is a module of this name."""

    CLIENT: str

    def write(self, request: LaunchRequest) -> dict[str, str]:
        """Its files, by name."""
        ...

    def submit(self, request: LaunchRequest) -> list[str]:
        """The command that submits them."""
        ...

    def job_id(self, request: LaunchRequest, printed: str) -> str:
        """What that command's output calls the job."""
        ...

    def states(self, job: LaunchJob) -> list[JobState]:
        """How it stands, as its client tells."""
        ...

    def logs(self, job: LaunchJob) -> list[str]:
        """The command that shows its output."""
        ...

    def cancel(self, job: LaunchJob) -> list[str]: ...


def call(command: list[str], check: bool = True) -> str:
    """What a client prints. One that is missing, or says no, is told in one line with the command to try."""
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not on this machine; where it is, run: {shlex.join(command)}")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if check and done.returncode:
        words = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise UserError(f"{command[0]} refused: {words[-1]} (the command was: {shlex.join(command)})")
    return done.stdout


def find_job(name: str, runs: Path) -> LaunchJob:
    """The submission of a run, given by name or folder."""
    for folder in (Path(name), runs / name):
        path = folder / "launch" / RECORD
        if path.is_file():
            return read_job(path)
    raise UserError(f"{name}: nothing was launched under {runs / name}; `bessemer launch status` lists what was")


def read_job(path: Path) -> LaunchJob:
    try:
        found = json.loads(path.read_text())
        return LaunchJob(**found)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not readable as a submission ({error}); delete it and submit again") from None
