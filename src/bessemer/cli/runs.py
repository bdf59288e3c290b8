"""`bessemer runs`: the runs in a folder and how they stand."""

from __future__ import annotations

from pathlib import Path

import typer


def runs(
    folder: Path = typer.Argument(Path("runs"), help="The folder that holds the runs."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object for each run."),
) -> None:
    """List runs with state, step, loss and age, the newest first.

    Example: bessemer runs --json
    """
    import json
    from dataclasses import asdict

    from bessemer.errors import UserError
    from bessemer.run.directory import list_runs

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; runs are written to ./runs unless the spec says otherwise")
    found = list_runs(folder)
    if as_json:
        print(json.dumps([asdict(run) for run in found], indent=1))
        return
    if not found:
        print(f"no runs in {folder}; start one with `bessemer train SPEC` or `bessemer demo`")
        return
    from rich.console import Console
    from rich.table import Table

    from bessemer.spec.quantity import human_time

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step", "loss", "val", "age", "last word"):
        table.add_column(column, justify="right" if column in ("step", "loss", "val", "age") else "left")
    colours = {"running": "green", "failed": "red", "interrupted": "yellow"}
    for run in found:
        step = "-" if run.step is None else f"{run.step:,}" + (f"/{run.total_steps:,}" if run.total_steps else "")
        numbers = ["-" if value is None else f"{value:.3f}" for value in (run.loss, run.validation_loss)]
        state = f"[{colours[run.state]}]{run.state}[/]" if run.state in colours else run.state
        table.add_row(run.name, state, step, *numbers, human_time(run.age_s), run.reason)
    Console().print(table)
