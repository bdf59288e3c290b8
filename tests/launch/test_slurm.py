"""A real Slurm on this machine: one controller, two nodes, munge; nothing outside a temporary folder."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.launch import slurm
from bessemer.launch.job import LaunchJob
from bessemer.launch.request import LaunchRequest
from bessemer.launch.submit import generate_files, submit, write_files
from bessemer.run.directory import Run

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel")
PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
STEPS = 1200

CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=aa-first NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=zz-second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        any(shutil.which(program, path=PATHS) is None for program in PROGRAMS),
        reason="Slurm is not installed: apt install slurm-wlm munge",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root only"),
]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.2)


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Slurm with two idle nodes. Its clients find it by SLURM_CONF."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-aa-first", "spool-zz-second"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    host, cpus = socket.gethostname(), os.cpu_count() or 1
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, ports=free_ports(3), folder=folder, user=getpass.getuser(), cpus=cpus)
    )
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons = []
    with (folder / "daemons.log").open("w") as log:

        def start(command: list[str]) -> None:
            program = shutil.which(command[0], path=PATHS)
            daemons.append(subprocess.Popen([str(program), *command[1:]], stdout=log, stderr=log))

        try:
            start(munge)
            until(lambda: (folder / "munge.socket").exists(), "munge's socket")
            start(["slurmctld", "-D"])
            start(["slurmd", "-D", "-N", "aa-first"])
            start(["slurmd", "-D", "-N", "zz-second"])
            until(lambda: told("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "two idle nodes")
            yield folder
        finally:
            told("scancel", "--user", getpass.getuser())
            with suppress(AssertionError):  # steps that have nobody to report to would stay for ever
                until(lambda: told("squeue", "-h") == "", "an empty queue", 40)
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in daemons:
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
            del os.environ["SLURM_CONF"]


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.metrics()]


def at_step(run: Run, step: int) -> bool:
    return any(record["step"] >= step for record in run.metrics()) if run.steps_path.exists() else False


def started_again(job: LaunchJob) -> None:
    """After a requeue Slurm lets a job wait for two minutes; not here."""
    until(lambda: slurm.states(job)[0].state == "PENDING", f"job {job.id} back in the queue")
    told("scontrol", "update", f"JobId={job.id}", "StartTime=now")
    until(lambda: slurm.states(job)[0].state == "RUNNING", f"job {job.id} running again")


def test_a_job_warned_and_preempted_ends_as_if_nothing_had_happened(
    cluster: Path, ask: Callable[..., LaunchRequest]
) -> None:
    request = ask("slurm", gpus=0, cpus=1, time="1h")
    spec = request.spec.model_copy(update={"budget": request.spec.budget.model_copy(update={"steps": STEPS})})
    request = LaunchRequest(**{**vars(request), "spec": spec})
    lines: list[str] = []
    job = submit(request, lines.append)
    assert job is not None and job.id.isdigit() and any("job.sbatch" in line for line in lines)
    run, log = Run(request.folder.parent), request.folder / f"slurm-{job.id}.log"
    try:
        until(lambda: at_step(run, 200), "step 200")
        with pytest.raises(UserError, match="already"):
            submit(request, lines.append)
        told("scancel", "--batch", "--signal=USR1", job.id)  # what Slurm sends when the time is nearly up
        started_again(job)
        saved = [event["reason"] for event in run.events("interrupted")]
        assert saved == ["SIGUSR1"] and "requeueing" in log.read_text()
        first = next(iter(event for event in run.events("interrupted")))["step"]
        until(lambda: at_step(run, first + 200), "200 steps more")
        told("scontrol", "requeue", job.id)  # preempted: the step gets SIGTERM from Slurm itself
        started_again(job)
        until(lambda: run.state == "finished", "the end of the run", 180)
        until(lambda: slurm.states(job)[0].state in ("COMPLETED", "COMPLETING", "GONE"), "the end of the job")
    except AssertionError:
        print(log.read_text() if log.exists() else "no log", (cluster / "slurmctld.log").read_text()[-3000:])
        raise
    starts = [event["step"] for event in run.events("started")]
    assert [event["reason"] for event in run.events("interrupted")] == ["SIGUSR1", "SIGTERM"]
    assert len(starts) == 3 and starts[0] == 0 and 200 <= starts[1] < starts[2]  # nothing was trained twice
    assert [step for step, _ in losses(run)] == list(range(STEPS))
    alone = spec.model_copy(update={"name": "alone"})
    from bessemer.session.session import train

    assert train(alone).kind == "finished"
    assert losses(Run(request.folder.parents[1] / "alone")) == losses(run)


def test_the_processes_of_two_nodes_meet_though_nobody_knows_their_names(
    cluster: Path, ask: Callable[..., LaunchRequest], tmp_path: Path
) -> None:
    meet = tmp_path / "meet.py"
    meet.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\n"
        "open(f\"{sys.argv[1]}-{dist.get_rank()}\", 'w').write(f\"{os.environ['SLURMD_NODENAME']} {x.item():g}\")\n"
    )
    request = ask("slurm", nodes=2, gpus=0, cpus=1)
    files = generate_files(request)
    training = '-m bessemer train "$here/spec.yaml" --plain'
    assert training in files["node.sh"]
    files["node.sh"] = files["node.sh"].replace(training, f"{meet} {tmp_path}/met")
    write_files(request, files)
    number = told(*slurm.submit(request))
    job = LaunchJob("slurm", "tiny", slurm.job_id(request, number), str(request.folder), 0.0, 2, 0)
    try:
        until(lambda: all((tmp_path / f"met-{rank}").exists() for rank in (0, 1)), "both ranks")
    except AssertionError:
        print((request.folder / f"slurm-{job.id}.log").read_text())
        raise
    met = {(tmp_path / f"met-{rank}").read_text() for rank in (0, 1)}
    assert met == {"aa-first 2", "zz-second 2"}


def test_a_job_can_be_cancelled_and_its_log_shown(
    cluster: Path, ask: Callable[..., LaunchRequest], capfd: pytest.CaptureFixture[str]
) -> None:
    from bessemer.launch.job import run_client
    from bessemer.launch.submit import show_logs

    request = ask("slurm", gpus=0, cpus=1, python=sys.executable)
    job = submit(request, lambda line: None)
    assert job is not None
    until(lambda: (request.folder / f"slurm-{job.id}.log").exists(), "the log")
    until(lambda: "start 0" in (request.folder / f"slurm-{job.id}.log").read_text(), "the first line")
    assert show_logs(job) == 0 and "start 0 on" in capfd.readouterr().out
    run_client(slurm.cancel(job))
    until(lambda: slurm.states(job)[0].state in ("CANCELLED", "COMPLETING", "GONE", "COMPLETED"), "the cancellation")
