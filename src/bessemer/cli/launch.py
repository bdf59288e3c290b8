"""`bessemer launch`: send a run to a cluster, a cloud, other machines or this one's queue, and look after it there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import CommandGroup

if TYPE_CHECKING:
    from bessemer.launch.job import LaunchJob
    from bessemer.spec.schema import RunSpec


class _SubmitByDefault(CommandGroup):
    """`launch SPEC` is `launch submit SPEC`: what is no command's name is a spec."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {*self.commands, "-h", "--help"}
        return super().parse_args(ctx, ["submit", *args] if args and args[0] not in known else args)


app = typer.Typer(
    cls=_SubmitByDefault,
    no_args_is_help=True,
    help="Send a run to Slurm, Kubernetes, SkyPilot, Modal, machines of yours or this one's queue. "
    "`bessemer launch SPEC --on slurm` submits; `bessemer launch submit --help` has the options.",
)
NAME = typer.Argument(help="The run's name or folder.")
RUNS = typer.Option(Path("runs"), "--runs", help="The folder that holds the runs.")
AS_JSON = typer.Option(False, "--json", help="As JSON.")


@app.command()
def submit(
    spec: Path = typer.Argument(help="The run's YAML file."),
    on: str = typer.Option("", "--on", help="slurm, kubernetes, sky, modal, ssh or local."),
    settings: list[str] = typer.Option([], "--set", help="Override a key of the spec. Repeatable."),
    nodes: int = typer.Option(1, "--nodes", min=1, help="Machines."),
    gpus: int | None = typer.Option(None, "--gpus", min=0, help="GPUs of each node; 0 is the CPU (default: 1)."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print every file and write nothing."),
    cpus: int = typer.Option(0, "--cpus", min=0, help="CPUs of each node (default: 8 for each GPU)."),
    memory: str = typer.Option("", "--memory", help="Memory of each node, as the target writes it, such as 256G."),
    time: str = typer.Option("", "--time", help="Time limit, such as 24h or 2h 30m."),
    gpu_type: str = typer.Option("", "--gpu-type", help="slurm, sky, modal: such as H100."),
    image: str = typer.Option("", "--image", help="A container image with Bessemer in it."),
    python: str = typer.Option("", "--python", help="The interpreter there (default: this one on shared disks)."),
    install: str = typer.Option("", "--install", help="sky, modal: what pip installs there to get Bessemer."),
    partition: str = typer.Option("", "--partition", help="slurm."),
    account: str = typer.Option("", "--account", help="slurm."),
    qos: str = typer.Option("", "--qos", help="slurm."),
    array: str = typer.Option("", "--array", help="slurm: such as 0-3, runs NAME-0 to NAME-3 with these seeds."),
    namespace: str = typer.Option("", "--namespace", help="kubernetes."),
    min_nodes: int = typer.Option(0, "--min-nodes", min=0, help="kubernetes: train on with this many."),
    volume: str = typer.Option("", "--volume", help="What holds data and runs: a claim, a Modal volume, a bucket."),
    secret: str = typer.Option("", "--secret", help="kubernetes, modal: the secret there that holds your keys."),
    cloud: str = typer.Option("", "--cloud", help="sky: such as runpod, lambda, aws/us-east-1."),
    on_demand: bool = typer.Option(False, "--on-demand", help="sky: no spot machines."),
    hosts: str = typer.Option("", "--hosts", help="ssh: HOST[,HOST...], which share this folder."),
    emit: str = typer.Option(
        "", "--emit", help="Write the same run for accelerate, deepspeed, megatron, torchtitan or axolotl instead."
    ),
    out: Path | None = typer.Option(None, "--out", help="With --emit: the folder (default: NAME-FRAMEWORK)."),
    max_restarts: int = typer.Option(3, "--max-restarts", min=0, help="Times torchrun starts crashed workers again."),
) -> None:
    """Send a run to where it is to be trained; the word `submit` may be left out.

    Example: bessemer launch submit my-run.yaml --on slurm --nodes 4 --gpus 8 --time 24h --dry-run
    """
    from bessemer.launch.request import LaunchRequest, check, idle_note
    from bessemer.launch.submit import generate
    from bessemer.launch.submit import submit as send
    from bessemer.spec.load import load_spec

    run = load_spec(spec, settings)
    if emit:
        write_for(emit, run, out, nodes * gpus if gpus else None, dry_run)
        return
    if gpus is None:
        gpus = 0 if run.parallel.device == "cpu" else 1
    listed = tuple(host.strip() for host in hosts.split(",") if host.strip())
    request = check(
        LaunchRequest(
            run, on, nodes, gpus, max_restarts, cpus, memory, time, gpu_type, image, python, install, partition,
            account, qos, array, namespace, volume, secret, min_nodes, cloud, on_demand, listed,
        )
    )  # fmt: skip
    if note := idle_note(request):
        typer.echo(note, err=True)
    if dry_run:
        for name, text in generate(request).items():
            print(f"##### {request.folder / name}\n{text}")
        return
    job = send(request, lambda line: print(line, flush=True))
    if job is not None:
        print(
            f"submitted  {job.name} as {job.on} job {job.id}; `bessemer launch status {job.name}` tells how it stands"
        )


def write_for(framework: str, run: RunSpec, out: Path | None, processes: int | None, dry_run: bool) -> None:
    """The run in another framework's words."""
    from bessemer.launch.emit import emit, write_files

    folder = out or Path(f"{run.name}-{framework}")
    made = emit(framework, run, folder, processes)
    if dry_run:
        for name, text in made.files.items():
            print(f"##### {folder / name}\n{text}")
        return
    write_files(made, folder)
    print(f"wrote  {', '.join(sorted(made.files))} to {folder}")
    for note in made.notes:
        print(f"note   {note}")
    print(f"start  {made.command}")


@app.command()
def status(
    name: str = typer.Argument("", help="The run's name or folder; without it, all that were launched."),
    runs: Path = RUNS,
    as_json: bool = AS_JSON,
) -> None:
    """Ask Slurm, Kubernetes, ... how submitted runs stand.

    Example: bessemer launch status my-run
    """
    import json
    from dataclasses import asdict

    from bessemer.errors import UserError
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
        print(json.dumps([{**asdict(job), **asdict(state)} for job, state in rows], indent=1))
    elif not rows:
        print(f"nothing was launched under {runs}")
    else:
        _print(
            ("run", "on", "job", "state", "time", "detail"),
            [(job.name, job.on, state.what, state.state, state.time, state.detail) for job, state in rows],
        )


@app.command()
def logs(name: str = NAME, runs: Path = RUNS) -> None:
    """Show the last lines of a submitted run's output.

    Example: bessemer launch logs my-run
    """
    from bessemer.launch.job import find_job
    from bessemer.launch.submit import show_logs

    raise typer.Exit(show_logs(find_job(name, runs)))


@app.command()
def cancel(name: str = NAME, runs: Path = RUNS) -> None:
    """Take a submitted run back. One that is training saves first, where the target leaves it the time.

    Example: bessemer launch cancel my-run
    """
    from bessemer.launch.job import call, find_job
    from bessemer.launch.submit import TARGETS

    job = find_job(name, runs)
    printed = call(TARGETS[job.on].cancel(job)).strip()
    print(printed or f"cancelled  {job.name} ({job.on} job {job.id})")


@app.command()
def queue(as_json: bool = AS_JSON) -> None:
    """List this machine's queue: who trains on which GPUs, and who waits.

    Example: bessemer launch queue
    """
    import json
    import time
    from dataclasses import asdict

    from bessemer.launch.queue import Queue
    from bessemer.spec.quantity import human_time

    tickets = Queue().tickets()
    if as_json:
        print(json.dumps([asdict(ticket) for ticket in tickets], indent=1))
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
        _print(("place", "run", "user", "process", "state", "GPUs", "for"), rows)


def _print(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from bessemer.cli.console import print_table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column != "detail")
    for row in rows:
        table.add_row(*map(Text, row))
    print_table(table)
