"""`bessemer launch`: submit a run to a cluster, a cloud, SSH hosts or this machine's queue, and manage it there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.console import AS_JSON, SETTINGS, SPEC, group_with_default, lines_on_stderr, print_json, print_table
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.launch.job import LaunchJob
    from bessemer.spec.schema import RunSpec


app = typer.Typer(
    cls=group_with_default("submit"),
    no_args_is_help=True,
    help="Submit a run to Slurm, Kubernetes, SkyPilot, Modal, SSH hosts or this machine's queue. "
    "`bessemer launch SPEC --on slurm` submits; `bessemer launch submit --help` lists the options.\n\n"
    "Example: bessemer launch my-run.yaml --on slurm --nodes 4 --gpus 8 --dry-run",
)
NAME = typer.Argument(help="The run's name or folder.")
RUNS = typer.Option(Path("runs"), "--runs", help="The folder that holds the runs.")


@app.command()
def submit(
    spec: Path = SPEC,
    on: str = typer.Option("", "--on", help="slurm, kubernetes, sky, modal, ssh or local."),
    settings: list[str] = SETTINGS,
    nodes: int = typer.Option(1, "--nodes", min=1, help="Number of machines."),
    gpus: int | None = typer.Option(None, "--gpus", min=0, help="GPUs per node; 0 trains on the CPU (default: 1)."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print every file instead of writing it."),
    cpus: int = typer.Option(0, "--cpus", min=0, help="CPUs per node (default: 8 per GPU)."),
    memory: str = typer.Option("", "--memory", help="Memory per node in the target's notation, such as 256G."),
    time: str = typer.Option("", "--time", help="Time limit, such as 24h or 2h 30m."),
    gpu_type: str = typer.Option("", "--gpu-type", help="slurm, sky, modal: the GPU model, such as H100."),
    image: str = typer.Option("", "--image", help="A container image with Bessemer in it."),
    python: str = typer.Option(
        "", "--python", help="The Python interpreter on the target (default: this one, on shared disks)."
    ),
    install: str = typer.Option(
        "", "--install", help="sky, modal: the package name or URL that pip installs Bessemer from."
    ),
    partition: str = typer.Option("", "--partition", help="slurm: the partition."),
    account: str = typer.Option("", "--account", help="slurm: the account."),
    qos: str = typer.Option("", "--qos", help="slurm: the quality of service."),
    array: str = typer.Option(
        "", "--array", help="slurm: a job array such as 0-3: runs NAME-0 to NAME-3 with these seeds."
    ),
    namespace: str = typer.Option("", "--namespace", help="kubernetes: the namespace."),
    min_nodes: int = typer.Option(0, "--min-nodes", min=0, help="kubernetes: keep training with this many."),
    volume: str = typer.Option(
        "", "--volume", help="Storage of data and runs: a Kubernetes claim, a Modal volume, a bucket."
    ),
    secret: str = typer.Option("", "--secret", help="kubernetes, modal: the name of the secret that holds your keys."),
    cloud: str = typer.Option("", "--cloud", help="sky: such as runpod, lambda, aws/us-east-1."),
    on_demand: bool = typer.Option(False, "--on-demand", help="sky: no spot instances."),
    hosts: str = typer.Option("", "--hosts", help="ssh: HOST[,HOST...]; they must share this folder."),
    emit: str = typer.Option(
        "", "--emit", help="Write the run for accelerate, deepspeed, megatron or torchtitan instead of submitting it."
    ),
    out: Path | None = typer.Option(None, "--out", help="With --emit: the folder (default: NAME-FRAMEWORK)."),
    wait: bool = typer.Option(
        False,
        "--wait",
        help="Wait until the job has ended, also one that was submitted before; exit code 1 if its run "
        "is not finished.",
    ),
    max_restarts: int = typer.Option(3, "--max-restarts", min=0, help="How often torchrun restarts crashed workers."),
    as_json: bool = AS_JSON,
) -> None:
    """Submit a run for training. The word `submit` may be left out.

    Example: bessemer launch submit my-run.yaml --on slurm --nodes 4 --gpus 8 --time 24h --dry-run
    """
    from dataclasses import asdict

    from bessemer.launch.request import LaunchRequest, check_request, idle_ranks_note
    from bessemer.launch.submit import active_job, generate_files, wait_for_job
    from bessemer.launch.submit import submit as submit_request
    from bessemer.spec.load import load_spec

    run = load_spec(spec, settings)
    if emit:
        _emit_files(emit, run, out, nodes * gpus if gpus else None, dry_run, as_json)
        return
    if gpus is None:
        gpus = 0 if run.parallel.device == "cpu" else 1
    host_names = tuple(host.strip() for host in hosts.split(",") if host.strip())
    request = check_request(
        LaunchRequest(
            run, on, nodes, gpus, max_restarts, cpus, memory, time, gpu_type, image, python, install, partition,
            account, qos, array, namespace, volume, secret, min_nodes, cloud, on_demand, host_names,
        )
    )  # fmt: skip
    if note := idle_ranks_note(request):
        typer.echo(note, err=True)
    if dry_run:
        _print_files(request.folder, generate_files(request), as_json)
        return
    if as_json and on == "local":
        raise UserError(f"--json: --on local trains in this process: use `bessemer train {spec} --json`")
    with lines_on_stderr(as_json):
        active = active_job(request) if wait else None
        job = active[0] if active else submit_request(request, lambda line: print(line, flush=True))
    if as_json:
        print_json({"submitted": job is not None, "folder": str(request.folder), **(asdict(job) if job else {})})
    elif job is not None:
        print(f"submitted  {job.name} as {job.on} job {job.id}; check it with `bessemer launch status {job.name}`")
    if wait and (job is None or wait_for_job(job, lambda line: print(line, file=sys.stderr, flush=True))):
        raise typer.Exit(1)


def _print_files(folder: Path, files: Mapping[str, str], as_json: bool) -> None:
    """The files of a dry run."""
    if as_json:
        print_json({"files": {str(folder / name): text for name, text in files.items()}})
        return
    for name, text in files.items():
        print(f"##### {folder / name}\n{text}")


def _emit_files(
    framework: str, run: RunSpec, out: Path | None, processes: int | None, dry_run: bool, as_json: bool
) -> None:
    """Write the run for another framework."""
    from bessemer.launch.emit import emit, write_files

    folder = out or Path(f"{run.name}-{framework}")
    emitted = emit(framework, run, folder, processes)
    if dry_run:
        _print_files(folder, emitted.files, as_json)
        return
    write_files(emitted, folder)
    if as_json:
        names = [str(folder / name) for name in sorted(emitted.files)]
        print_json({"files": names, "notes": list(emitted.notes), "start": emitted.command})
        return
    print(f"wrote  {', '.join(sorted(emitted.files))} to {folder}")
    for note in emitted.notes:
        print(f"note   {note}")
    print(f"start  {emitted.command}")


@app.command()
def status(
    name: str = typer.Argument("", help="The run's name or folder (default: all launched runs)."),
    runs: Path = RUNS,
    as_json: bool = AS_JSON,
) -> None:
    """Show the state of submitted runs, as Slurm, Kubernetes, ... report it.

    Example: bessemer launch status my-run
    """
    from dataclasses import asdict

    from bessemer.launch.job import JobState, find_job, read_job
    from bessemer.launch.submit import TARGETS

    jobs = [find_job(name, runs)] if name else [read_job(path) for path in sorted(runs.glob("*/launch/job.json"))]
    rows: list[tuple[LaunchJob, JobState]] = []
    for job in jobs:
        try:
            rows += [(job, state) for state in TARGETS[job.on].states(job)]
        except UserError as error:
            if name:
                raise
            rows.append((job, JobState(job.id, "?", detail=str(error))))
    if as_json:
        print_json([{**asdict(job), **asdict(state)} for job, state in rows])
    elif not rows:
        print(f"no launched runs under {runs}")
    else:
        _print_rows(
            ("run", "on", "job", "state", "time", "detail"),
            [(job.name, job.on, state.what, state.state, state.time, state.detail) for job, state in rows],
        )


@app.command()
def logs(name: str = NAME, runs: Path = RUNS, as_json: bool = AS_JSON) -> None:
    """Show the last lines of a submitted run's output.

    Example: bessemer launch logs my-run
    """
    from bessemer.launch.job import find_job, run_client
    from bessemer.launch.submit import TARGETS, show_logs

    job = find_job(name, runs)
    if as_json:
        print_json({"run": job.name, "on": job.on, "job": job.id, "output": run_client(TARGETS[job.on].logs(job))})
        return
    raise typer.Exit(show_logs(job))


@app.command()
def cancel(name: str = NAME, runs: Path = RUNS, as_json: bool = AS_JSON) -> None:
    """Cancel a submitted run. A run in training saves first, if the target gives it the time.

    Example: bessemer launch cancel my-run
    """
    from bessemer.launch.job import find_job, run_client
    from bessemer.launch.submit import TARGETS

    job = find_job(name, runs)
    output = run_client(TARGETS[job.on].cancel(job)).strip()
    if as_json:
        print_json({"cancelled": job.name, "on": job.on, "job": job.id, "output": output})
        return
    print(output or f"cancelled  {job.name} ({job.on} job {job.id})")


@app.command()
def queue(as_json: bool = AS_JSON) -> None:
    """List this machine's queue: running and waiting runs with their users and GPUs.

    Example: bessemer launch queue
    """
    import time
    from dataclasses import asdict

    from bessemer.launch.local import Queue
    from bessemer.spec.quantity import human_time

    tickets = Queue().tickets()
    if as_json:
        print_json([asdict(ticket) for ticket in tickets])
    elif not tickets:
        print("the queue is empty; `bessemer launch SPEC --on local` joins it")
    else:
        rows = [
            (
                str(ticket.number), ticket.name, ticket.user, str(ticket.pid),
                "running" if ticket.running else "waiting",
                ",".join(map(str, ticket.held)) or (str(ticket.gpus) if ticket.gpus and not ticket.running else "-"),
                human_time(time.time() - ticket.since),
            )
            for ticket in tickets
        ]  # fmt: skip
        _print_rows(("place", "run", "user", "process", "state", "GPUs", "for"), rows)


def _print_rows(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column != "detail")
    for row in rows:
        table.add_row(*map(Text, row))
    print_table(table)
