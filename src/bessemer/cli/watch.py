"""`bessemer watch`: the live page of runs, its export to one file; `bessemer control`: requests to a live run."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, RUN, group_with_default, lines_on_stderr, print_json
from bessemer.errors import UserError

app = typer.Typer(
    cls=group_with_default("page", alone=True),
    help="Serve a live page of the runs in a folder. `bessemer watch export RUN` writes one HTML file to send. "
    "`bessemer watch page --help` lists the options of the page.\n\nExample: bessemer watch runs",
)
ANSWER_S = 30.0


@app.command()
def page(
    runs: Path = typer.Argument(Path("runs"), help="The folder that holds the runs, or one run."),
    host: str = typer.Option("127.0.0.1", "--host", help="The address to bind; others than this machine need a token."),
    port: int = typer.Option(8800, "--port", min=0, max=65535, help="0 takes a free one."),
    token: str = typer.Option("", "--token", help="Token of the page (default: generated if --host needs one)."),
    no_browser: bool = typer.Option(False, "--no-browser", help="Do not open the page."),
    control: bool = typer.Option(False, "--control", help="Let the page save, pause, stop and change live runs."),
    imports: list[Path] = typer.Option(
        [], "--import", help="A run of another framework, as a file or folder: it is imported into RUNS. Repeatable."
    ),
) -> None:
    """Serve the live page, during the runs and after them. The word `page` may be left out.

    Example: bessemer watch runs --port 8800

    Example: bessemer watch imported --import output/trainer_state.json
    """
    from bessemer.watch.server import WatchOptions, watch

    watch(WatchOptions(runs, host, port, token, not no_browser, control, tuple(imports)))


@app.command()
def export(
    run: Path = RUN,
    out: Path = typer.Option(None, "--out", help="The file to write (default: NAME.html)."),
    compare: list[Path] = typer.Option([], "--with", help="A run to draw over it. Repeatable."),
    as_json: bool = AS_JSON,
) -> None:
    """Write a run's page as one HTML file that needs no server: curves, events, reports, plan, spec.

    Example: bessemer watch export runs/demo --out demo.html
    """
    try:
        from bessemer.watch.export import export_run
    except ImportError as error:
        raise UserError(f"watch needs {error.name}: pip install 'bessemer[watch]'") from None
    path = out or Path(f"{run.resolve().name}.html")
    size = export_run([run, *compare], path)
    if as_json:
        print_json({"file": str(path), "bytes": size})
    else:
        print(f"{path}  {size / 1e6:.1f} MB")


@app.command()
def forward(
    run: Path = RUN,
    to: list[str] = typer.Option([], "--to", help="A tracker, such as wandb, or alerts (default: the spec's)."),
    patience: float = typer.Option(600.0, "--patience", min=0, help="Seconds to try after the end of the run."),
    as_json: bool = AS_JSON,
) -> None:
    """Send a run's records to trackers, and its alerts, from where the last delivery ended until the run has ended.

    Training starts this by itself for the trackers and alerts in the spec. By hand it sends what is left, or a run to
    a tracker that its spec does not name; settings then come from the tracker's own environment variables.

    Example: bessemer watch forward runs/demo --to tensorboard
    """
    from bessemer.observe.observers import follow_run, observers_of
    from bessemer.run.directory import Run

    watched = Run.existing(run)
    with lines_on_stderr(as_json):
        results = follow_run(watched, observers_of(watched, to), lambda line: print(line, flush=True), patience)
    if as_json:
        print_json({name: {"sent": result.sent, "error": result.error or None} for name, result in results.items()})
    for name, result in results.items() if not as_json else ():
        print(result.error or f"{name}: {result.sent:,} {'messages' if name == 'alerts' else 'rows'} delivered")
    if any(result.error for result in results.values()):
        raise typer.Exit(1)


def report(
    run: Path = RUN,
    out: Path | None = typer.Option(None, "--out", help="The file to write: .html or .md (default: NAME-report.html)."),
    usd_hour: float | None = typer.Option(
        None, "--usd-hour", min=0, help="Price of one device for an hour (default: the price list's lowest)."
    ),
    region: str | None = typer.Option(None, "--region", help="Region of the electricity, for its carbon."),
    as_json: bool = AS_JSON,
) -> None:
    """Write a report of a run on one page: curves, incidents, results, cost.

    The page also compares the run with its plan and says how to reproduce it.

    Example: bessemer report runs/demo --out demo.html
    """
    try:
        from bessemer.watch.report import RunReport
    except ImportError as error:
        raise UserError(f"report needs {error.name}: pip install 'bessemer[watch]'") from None
    from bessemer.run.directory import Run
    from bessemer.storage import write_atomic

    if out is not None and out.suffix not in (".html", ".md"):
        raise UserError(f"--out {out}: end the name with .html or .md")
    content = RunReport(Run.existing(run), usd_hour, region)
    if as_json:
        print_json(content.to_json())
    if out is not None or not as_json:
        path = out or Path(f"{run.resolve().name}-report.html")
        write_atomic(path, content.markdown() if path.suffix == ".md" else content.html(), durable=False)
        if not as_json:
            print(path)


def control(
    run: Path = RUN,
    action: str = typer.Argument(
        help="save, evaluate, stop, pause, resume, lr FACTOR, rollback [STEP], or profile [STEPS]."
    ),
    value: float | None = typer.Argument(None, help="The factor of lr, the step of rollback, or the steps of profile."),
    wait: float = typer.Option(ANSWER_S, "--wait", min=0, help="Seconds to wait for the run's answer."),
    as_json: bool = AS_JSON,
) -> None:
    """Save, evaluate, pause, resume, stop or change a live run.

    `lr` changes the learning rate, `rollback` returns to an earlier state, `profile` profiles the next steps.

    The run obeys between two steps, on all ranks in the same step, and records who asked.

    Example: bessemer control runs/demo save

    Example: bessemer control runs/demo lr 0.5
    """
    from bessemer.run.control import ControlRequest, answer_of, write_request
    from bessemer.run.directory import Run

    request, watched = ControlRequest.make(action, value), Run.existing(run)
    write_request(watched, request)
    event = answer_of(watched, request.id, wait) if wait else None
    if as_json:
        print_json(event or {"id": request.id, "action": action, "answered": False})
    elif event:
        print(f"{event['action']}  step {event['step']:,}  {event['reason']}")
    else:
        print(f"{watched.name} has not answered the request yet: {action}")
    if event and not event["done"]:
        raise typer.Exit(1)
