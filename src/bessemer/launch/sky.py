"""SkyPilot: a managed job on whichever cloud has the GPUs, on spot machines that are replaced when they are taken away.

A new machine has an empty disk. One node copies its checkpoints to the bucket and fetches the newest back; several
nodes write the run straight into the bucket, since all of them have to read it.
"""

from __future__ import annotations

import json
import os
import re
import shlex

from bessemer.launch.job import JobState, LaunchJob, call
from bessemer.launch.request import KEYS, LaunchRequest
from bessemer.spec.schema import RunSpec

CLIENT = "sky"
FILE = "sky.yaml"
BUCKET = "/bessemer"

TEMPLATE = """# {name}: submit with `{submit}`.
name: {label}
num_nodes: {nodes}

resources:{resources}
  # A spot machine costs a third to a half and may be taken away; the job then moves on, to another region if it has to.
  use_spot: {spot}
  job_recovery:
    strategy: EAGER_NEXT_REGION
    # A crash of the run itself is tried again this often; being taken away does not count.
    max_restarts_on_errors: {max_restarts}

# This folder goes along (as .skyignore or .gitignore allow): the spec's relative paths start here.
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


def placed(spec: RunSpec, request: LaunchRequest) -> RunSpec:
    """The spec with its checkpoints where a new machine finds them."""
    if not request.volume:
        return spec
    if request.nodes > 1:
        return spec.model_copy(update={"runs": f"{BUCKET}/runs"})
    remote = spec.checkpoint.remote or f"file://{BUCKET}/checkpoints"
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"remote": remote})})


def write(request: LaunchRequest) -> dict[str, str]:
    quote = json.dumps
    wanted = [
        ("infra", quote(request.cloud) if request.cloud else ""),
        ("accelerators", quote(f"{request.gpu_type}:{request.gpus}") if request.gpus else ""),
        ("cpus", f"{request.cpus_wanted}+"),
        ("memory", quote(request.memory) if request.memory else ""),
        ("image_id", quote(f"docker:{request.image}") if request.image else ""),
    ]
    bucket = ""
    if request.volume:
        # Cached: writes go to the local disk first and are uploaded whole, which appending and renaming need.
        bucket = f"\n  {BUCKET}:\n    source: {quote(request.volume)}\n    mode: MOUNT_CACHED"
    setup = ""
    if request.install:
        setup = f"\nsetup: |\n  {shlex.quote(request.interpreter)} -m pip install -q {shlex.quote(request.install)}\n"
    return {
        FILE: TEMPLATE.format(
            name=request.name, label=request.label, nodes=request.nodes, submit=shlex.join(submit(request)),
            resources="".join(f"\n  {key}: {value}" for key, value in wanted if value),
            spot="false" if request.on_demand else "true", max_restarts=request.max_restarts,
            workdir=quote(request.workdir), folder=quote(str(request.folder)), bucket=bucket, setup=setup,
            port=request.port,
        )
    }  # fmt: skip


def submit(request: LaunchRequest) -> list[str]:
    """Keys that are set here go along by name; SkyPilot reads their values and keeps them out of logs."""
    keys = [word for key in KEYS if key in os.environ for word in ("--secret", key)]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *keys, f"{request.folder}/{FILE}"]


def job_id(request: LaunchRequest, printed: str) -> str:
    found = re.search(r"(?i)job id:?\s*(\d+)", re.sub(r"\x1b\[[0-9;]*m", "", printed))
    return found[1] if found else request.label


def states(job: LaunchJob) -> list[JobState]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", call(["sky", "jobs", "queue"]))
    rows = [row for row in plain.splitlines() if job.id in row.split()]
    words = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "SUCCEEDED", "CANCELLING", "CANCELLED")
    return [
        JobState(job.id, next((w for w in row.split() if w in words or w.startswith("FAILED")), "UNKNOWN"), detail=row)
        for row in rows
    ] or [JobState(job.id, "GONE", detail="not in `sky jobs queue`")]


def logs(job: LaunchJob) -> list[str]:
    by = [job.id] if job.id.isdigit() else ["--name", job.id]
    return ["sky", "jobs", "logs", "--no-follow", *by]


def cancel(job: LaunchJob) -> list[str]:
    by = [job.id] if job.id.isdigit() else ["--name", job.id]
    return ["sky", "jobs", "cancel", "--yes", *by]
