"""From a request to a submitted job: files, a look for secrets in them, the target's client, a note of the job."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import cast

from bessemer.errors import UserError
from bessemer.launch import kubernetes, local, modal, sky, slurm, ssh
from bessemer.launch.job import RECORD, Job, State, Target, call, read_job
from bessemer.launch.node import node_script
from bessemer.launch.queue import Queue
from bessemer.launch.request import Request
from bessemer.launch.secrets import refuse_secrets
from bessemer.run.directory import write_whole
from bessemer.spec.load import dump_spec

TARGETS: dict[str, Target] = {
    "slurm": cast(Target, slurm), "kubernetes": cast(Target, kubernetes), "sky": cast(Target, sky),
    "modal": cast(Target, modal), "ssh": cast(Target, ssh), "local": cast(Target, local),
}  # fmt: skip
ENDED = (
    "ENDED",
    "GONE",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "SUCCEEDED",
    "STOPPED",
    "NODE_FAIL",
    "OUT_OF_ME",
)


def generate(request: Request) -> dict[str, str]:
    """Every file of the request, by name. UserError if a secret is in one of them."""
    target = TARGETS[request.on]
    spec, there = request.spec, request
    if request.on == "sky":
        spec = sky.placed(spec, request)
    elif request.on == "modal":
        there = modal.inside(request)
    files = target.write(request)
    if request.on != "kubernetes":  # there both are in the ConfigMap
        files |= {"node.sh": node_script(there, chdir=request.on != "sky"), "spec.yaml": dump_spec(spec)}
    refuse_secrets(files)
    return files


def write_files(request: Request, files: dict[str, str]) -> None:
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(request.folder / name, text)
    except OSError as error:
        raise UserError(f"{request.folder}: cannot be written: {error.strerror}; set `runs` in the spec") from None


def refuse_second(request: Request) -> None:
    """Two jobs must not write one run; the run's lock would stop the second one, hours later."""
    path = request.folder / RECORD
    if not path.exists():
        return
    job = read_job(path)
    try:
        states = TARGETS[job.on].states(job)
    except UserError:
        return  # its client cannot tell (any more): the lock has the last word
    if any(active(state) for state in states):
        raise UserError(
            f"{job.name} is {job.on} job {job.id} already ({states[0].state}): `bessemer launch cancel {job.name}` "
            "first, or give this one another name with --set name=..."
        )


def active(state: State) -> bool:
    return not state.state.upper().startswith(ENDED)


def submit(request: Request, tell: Callable[[str], None]) -> Job | None:
    """Write and submit. None where the client is missing: what to run, and where, is told."""
    files = generate(request)
    refuse_second(request)
    write_files(request, files)
    for name in files:
        tell(f"written  {request.folder / name}")
    if request.on == "local":
        local.wait_and_run(request, Queue(), tell)
    target = TARGETS[request.on]
    command = target.submit(request)
    if shutil.which(target.CLIENT) is None:
        tell(f"{target.CLIENT} is not on this machine. Where it is, run:\n  {shlex.join(command)}")
        return None
    printed = call(command)
    job = Job(
        request.on, request.name, target.job_id(request, printed), str(request.folder), time.time(), request.nodes,
        request.gpus, request.namespace or (request.hosts[0] if request.hosts else ""),
    )  # fmt: skip
    job.save()
    return job


def show_logs(job: Job) -> int:
    """The client's own output, as it comes; its exit code."""
    command = TARGETS[job.on].logs(job)
    if shutil.which(command[0]) is None:
        call(command)  # says so
    return subprocess.run(command).returncode
