"""`bessemer runs` lists the runs in a folder and answers questions about their metrics; `bessemer replay` recomputes a
past step of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from bessemer.cli.console import AS_JSON, DEVICE, RUN, group_with_default, print_json, print_rows, print_table
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.run.directory import RunSummary


app = typer.Typer(
    cls=group_with_default("list", alone=True),
    help="List runs with state, step, loss and age, newest first. `bessemer runs metrics RUN` prints metrics. "
    "`bessemer runs list --help` lists the options of the list.\n\n"
    "Example: bessemer runs metrics runs/demo --names loss,lr",
)


@app.command("list")
def runs(
    folder: Path = typer.Argument(Path("runs"), help="The folder that holds the runs, or one run."),
    as_json: bool = AS_JSON,
) -> None:
    """List runs with state, step, loss, forecast of the final loss and age, newest first. For one run, also compare it
    with its plan and show what each process holds and how fast it is.

    The word `list` may be left out.

    Example: bessemer runs --json
    """
    import json
    from dataclasses import asdict

    from bessemer.observe.format import describe_processes
    from bessemer.plan.actual import compare_run, comparison_json, comparison_lines
    from bessemer.run.directory import LAYOUT, Run, list_runs, summarize
    from bessemer.run.journal import json_ready, last_record

    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {problem}; runs are written to ./runs unless the spec says otherwise")
    is_run = (folder / "events.jsonl").is_file()
    run = Run(folder)
    summaries = [summarize(run)] if is_run else list_runs(folder)
    comparison = compare_run(run) if is_run else None
    if as_json:
        records = [json_ready(asdict(summary)) for summary in summaries]
        if comparison:
            records[0]["against_plan"] = json_ready(comparison_json(*comparison))
        print_json(records)
    elif not summaries:
        print(f"no runs in {folder}; start one with `bessemer train SPEC` or `bessemer demo`")
    else:
        _print_summaries(summaries)
        if comparison:
            print("\n" + "\n".join(comparison_lines(*comparison)))
        if is_run and (folder / LAYOUT).exists():
            print(
                "\n"
                + "\n".join(describe_processes(json.loads((folder / LAYOUT).read_text()), last_record(run.ranks_path)))
            )


@app.command()
def metrics(
    run: Path = RUN,
    names: str = typer.Option("", "--names", help="Such as loss,lr,validation.loss (default: loss, lr, grad_norm)."),
    first: int = typer.Option(0, "--from", min=0, help="The first step, counted from 0."),
    last: int | None = typer.Option(None, "--to", min=0, help="The last step (default: the newest)."),
    every: int | None = typer.Option(None, "--every", min=1, help="Print every N-th step (default: at most 200 rows)."),
    as_json: bool = AS_JSON,
) -> None:
    """Print metrics of a range of steps, with the extremes over every step of it.

    Example: bessemer runs metrics runs/demo --names loss,validation.loss --from 100 --to 500 --every 10
    """
    from bessemer.run.directory import Run
    from bessemer.run.journal import json_ready
    from bessemer.run.query import query_metrics

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    answer = query_metrics(Run.existing(run), wanted, first, last, every)
    if as_json:
        print_json(json_ready(answer.to_json()))
        return
    columns = list(answer.summary)
    cells = [
        [f"{row['step']:,}", *("" if name not in row else f"{row[name]:.5g}" for name in columns)]
        for row in answer.rows
    ]
    print_rows([["step", *columns], *cells])
    for name, summary in answer.summary.items():
        extremes = (
            ""
            if summary.min is None
            else (
                f"min {summary.min:.5g} at step {summary.min_step:,}, "
                f"max {summary.max:.5g} at step {summary.max_step:,}, mean {summary.mean:.5g}; "
            )
        )
        print(f"{name}: {extremes}{summary.count:,} values, {summary.nonfinite:,} not finite")


def _print_summaries(summaries: list[RunSummary]) -> None:
    from rich.table import Table
    from rich.text import Text

    from bessemer.run.directory import LOSS_WINDOW
    from bessemer.spec.quantity import human_time

    table = Table(box=None, pad_edge=False)
    forecasts = any(run.forecast for run in summaries)
    losses = (f"loss (mean of {LOSS_WINDOW})", "val", *(["forecast"] if forecasts else []))
    for column in ("run", "state", "step", *losses, "age", "last word"):
        justify: Literal["left", "right"] = "left" if column in ("run", "state", "last word") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "last word")
    colours = {"running": "green", "failed": "red", "unreadable": "red", "interrupted": "yellow", "stopped": "yellow"}
    for run in summaries:
        # A budget that was lowered below the steps already done is not shown as a total.
        total = f"/{run.total_steps:,}" if run.total_steps and run.total_steps >= (run.step or 0) else ""
        step = "-" if run.step is None else f"{run.step:,}{total}"
        numbers = ["-" if value is None else f"{value:.3f}" for value in (run.mean_loss, run.validation_loss)]
        if forecasts:
            numbers.append(
                "-" if run.forecast is None else "{final:.3f} ({low:.3f} to {high:.3f})".format(**run.forecast)
            )
        state = Text(run.state, style=colours.get(run.state, ""))
        # Text, not markup: a reason may contain square brackets. One run is one line: a long reason is cut.
        reason = Text(run.reason, no_wrap=True, overflow="ellipsis")
        table.add_row(Text(run.name), state, step, *numbers, human_time(run.age_s), reason)
    print_table(table)


_ORIGIN_NOTES = {"same": "this text is in the file", "cleaned": "the text after the cleaning steps"}


def replay(
    run: Path = RUN,
    step: int = typer.Option(..., "--step", help="The step, counted from 0 (progress lines count from 1)."),
    documents: bool = typer.Option(False, "--documents", help="Only list the documents of the batch; no trial."),
    show: bool = typer.Option(False, "--show", help="List the documents with their text in the batch."),
    budget: float = typer.Option(None, "--budget", min=1, help="Seconds for the trial (default: the spec's)."),
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Recompute a past step and explain its loss by documents and layers.

    A trial repeats the step with other weights, batches or precision. The run is not changed.

    Example: bessemer replay runs/demo --step 655

    Example: bessemer replay runs/demo --step 655 --show
    """
    if documents or show:
        _print_documents(run, step, show, as_json)
        return
    from bessemer.observe.page import markdown
    from bessemer.observe.progress import working
    from bessemer.session.replay import BY_HAND, try_step
    from bessemer.trial.case import STEP_IS_NORMAL
    from bessemer.trial.report import deviations, report_sections

    with working("replaying the step"):
        case = try_step(run, step, budget, device)
    if as_json:
        print_json(case.to_json(), default=str)
    elif case.symptom == BY_HAND and case.trial and case.trial.reason == STEP_IS_NORMAL:
        print(f"step {step:,} of {case.run} is normal: {', '.join(deviations(case))}")
    else:
        print(markdown(f"{case.run}: step {step:,} on trial", report_sections(case)))


def _print_documents(run: Path, step: int, show: bool, as_json: bool) -> None:
    from bessemer.session.replay import documents_of

    documents = documents_of(run, step, texts=show)
    if as_json:
        print_json(documents)
        return
    for document in documents:
        _print_document(document)


def _print_document(document: dict[str, Any]) -> None:
    print(f"{document['file']}  row {document['row']}  {document['tokens']} tokens  ({document['source']})")
    if "in_file" in document:
        print(f"    {_ORIGIN_NOTES.get(document['in_file'], document['in_file'])}")
    if "prompt" in document:
        print("\n".join("    > " + line for line in document["prompt"].splitlines()))
    for text in document.get("texts", []):
        print("\n".join("    | " + line for line in text.splitlines()))
