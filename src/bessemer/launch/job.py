"""A launched job: its record launch/job.json, the protocol of launch targets, and node.sh, the script of every node.

node.sh exports settings and starts one torchrun with a worker for each GPU. Each target passes the rendezvous through
torchrun's own variables (PET_NNODES, PET_RDZV_ENDPOINT, ...), so one script serves all targets. Variables that are
already set in the environment win.
"""

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
from bessemer.parallel.agent import SAVE_S, SIGNALS
from bessemer.storage import write_atomic

RECORD = "job.json"


@dataclass(frozen=True)
class LaunchJob:
    """One submission. `where` is a Kubernetes namespace, or the first of the SSH hosts."""

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
    """One line of `bessemer launch status`: a job or a part of one."""

    what: str
    state: str
    time: str = ""
    detail: str = ""


class LaunchTarget(Protocol):
    """Where runs are launched. Each target is a module with these functions."""

    CLIENT: str  # the program that submits

    def write(self, request: LaunchRequest) -> dict[str, str]:
        """The target's files, by name."""
        ...

    def submit(self, request: LaunchRequest) -> list[str]:
        """The command that submits them."""
        ...

    def job_id(self, request: LaunchRequest, output: str) -> str:
        """The job's id in the output of that command."""
        ...

    def states(self, job: LaunchJob) -> list[JobState]:
        """The job's current state, as its client reports it."""
        ...

    def logs(self, job: LaunchJob) -> list[str]:
        """The command that shows its output."""
        ...

    def cancel(self, job: LaunchJob) -> list[str]: ...


def run_client(command: list[str], check: bool = True) -> str:
    """Run a target's client and return its output. UserError, with the command, if it is missing or fails."""
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not installed here; on a machine that has it, run: {shlex.join(command)}")
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if check and result.returncode:
        lines = (result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}").splitlines()
        raise UserError(f"{command[0]} failed: {lines[-1]} (the command was: {shlex.join(command)})")
    return result.stdout


def find_job(name: str, runs: Path) -> LaunchJob:
    """The submission of a run, given by name or folder."""
    for folder in (Path(name), runs / name):
        path = folder / "launch" / RECORD
        if path.is_file():
            return read_job(path)
    raise UserError(f"{name}: nothing was launched under {runs / name}; `bessemer launch status` lists launched runs")


def read_job(path: Path) -> LaunchJob:
    try:
        return LaunchJob(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a readable job record ({error}); delete it and submit again") from None


HEAD = """#!/bin/bash
# Runs on every node of {name}: one torchrun with {processes} worker(s). Edit it and submit again as needed.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
{chdir}
# Your keys, if this file exists: they are read here and written nowhere. See .env.example.
if [ -f .env ]; then
  set -a
  # shellcheck disable=SC1091
  . ./.env
  set +a
fi

# Signals that torchrun passes on to the workers. SIGUSR1 is a scheduler's warning: they finish the step, save and exit.
export PET_SIGNALS_TO_HANDLE="{signals}"
# Seconds before workers that are saving are killed. Raise it if a checkpoint of your model takes longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{save_s}}}"
"""

GPU = """
# CPU threads of each worker. torchrun's default is one, and preparing batches can then hold up the GPU.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
# NCCL's warnings go to the log. On a new cluster set INFO once: it prints the networks and links that NCCL uses.
export NCCL_DEBUG="${{NCCL_DEBUG:-WARN}}"
# Keep the last collectives of each rank and dump them when one times out: shows which rank waited for which.
export TORCH_FR_BUFFER_SIZE="${{TORCH_FR_BUFFER_SIZE:-2000}}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${{TORCH_NCCL_DUMP_ON_TIMEOUT:-1}}"
"""

NETWORK = """
# The network interface between nodes. NCCL skips lo and docker*, and prefers InfiniBand: set these if the workers meet
# but the first collective hangs (`ip -br addr` lists interfaces).
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# InfiniBand or RoCE adapters (`ibv_devinfo -l`). Set it if some of them belong to storage or are down.
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# Timeout of a lost packet: 4.096 us * 2^N per try, 7 tries. Raise it to 22 if large jobs fail with completion status 12
# (retries exceeded) although the links are up.
# export NCCL_IB_TIMEOUT=22
# RDMA locks memory: with a limit NCCL fails at start. Slurm passes on the limit of the submitting shell.
if [ "$(ulimit -l)" != unlimited ]; then
  echo "node.sh: 'ulimit -l' is $(ulimit -l) KiB; RDMA needs it unlimited (/etc/security/limits.conf)" >&2
fi
"""

BINDING = """
# Each worker uses the GPU of its local rank. torchrun binds its threads and memory to that GPU's NUMA node with
# numactl. Remove this where a container hides the machine's topology.
numa=""
if command -v numactl > /dev/null; then numa="--numa-binding=node"; fi
"""


def node_script(request: LaunchRequest, chdir: bool = True) -> str:
    """The text of node.sh. Pass `chdir=False` if the target already starts in the working folder."""
    go = f"cd {shlex.quote(request.workdir)}\n" if chdir else ""
    parts = [HEAD.format(name=request.name, processes=request.processes, chdir=go, signals=SIGNALS, save_s=SAVE_S)]
    if request.gpus:
        parts.append(GPU.format(threads=max(1, request.cpus_per_node // request.gpus)))
        if request.nodes > 1:
            parts.append(NETWORK)
        parts.append(BINDING)
    words = [shlex.quote(request.interpreter), "-m bessemer.parallel.agent"]  # torchrun with Bessemer's exit codes
    if request.nodes == 1:
        words.append("--standalone")  # a rendezvous on a free port
    words += [f"--nproc-per-node={request.processes}", f"--max-restarts={request.max_restarts}"]
    if request.gpus:
        words.append('${numa:+"$numa"}')
    words.append('-m bessemer train "$here/spec.yaml" --plain')
    if request.array:
        words.append(f'--set name={request.name}-"$SLURM_ARRAY_TASK_ID" --set seed="$SLURM_ARRAY_TASK_ID"')
    rendezvous = ""
    if request.nodes > 1:
        rendezvous = ': "${PET_NNODES:?}" "${PET_RDZV_BACKEND:?}" "${PET_RDZV_ENDPOINT:?}"  # set by the target\n'
        if request.on == "slurm":
            rendezvous += 'export PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))"  # not guessed from host names\n'
    parts.append(f"\n{rendezvous}exec {' '.join(words)}\n")
    return "".join(parts)
