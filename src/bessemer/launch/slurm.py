"""Launches on Slurm: a batch script that starts node.sh on every node and requeues itself near the time limit.

Near the time limit Slurm sends SIGUSR1 to the batch shell only, which passes it to the step and then requeues the job.
Preemption, `scontrol requeue` and `scancel` send SIGTERM to the step itself. torchrun passes either signal on to the
workers, which save and exit.
"""

from __future__ import annotations

import shlex
import shutil

from bessemer.errors import UserError
from bessemer.launch.job import JobState, LaunchJob, run_client
from bessemer.launch.request import LaunchRequest

CLIENT = "sbatch"
SCRIPT = "job.sbatch"
WARNING_S = 120

BODY = """
set -u
# The job id; for an array, of this task only.
job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}}}"
job="${{job:-$SLURM_JOB_ID}}"
{rendezvous}
# Since Slurm 22.05 srun no longer inherits this from sbatch.
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"

# The time limit is near: pass the signal to the step; the workers save and exit, and the job is requeued.
warned=""
# shellcheck disable=SC2317 # the trap calls it
warn() {{
  warned=yes
  echo "$(date) job $job: the time limit is near; saving"
  kill -USR1 "$step" 2> /dev/null
}}
trap warn USR1
# Preempted or cancelled: Slurm sends SIGTERM to the step as well. This shell only has to outlive it.
trap 'echo "$(date) job $job: received SIGTERM"' TERM

echo "$(date) job $job: start ${{SLURM_RESTART_COUNT:-0}} on $SLURM_JOB_NODELIST"
# One task per node: torchrun starts the workers. A failed node ends the step, so that the others do not wait.
# No binding by srun: the task needs all CPUs and GPUs of its node, and torchrun binds each worker.
srun --kill-on-bad-exit=1 --cpu-bind=none {options}bash {node} &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do # a trapped signal ends `wait`, not the step
  wait "$step"
  code=$?
done

if [ -n "$warned" ] && [ "$code" -ne 0 ]; then
  echo "$(date) job $job: saved; requeueing"
  scontrol requeue "$job"
fi
exit "$code"
"""

RENDEZVOUS = """
# The rendezvous is on the first node, on a port of this job, so that two jobs on a node do not meet each other.
# The node reports its own address, because Slurm's node names need not resolve on the nodes.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="$(srun --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" {options}\
  {python} -m bessemer.parallel.address "${{nodes[@]:1:4}}" | tail -n 1)"
if [ -z "$head" ]; then
  echo "job $job: ${{nodes[0]}} did not report its address" >&2
  exit 1
fi
export PET_NNODES="$SLURM_NNODES" PET_RDZV_BACKEND=c10d PET_RDZV_ID="$SLURM_JOB_ID"
export PET_RDZV_ENDPOINT="$head:$((20000 + SLURM_JOB_ID % 10000))"
"""


def format_time(seconds: int) -> str:
    """D-HH:MM:SS."""
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}-{h:02}:{m:02}:{s:02}"


def _directives(request: LaunchRequest) -> list[str]:
    log = f"{request.folder}/slurm-" + ("%A_%a" if request.array else "%j") + ".log"
    directives = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cpus_per_node}",
    ]
    if request.gpus:
        directives.append(f"--gpus-per-node={request.gpu_type + ':' if request.gpu_type else ''}{request.gpus}")
    values = {
        "mem": request.memory, "time": format_time(request.seconds) if request.seconds else "",
        "partition": request.partition, "account": request.account, "qos": request.qos, "array": request.array,
    }  # fmt: skip
    directives += [f"--{key}={value}" for key, value in values.items() if value]
    return [
        *directives,
        f"--chdir={request.workdir}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{WARNING_S}",
    ]


COMMENTS = {
    "--ntasks-per-node": "One torchrun per node.",
    "--cpus-per-task": "CPUs per node; the default is one.",
    "--output": "One file per job (per task of an array); restarts append to it.",
    "--requeue": "Requeue the job when it is preempted or a node fails.",
    "--signal": f"SIGUSR1 to this script {WARNING_S} s before the time limit; before preemption too, where the site "
    "has set PreemptParameters=send_user_signal.",
}


def write(request: LaunchRequest) -> dict[str, str]:
    if any(c.isspace() for c in f"{request.workdir}{request.folder}"):
        raise UserError(f"{request.workdir}: #SBATCH lines cannot hold a path with spaces; launch from another folder")
    lines = ["#!/bin/bash", f"# {request.name}: submit with `sbatch {request.folder}/{SCRIPT}`."]
    for directive in _directives(request):
        comment = COMMENTS.get(directive.partition("=")[0])
        lines += ([f"# {comment}"] if comment else []) + [f"#SBATCH {directive}"]
    options = ["--gpu-bind=none"] if request.gpus else []
    if request.image:  # pyxis, the container plugin for Slurm
        mounts = ",".join(dict.fromkeys(f"{path}:{path}" for path in (request.workdir, str(request.folder))))
        options += [f"--container-image={shlex.quote(request.image)}", f"--container-mounts={mounts}"]
    words = "".join(f"{option} " for option in options)
    rendezvous = RENDEZVOUS.format(options=words, python=shlex.quote(request.interpreter))
    body = BODY.format(
        rendezvous=rendezvous if request.nodes > 1 else "", options=words, node=shlex.quote(f"{request.folder}/node.sh")
    )
    return {SCRIPT: "\n".join(lines) + "\n" + body}


def submit(request: LaunchRequest) -> list[str]:
    return ["sbatch", "--parsable", f"{request.folder}/{SCRIPT}"]


def job_id(request: LaunchRequest, output: str) -> str:
    return output.strip().partition(";")[0]  # ID;CLUSTER in a federation


def states(job: LaunchJob) -> list[JobState]:
    rows = run_client(["squeue", "--noheader", "--jobs", job.id, "--format", "%i|%T|%M|%R"], check=False).splitlines()
    active = [JobState(*map(str.strip, row.split("|", 3))) for row in rows if row.count("|") >= 3]
    if active or shutil.which("sacct") is None:
        return active or [JobState(job.id, "GONE", detail="no longer in the queue, and sacct is not installed")]
    history = run_client(["sacct", "-j", job.id, "-X", "-n", "-P", "-o", "JobID,State,Elapsed,ExitCode"], check=False)
    rows = [row for row in history.splitlines() if row.count("|") >= 3]
    if not rows:
        return [JobState(job.id, "GONE", detail="no longer in the queue, and this cluster has no accounting")]
    fields = [row.split("|") for row in rows]
    return [JobState(what, state, time, f"exit {code}") for what, state, time, code, *_ in fields]


def logs(job: LaunchJob) -> list[str]:
    return ["sh", "-c", f"tail -n 100 -- {shlex.quote(job.folder)}/slurm-{shlex.quote(job.id)}*.log"]


def cancel(job: LaunchJob) -> list[str]:
    return ["scancel", job.id]
