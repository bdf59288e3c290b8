"""`bessemer align`: scores of reward models, and best-of-N."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, CommandGroup, print_json

app = typer.Typer(
    cls=CommandGroup, help="Align a model: score answers with a reward model, best-of-N.", no_args_is_help=True
)
Figure = Annotated[Path | None, typer.Option("--figure", help="Also draw it as an SVG file.")]


@app.command()
def score(
    model: Path = typer.Argument(help="A run of objective: reward, its export, or a folder of a reward model."),
    rows: Path = typer.Argument(help="A .jsonl of pairs, of prompts with completions, or of conversations."),
    columns: list[str] = typer.Option(
        [], "--column", help="A column by its purpose, such as chosen=good. Repeatable; default: as named."
    ),
    write: Path | None = typer.Option(None, "--write", help="Write the rows with their scores to this .jsonl."),
    figure: Figure = None,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Score answers with a reward model; on pairs, measure its accuracy and calibration.

    Example: bessemer align score runs/reward pairs.jsonl --write scored.jsonl
    """
    from bessemer.align.scored_rows import summary_lines, score_file

    summary = score_file(model, rows, columns, write, figure, checkpoint, device)
    if as_json:
        print_json(summary)
    else:
        print("\n".join(summary_lines(summary)))
