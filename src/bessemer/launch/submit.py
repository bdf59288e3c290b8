"""Submits a LaunchRequest: writes its files, checks them for secrets, calls the target's client, records the job.

`bessemer plan --emit` writes the same files for the nodes and GPUs that were planned.
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
from bessemer.launch.job import RECORD, JobState, LaunchJob, LaunchTarget, node_script, read_job, run_client
from bessemer.launch.local import Queue
from bessemer.launch.request import LaunchRequest, check_request, refuse_secrets
from bessemer.plan.cost_model.cost import Price
from bessemer.plan.hardware import Cluster
from bessemer.run.directory import Run
from bessemer.spec.document import parse_yaml
from bessemer.spec.load import dump_spec, validate, with_default_name
from bessemer.storage import write_atomic

TARGETS: dict[str, LaunchTarget] = {
    "slurm": cast(LaunchTarget, slurm), "kubernetes": cast(LaunchTarget, kubernetes), "sky": cast(LaunchTarget, sky),
    "modal": cast(LaunchTarget, modal), "ssh": cast(LaunchTarget, ssh), "local": cast(LaunchTarget, local),
}  # fmt: skip
WAIT_POLL_S = 10.0  # between two questions about a job's state
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


def generate_files(request: LaunchRequest) -> dict[str, str]:
    """Every file of the request, by name. UserError if one of them contains a secret."""
    target = TARGETS[request.on]
    spec, on_node = request.spec, request
    if request.on == "sky":
        spec = sky.with_remote_checkpoints(spec, request)
    elif request.on == "modal":
        on_node = modal.in_container(request)
    files = target.write(request)
    if request.on != "kubernetes":  # whose ConfigMap holds both
        files |= {"node.sh": node_script(on_node, chdir=request.on != "sky"), "spec.yaml": dump_spec(spec)}
    refuse_secrets(files)
    return files


def write_files(request: LaunchRequest, files: dict[str, str]) -> None:
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(request.folder / name, text)
    except OSError as error:
        raise UserError(
            f"{request.folder}: cannot be written: {error.strerror}; set `runs` in the spec to a folder of yours"
        ) from None


def active_job(request: LaunchRequest) -> tuple[LaunchJob, JobState] | None:
    """The job that already runs or waits for the same run, and its state."""
    path = request.folder / RECORD
    if not path.exists():
        return None
    job = read_job(path)
    try:
        states = TARGETS[job.on].states(job)
    except UserError:
        return None  # its client does not know the job: the run's lock decides
    return (job, states[0]) if any(is_active(state) for state in states) else None


def refuse_active_job(request: LaunchRequest) -> None:
    """Refuse a second job for the same run. The run's lock would stop it too, but only after hours in a queue."""
    if active := active_job(request):
        job, state = active
        raise UserError(
            f"{job.name} is already {job.on} job {job.id} ({state.state}): `bessemer launch cancel {job.name}` "
            "first, or give this one another name with --set name=..."
        )


def wait_for_job(job: LaunchJob, report: Callable[[str], None], poll_s: float = WAIT_POLL_S) -> int:
    """Wait until a job has ended, reporting changes of its state; 0 if its run is finished, else 1."""
    reported = ""
    while any(map(is_active, states := TARGETS[job.on].states(job))):
        if states[0].state != reported:
            reported = states[0].state
            report(f"waiting  for {job.name}, {job.on} job {job.id}: {reported}")
        time.sleep(poll_s)
    state = Run(Path(job.folder).parent).state
    report(f"ended    {job.name}: {state}")
    return 0 if state == "finished" else 1


def is_active(state: JobState) -> bool:
    return not state.state.upper().startswith(ENDED)


def submit(request: LaunchRequest, report: Callable[[str], None]) -> LaunchJob | None:
    """Write the files and submit. Reports the command and returns None if the client is not installed here."""
    files = generate_files(request)
    refuse_active_job(request)
    write_files(request, files)
    for name in files:
        report(f"written  {request.folder / name}")
    if request.on == "local":
        local.wait_and_run(request, Queue(), report)
    target = TARGETS[request.on]
    command = target.submit(request)
    if shutil.which(target.CLIENT) is None:
        report(f"{target.CLIENT} is not installed here. On a machine that has it, run:\n  {shlex.join(command)}")
        return None
    output = run_client(command)
    job = LaunchJob(
        request.on, request.name, target.job_id(request, output), str(request.folder), time.time(), request.nodes,
        request.gpus, request.namespace or (request.hosts[0] if request.hosts else ""),
    )  # fmt: skip
    job.save()
    return job


def show_logs(job: LaunchJob) -> int:
    """Show the client's output as it comes; its exit code."""
    command = TARGETS[job.on].logs(job)
    if shutil.which(command[0]) is None:
        run_client(command)  # raises the error
    return subprocess.run(command).returncode


PLAN_TARGETS = ("slurm", "kubernetes", "sky", "modal", "ssh")
SKY_CLOUDS = ("aws", "gcp", "azure", "lambda", "runpod")
REGIONAL_CLOUDS = ("aws", "gcp", "azure")


def planned_request(
    path: Path, text: str, on: str, cluster: Cluster, price: Price | None, options: Mapping[str, str | None]
) -> LaunchRequest:
    """The request of a planned run; `text` is its spec. `options` are those that only the user knows: image, volume,
    install, hosts."""
    if on not in PLAN_TARGETS:
        raise UserError(f"--on {on}: write one of {', '.join(PLAN_TARGETS)}")
    given_options = {key: value for key, value in options.items() if value}
    hosts = tuple(host.strip() for host in given_options.pop("hosts", "").split(",") if host.strip())
    if hosts and len(hosts) != cluster.nodes:
        raise UserError(f"--hosts: lists {len(hosts)} machines, but the plan has {cluster.nodes} nodes: list as many")
    derived: dict[str, str] = {}
    if on in ("sky", "modal"):
        derived["gpu_type"] = cluster.gpu.name.replace(" ", "")
    if on == "sky" and price is not None and price.provider in SKY_CLOUDS:
        derived["cloud"] = f"{price.provider}/{price.region}" if price.provider in REGIONAL_CLOUDS else price.provider
    on_demand = on == "sky" and price is not None and price.term != "spot"
    run = with_default_name(validate(parse_yaml(text, str(path))), path)
    request = LaunchRequest(run, on, cluster.nodes, cluster.per_node, on_demand=on_demand, hosts=hosts)
    request = replace(request, **given_options, **derived)  # type: ignore[arg-type]
    return check_request(request)


def write_planned(request: LaunchRequest) -> tuple[list[str], str]:
    """Write all files; their paths and the command that submits them."""
    files = generate_files(request)
    write_files(request, files)
    return [str(request.folder / name) for name in files], shlex.join(TARGETS[request.on].submit(request))
