"""Slurm: a batch script that starts node.sh once on every node, and puts itself back into the queue when time runs out.

Ways to an end, and who acts: near the time limit Slurm sends SIGUSR1 to the batch shell alone, which hands it to the
step and then requeues; preemption, `scontrol requeue` and `scancel` send SIGTERM to the step itself. torchrun passes
either on to the workers, which save and leave.
"""

from __future__ import annotations

import shlex
import shutil

from bessemer.errors import UserError
from bessemer.launch.job import JobState, LaunchJob, call
from bessemer.launch.request import LaunchRequest

CLIENT = "sbatch"
SCRIPT = "job.sbatch"
WARNING_S = 120

BODY = """
set -u
# The job's own number, in the form that names one task of an array and not all of them.
job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}}}"
job="${{job:-$SLURM_JOB_ID}}"
{rendezvous}
# srun no longer takes this over from sbatch by itself (since Slurm 22.05).
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-1}}"

# The time limit is near: the step gets the signal too, the workers save and leave, and the job is queued again.
warned=""
# shellcheck disable=SC2317 # the trap calls it
warn() {{
  warned=yes
  echo "$(date) job $job: time is nearly up; saving"
  kill -USR1 "$step" 2> /dev/null
}}
trap warn USR1
# Preempted or cancelled: Slurm sends the step SIGTERM as well. This shell only has to outlive it.
trap 'echo "$(date) job $job: asked to end"' TERM

echo "$(date) job $job: start ${{SLURM_RESTART_COUNT:-0}} on $SLURM_JOB_NODELIST"
# One task a node: torchrun starts the workers. A node that fails ends the step, so that nobody waits.
# No binding by srun: the task needs all of the job's CPUs and GPUs of its node, and torchrun binds each worker.
srun --kill-on-bad-exit=1 --cpu-bind=none {options}bash {node} &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do # a trapped signal ends `wait`, not the step
  wait "$step"
  code=$?
done

if [ -n "$warned" ] && [ "$code" -ne 0 ]; then
  echo "$(date) job $job: saved; back into the queue"
  scontrol requeue "$job"
fi
exit "$code"
"""

RENDEZVOUS = """
# Workers meet at the first node, on a port of this job's own, so that two jobs on a node do not meet each other.
# It tells its own address: Slurm's names of nodes need not be known to the nodes.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="$(srun --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" {options}\
  {python} -m bessemer.parallel.address "${{nodes[@]:1:4}}" | tail -n 1)"
if [ -z "$head" ]; then
  echo "job $job: ${{nodes[0]}} did not tell its address" >&2
  exit 1
fi
export PET_NNODES="$SLURM_NNODES" PET_RDZV_BACKEND=c10d PET_RDZV_ID="$SLURM_JOB_ID"
export PET_RDZV_ENDPOINT="$head:$((20000 + SLURM_JOB_ID % 10000))"
"""


def slurm_time(seconds: int) -> str:
    """D-HH:MM:SS."""
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}-{h:02}:{m:02}:{s:02}"


def _directives(request: LaunchRequest) -> list[str]:
    log = f"{request.folder}/slurm-" + ("%A_%a" if request.array else "%j") + ".log"
    asked = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cpus_wanted}",
    ]
    if request.gpus:
        asked.append(f"--gpus-per-node={request.gpu_type + ':' if request.gpu_type else ''}{request.gpus}")
    values = {
        "mem": request.memory, "time": slurm_time(request.seconds) if request.seconds else "",
        "partition": request.partition, "account": request.account, "qos": request.qos, "array": request.array,
    }  # fmt: skip
    asked += [f"--{key}={value}" for key, value in values.items() if value]
    return [
        *asked,
        f"--chdir={request.workdir}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{WARNING_S}",
    ]


WHY = {
    "--ntasks-per-node": "One torchrun a node.",
    "--cpus-per-task": "CPUs of each node; without it Slurm gives one.",
    "--output": "One file a job (a task, in an array), which restarts append to.",
    "--requeue": "A preempted job, or one whose node died, goes back into the queue instead of ending.",
    "--signal": f"SIGUSR1 to this script {WARNING_S} s before the time limit; before preemption too, where the site "
    "has set PreemptParameters=send_user_signal.",
}


def write(request: LaunchRequest) -> dict[str, str]:
    if any(c.isspace() for c in f"{request.workdir}{request.folder}"):
        raise UserError(f"{request.workdir}: #SBATCH lines cannot hold a path with spaces; launch from another folder")
    lines = ["#!/bin/bash", f"# {request.name}: submit with `sbatch {request.folder}/{SCRIPT}`."]
    for directive in _directives(request):
        why = WHY.get(directive.partition("=")[0])
        lines += ([f"# {why}"] if why else []) + [f"#SBATCH {directive}"]
    options = ["--gpu-bind=none"] if request.gpus else []
    if request.image:  # pyxis, the container plugin for Slurm
        mounts = ",".join(dict.fromkeys(f"{path}:{path}" for path in (request.workdir, str(request.folder))))
        options += [f"--container-image={shlex.quote(request.image)}", f"--container-mounts={mounts}"]
    words = "".join(f"{option} " for option in options)
    meeting = RENDEZVOUS.format(options=words, python=shlex.quote(request.interpreter))
    body = BODY.format(
        rendezvous=meeting if request.nodes > 1 else "", options=words, node=shlex.quote(f"{request.folder}/node.sh")
    )
    return {SCRIPT: "\n".join(lines) + "\n" + body}


def submit(request: LaunchRequest) -> list[str]:
    return ["sbatch", "--parsable", f"{request.folder}/{SCRIPT}"]


def job_id(request: LaunchRequest, printed: str) -> str:
    return printed.strip().partition(";")[0]  # ID;CLUSTER in a federation


def states(job: LaunchJob) -> list[JobState]:
    rows = call(["squeue", "--noheader", "--jobs", job.id, "--format", "%i|%T|%M|%R"], check=False).splitlines()
    found = [JobState(*map(str.strip, row.split("|", 3))) for row in rows if row.count("|") >= 3]
    if found or shutil.which("sacct") is None:
        return found or [JobState(job.id, "GONE", detail="no longer in the queue, and there is no sacct to ask")]
    past = call(["sacct", "-j", job.id, "-X", "-n", "-P", "-o", "JobID,State,Elapsed,ExitCode"], check=False)
    rows = [row for row in past.splitlines() if row.count("|") >= 3]
    if not rows:
        return [JobState(job.id, "GONE", detail="no longer in the queue, and this cluster keeps no accounts")]
    fields = [row.split("|") for row in rows]
    return [JobState(what, state, time, f"exit {code}") for what, state, time, code, *_ in fields]


def logs(job: LaunchJob) -> list[str]:
    return ["sh", "-c", f"tail -n 100 -- {shlex.quote(job.folder)}/slurm-{shlex.quote(job.id)}*.log"]


def cancel(job: LaunchJob) -> list[str]:
    return ["scancel", job.id]
