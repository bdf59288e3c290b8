"""From a request to a submitted job: files, a look for secrets in them, the target's client, a note of the job.

The launch files of a plan: the same that `bessemer launch` writes, for the nodes and GPUs that were planned.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from bessemer.errors import UserError
from bessemer.launch import kubernetes, local, modal, sky, slurm, ssh
from bessemer.launch.job import RECORD, JobState, LaunchJob, LaunchTarget, call, read_job
from bessemer.launch.node import node_script
from bessemer.launch.queue import Queue
from bessemer.launch.request import LaunchRequest, check, refuse_secrets
from bessemer.plan.cost_model.cost import Price
from bessemer.plan.hardware import Cluster
from bessemer.spec.document import parse
from bessemer.spec.load import dump_spec, named, validate
from bessemer.storage import write_atomic

TARGETS: dict[str, LaunchTarget] = {
    "slurm": cast(LaunchTarget, slurm), "kubernetes": cast(LaunchTarget, kubernetes), "sky": cast(LaunchTarget, sky),
    "modal": cast(LaunchTarget, modal), "ssh": cast(LaunchTarget, ssh), "local": cast(LaunchTarget, local),
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


def generate(request: LaunchRequest) -> dict[str, str]:
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


def write_files(request: LaunchRequest, files: dict[str, str]) -> None:
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(request.folder / name, text)
    except OSError as error:
        raise UserError(f"{request.folder}: cannot be written: {error.strerror}; set `runs` in the spec") from None


def refuse_second(request: LaunchRequest) -> None:
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


def active(state: JobState) -> bool:
    return not state.state.upper().startswith(ENDED)


def submit(request: LaunchRequest, tell: Callable[[str], None]) -> LaunchJob | None:
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
    job = LaunchJob(
        request.on, request.name, target.job_id(request, printed), str(request.folder), time.time(), request.nodes,
        request.gpus, request.namespace or (request.hosts[0] if request.hosts else ""),
    )  # fmt: skip
    job.save()
    return job


def show_logs(job: LaunchJob) -> int:
    """The client's own output, as it comes; its exit code."""
    command = TARGETS[job.on].logs(job)
    if shutil.which(command[0]) is None:
        call(command)  # says so
    return subprocess.run(command).returncode


PLANNED = ("slurm", "kubernetes", "sky", "modal", "ssh")
SKY_CLOUDS = ("aws", "gcp", "azure", "lambda", "runpod")
WITH_REGIONS = ("aws", "gcp", "azure")


def planned_request(
    path: Path, text: str, on: str, cluster: Cluster, price: Price | None, options: Mapping[str, str | None]
) -> LaunchRequest:
    """Where the planned run goes; `text` is its spec. `options` are those that only the user knows: image, volume,
    install, hosts."""
    if on not in PLANNED:
        raise UserError(f"--emit {on}: write one of {', '.join(PLANNED)}")
    given = {key: text for key, text in options.items() if text}
    hosts = tuple(host.strip() for host in given.pop("hosts", "").split(",") if host.strip())
    if hosts and len(hosts) != cluster.nodes:
        raise UserError(f"--hosts: names {len(hosts)} machines, and the plan has {cluster.nodes} nodes: name as many")
    more: dict[str, str] = {}
    if on in ("sky", "modal"):
        more["gpu_type"] = cluster.gpu.name.replace(" ", "")
    if on == "sky" and price is not None and price.provider in SKY_CLOUDS:
        more["cloud"] = f"{price.provider}/{price.region}" if price.provider in WITH_REGIONS else price.provider
    firm = on == "sky" and price is not None and price.term != "spot"
    run = named(validate(parse(text, str(path))), path)
    request = LaunchRequest(run, on, cluster.nodes, cluster.per_node, on_demand=firm, hosts=hosts)
    request = replace(request, **given, **more)  # type: ignore[arg-type]
    try:
        return check(request)
    except UserError as fault:
        raise UserError(str(fault).replace("--on ", "--emit ")) from None


def write_planned(request: LaunchRequest, tell: Callable[[str], None]) -> None:
    """All files, and the command that submits them."""
    files = generate(request)
    write_files(request, files)
    for name in files:
        tell(f"written  {request.folder / name}")
    tell(f"start    {shlex.join(TARGETS[request.on].submit(request))}")
