"""`bessemer runs`: the runs in a folder and how they stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from bessemer.run.directory import RunSummary


def runs(
    folder: Path = typer.Argument(Path("runs"), help="The folder that holds the runs."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, a list with an object for each run."),
) -> None:
    """List runs with state, step, loss and age, the newest first; of one run also how it keeps to its plan, and of
    several processes what each holds and how it keeps up.

    Example: bessemer runs --json
    """
    import json
    from dataclasses import asdict

    from bessemer.errors import UserError
    from bessemer.observe.format import processes
    from bessemer.plan.actual import compare_run, comparison_json, comparison_lines
    from bessemer.run.directory import LAYOUT, Run, list_runs, summarize
    from bessemer.run.journal import json_ready, last_record

    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; runs are written to ./runs unless the spec says otherwise")
    alone = (folder / "events.jsonl").is_file()  # the folder of one run
    run = Run(folder)
    found = [summarize(run)] if alone else list_runs(folder)
    beside = compare_run(run) if alone else None
    if as_json:
        shown = [json_ready(asdict(run)) for run in found]
        if beside:
            shown[0]["against_plan"] = json_ready(comparison_json(*beside))
        print(json.dumps(shown, indent=1))
    elif not found:
        print(f"no runs in {folder}; start one with `bessemer train SPEC` or `bessemer demo`")
    else:
        _print_table(found)
        if beside:
            print("\n" + "\n".join(comparison_lines(*beside)))
        if alone and (folder / LAYOUT).exists():
            print("\n" + "\n".join(processes(json.loads((folder / LAYOUT).read_text()), last_record(run.ranks_path))))


def _print_table(found: list[RunSummary]) -> None:
    from rich.table import Table
    from rich.text import Text

    from bessemer.cli.console import print_table
    from bessemer.run.directory import MEAN_OF
    from bessemer.spec.quantity import human_time

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step", f"loss (mean of {MEAN_OF})", "val", "age", "last word"):
        justify: Literal["left", "right"] = "left" if column in ("run", "state", "last word") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "last word")
    colours = {"running": "green", "failed": "red", "unreadable": "red", "interrupted": "yellow", "stopped": "yellow"}
    for run in found:
        # A budget that was lowered after the run had done more is no total of its steps.
        total = f"/{run.total_steps:,}" if run.total_steps and run.total_steps >= (run.step or 0) else ""
        step = "-" if run.step is None else f"{run.step:,}{total}"
        numbers = ["-" if value is None else f"{value:.3f}" for value in (run.mean_loss, run.validation_loss)]
        state = Text(run.state, style=colours.get(run.state, ""))
        # Text, not markup: a reason may well hold square brackets. One run is one line: a long last word is cut.
        reason = Text(run.reason, no_wrap=True, overflow="ellipsis")
        table.add_row(Text(run.name), state, step, *numbers, human_time(run.age_s), reason)
    print_table(table)
