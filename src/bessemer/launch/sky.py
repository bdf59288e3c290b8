"""Launches through SkyPilot: a managed job on any cloud with the GPUs; preempted spot machines are replaced.

A new machine has an empty disk. A single node copies its checkpoints to the bucket and downloads the newest; several
nodes write the run into the bucket itself, because all of them read it.
"""

from __future__ import annotations

import json
import os
import re
import shlex

from bessemer.launch.job import JobState, LaunchJob, run_client
from bessemer.launch.request import KEY_NAMES, LaunchRequest
from bessemer.spec.schema import RunSpec

CLIENT = "sky"
FILE = "sky.yaml"
BUCKET = "/bessemer"

TEMPLATE = """# {name}: submit with `{submit}`.
name: {label}
num_nodes: {nodes}

resources:{resources}
  # A spot machine costs a third to a half and may be preempted; the job then moves, to another region if needed.
  use_spot: {spot}
  job_recovery:
    strategy: EAGER_NEXT_REGION
    # Restarts after a crash of the run itself; preemptions do not count.
    max_restarts_on_errors: {max_restarts}

# This folder is uploaded (except .skyignore or .gitignore): relative paths of the spec start here.
workdir: {workdir}
file_mounts:
  ~/bessemer-launch: {folder}{bucket}
{setup}
run: |
  export PET_NNODES="$SKYPILOT_NUM_NODES" PET_RDZV_BACKEND=c10d PET_RDZV_ID={label}
  PET_RDZV_ENDPOINT="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}"
  export PET_RDZV_ENDPOINT
  exec bash ~/bessemer-launch/node.sh
"""


def with_remote_checkpoints(spec: RunSpec, request: LaunchRequest) -> RunSpec:
    """The spec with its checkpoints in the bucket, where a new machine finds them."""
    if not request.volume:
        return spec
    if request.nodes > 1:
        return spec.model_copy(update={"runs": f"{BUCKET}/runs"})
    remote = spec.checkpoint.remote or f"file://{BUCKET}/checkpoints"
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"remote": remote})})


def write(request: LaunchRequest) -> dict[str, str]:
    quote = json.dumps
    resources = [
        ("infra", quote(request.cloud) if request.cloud else ""),
        ("accelerators", quote(f"{request.gpu_type}:{request.gpus}") if request.gpus else ""),
        ("cpus", f"{request.cpus_per_node}+"),
        ("memory", quote(request.memory) if request.memory else ""),
        ("image_id", quote(f"docker:{request.image}") if request.image else ""),
    ]
    bucket = ""
    if request.volume:
        # Cached: files are written to the local disk and then uploaded, because runs append to and rename files.
        bucket = f"\n  {BUCKET}:\n    source: {quote(request.volume)}\n    mode: MOUNT_CACHED"
    setup = ""
    if request.install:
        setup = f"\nsetup: |\n  {shlex.quote(request.interpreter)} -m pip install -q {shlex.quote(request.install)}\n"
    return {
        FILE: TEMPLATE.format(
            name=request.name, label=request.label, nodes=request.nodes, submit=shlex.join(submit(request)),
            resources="".join(f"\n  {key}: {value}" for key, value in resources if value),
            spot="false" if request.on_demand else "true", max_restarts=request.max_restarts,
            workdir=quote(request.workdir), folder=quote(str(request.folder)), bucket=bucket, setup=setup,
            port=request.port,
        )
    }  # fmt: skip


def submit(request: LaunchRequest) -> list[str]:
    """Keys that are set here are passed by name; SkyPilot reads their values and keeps them out of logs."""
    keys = [word for key in KEY_NAMES if key in os.environ for word in ("--secret", key)]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *keys, f"{request.folder}/{FILE}"]


def job_id(request: LaunchRequest, output: str) -> str:
    match = re.search(r"(?i)job id:?\s*(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", output))
    return match[1] if match else request.label


def states(job: LaunchJob) -> list[JobState]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", run_client(["sky", "jobs", "queue"]))
    rows = [row for row in plain.splitlines() if job.id in row.split()]
    words = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "SUCCEEDED", "CANCELLING", "CANCELLED")
    return [
        JobState(job.id, next((w for w in row.split() if w in words or w.startswith("FAILED")), "UNKNOWN"), detail=row)
        for row in rows
    ] or [JobState(job.id, "GONE", detail="not in `sky jobs queue`")]


def logs(job: LaunchJob) -> list[str]:
    return ["sky", "jobs", "logs", "--no-follow", *_job_option(job)]


def cancel(job: LaunchJob) -> list[str]:
    return ["sky", "jobs", "cancel", "--yes", *_job_option(job)]


def _job_option(job: LaunchJob) -> list[str]:
    return [job.id] if job.id.isdigit() else ["--name", job.id]
