"""node.sh: what every node of a job runs, whoever started it: settings, then one torchrun with a worker for each GPU.

Targets say who meets where through torchrun's own variables (PET_NNODES, PET_RDZV_ENDPOINT, ...), so this one script
serves them all. Values can be changed from outside: what is already in the environment is kept.
"""

from __future__ import annotations

import shlex

from bessemer.launch.request import LaunchRequest
from bessemer.parallel.agent import SAVE_S, SIGNALS

HEAD = """#!/bin/bash
# What each node of {name} runs: one torchrun with {processes} worker(s). Edit it and submit again as you like.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
{chdir}
# Your keys, if there is such a file: they are read where they are needed and written nowhere. See .env.example.
if [ -f .env ]; then
  set -a
  # shellcheck disable=SC1091
  . ./.env
  set +a
fi

# Signals that torchrun hands on to the workers. SIGUSR1 is a scheduler's warning: they finish the step, save and leave.
export PET_SIGNALS_TO_HANDLE="{signals}"
# Seconds they get for it before they are killed. Raise it when a save of your model takes longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${{TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-{save_s}}}"
"""

GPU = """
# CPU threads of each worker. Without it torchrun gives them one, and preparing batches can hold up the GPU.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
# NCCL's warnings go to the log. On a new cluster set INFO once: it tells which network and which links it found.
export NCCL_DEBUG="${{NCCL_DEBUG:-WARN}}"
# The last collectives of each rank are kept, and written to files when one times out: who waited for whom.
export TORCH_FR_BUFFER_SIZE="${{TORCH_FR_BUFFER_SIZE:-2000}}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${{TORCH_NCCL_DUMP_ON_TIMEOUT:-1}}"
"""

NETWORK = """
# The interface that nodes reach each other by. NCCL passes over lo and docker*, and takes InfiniBand first by itself:
# set these when workers meet but the first collective hangs (`ip -br addr` lists interfaces).
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# InfiniBand or RoCE adapters to use (`ibv_devinfo -l`). Set it when some of them belong to storage or are down.
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# Patience with a lost packet: 4.096 us * 2^N a try, 7 tries. Raise it to 22 when large jobs die of completions with
# status 12 (retries exceeded) although the links are up.
# export NCCL_IB_TIMEOUT=22
# RDMA locks memory: with a limit NCCL fails at start. Slurm passes the limit of the submitting shell on.
if [ "$(ulimit -l)" != unlimited ]; then
  echo "node.sh: 'ulimit -l' is $(ulimit -l) KiB; RDMA needs it unlimited (/etc/security/limits.conf)" >&2
fi
"""

BINDING = """
# Each worker takes the GPU of its local rank. Its threads and memory are bound to the NUMA node that this GPU hangs on;
# torchrun does that with numactl. Leave it out where a container hides the machine's topology.
numa=""
if command -v numactl > /dev/null; then numa="--numa-binding=node"; fi
"""


def node_script(request: LaunchRequest, chdir: bool = True) -> str:
    """The script. `chdir` False: the target has already gone to the working folder."""
    go = f"cd {shlex.quote(request.workdir)}\n" if chdir else ""
    parts = [HEAD.format(name=request.name, processes=request.processes, chdir=go, signals=SIGNALS, save_s=SAVE_S)]
    if request.gpus:
        parts.append(GPU.format(threads=max(1, request.cpus_wanted // request.gpus)))
        if request.nodes > 1:
            parts.append(NETWORK)
        parts.append(BINDING)
    words = [shlex.quote(request.interpreter), "-m bessemer.parallel.agent"]  # torchrun, with exit codes of its own
    if request.nodes == 1:
        words.append("--standalone")  # a rendezvous of its own, on a free port
    words += [f"--nproc-per-node={request.processes}", f"--max-restarts={request.max_restarts}"]
    if request.gpus:
        words.append('${numa:+"$numa"}')
    words.append('-m bessemer train "$here/spec.yaml" --plain')
    if request.array:
        words.append(f'--set name={request.name}-"$SLURM_ARRAY_TASK_ID" --set seed="$SLURM_ARRAY_TASK_ID"')
    meeting = (
        ""
        if request.nodes == 1
        else ': "${PET_NNODES:?}" "${PET_RDZV_BACKEND:?}" "${PET_RDZV_ENDPOINT:?}"  # who meets where\n'
    )
    if request.on == "slurm" and request.nodes > 1:
        meeting += 'export PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))"  # not left to a guess from names\n'
    parts.append(f"\n{meeting}exec {' '.join(words)}\n")
    return "".join(parts)
