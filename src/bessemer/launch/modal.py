"""Launches on Modal: an app with one function that runs node.sh on GPUs, and a volume that holds data and runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from bessemer.errors import UserError
from bessemer.launch.job import JobState, LaunchJob, run_client
from bessemer.launch.request import LaunchRequest
from bessemer.spec.quantity import parse_bytes

CLIENT = "modal"
FILE = "modal_app.py"
WORK = "/work"
MAX_CALL_S = 24 * 3600  # Modal's limit; a retry continues the run

TEMPLATE = '''"""{name}: submit with `modal run --detach {file}`.

The volume is the working folder: `modal volume put {volume} data /data` uploads data, and runs appear under it.
"""

import os
import subprocess

import modal

# numactl binds each worker to the CPUs near its GPU.
image = {image}.apt_install("numactl").add_local_dir({folder}, "/launch")
volume = modal.Volume.from_name({volume_name}, create_if_missing=True)
app = modal.App({label})


@app.function(
    image=image,{gpu}
    cpu={cpus},{memory}
    volumes={{{work}: volume}},{secrets}
    timeout={timeout},  # per attempt, at most a day
    # Containers are preempted or reach the limit: every attempt continues from the last checkpoint. Modal allows ten.
    retries=modal.Retries(max_retries=10, initial_delay=10.0, backoff_coefficient=1.0),
    single_use_containers=True,  # each attempt has a fresh process and an empty GPU
){clustered}
def train() -> None:
    environment = dict(os.environ){rendezvous}
    volume.reload()  # see what the previous attempt wrote
    subprocess.run(["bash", "/launch/node.sh"], check=True, env=environment)


@app.local_entrypoint()
def main() -> None:
    print("call", train.spawn().object_id)
'''

RENDEZVOUS = """
    cluster = modal.Cluster.from_context()
    address = cluster.container_ips()[0]
    head = f"[{{address}}]" if ":" in address else address
    environment |= {{"PET_NNODES": "{nodes}", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ID": {label}}}
    environment["PET_RDZV_ENDPOINT"] = f"{{head}}:{port}\""""


def in_container(request: LaunchRequest) -> LaunchRequest:
    return replace(request, workdir=WORK)


def write(request: LaunchRequest) -> dict[str, str]:
    quote = json.dumps  # a JSON string is a Python string
    base = f"modal.Image.from_registry({quote(request.image)})" if request.image else "modal.Image.debian_slim()"
    if request.install:
        base += f".pip_install({quote(request.install)})"
    volume = request.volume or "bessemer"
    several = request.nodes > 1
    rendezvous = RENDEZVOUS.format(nodes=request.nodes, label=quote(request.label), port=request.port)
    return {
        FILE: TEMPLATE.format(
            name=request.name, file=f"{request.folder}/{FILE}", volume=volume, volume_name=quote(volume),
            label=quote(request.label), image=base, folder=quote(str(request.folder)), work=quote(WORK),
            gpu=f"\n    gpu={quote(f'{request.gpu_type}:{request.gpus}')}," if request.gpus else "",
            cpus=request.cpus_per_node,
            memory=f"\n    memory={to_mebibytes(request.memory)}," if request.memory else "",
            secrets=f"\n    secrets=[modal.Secret.from_name({quote(request.secret)})]," if request.secret else "",
            timeout=min(request.seconds or MAX_CALL_S, MAX_CALL_S),
            clustered=f"\n@modal.clustered(size={request.nodes}, rdma=True)" if several else "",
            rendezvous=rendezvous if several else "",
        )
    }  # fmt: skip


def to_mebibytes(memory: str) -> int:
    """Memory in MiB, as Modal takes it."""
    try:
        return max(1, parse_bytes(memory) >> 20)
    except ValueError as error:
        raise UserError(f"--memory: {error}") from None


def submit(request: LaunchRequest) -> list[str]:
    return ["modal", "run", "--detach", f"{request.folder}/{FILE}"]


def job_id(request: LaunchRequest, output: str) -> str:
    match = re.search(r"\bap-\w+", output)
    return match[0] if match else request.label


def states(job: LaunchJob) -> list[JobState]:
    apps = json.loads(run_client(["modal", "app", "list", "--json"]))
    rows = [{key.lower().replace(" ", "_"): str(value) for key, value in app.items()} for app in apps]
    return [
        JobState(
            row.get("app_id", job.id), row.get("state", ""), row.get("created_at", ""), f"{row.get('tasks', '')} tasks"
        )
        for row in rows
        if job.id in row.values()
    ] or [JobState(job.id, "GONE", detail="not in `modal app list`")]


def logs(job: LaunchJob) -> list[str]:
    return ["modal", "app", "logs", job.id]


def cancel(job: LaunchJob) -> list[str]:
    return ["modal", "app", "stop", job.id]
