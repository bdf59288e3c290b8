"""`bessemer replay`: which documents were in a step of a run."""

from __future__ import annotations

from pathlib import Path

import typer

_IN_FILE = {"same": "this text stands in the file", "cleaned": "the text as the cleaning steps left it"}


def replay(
    run: Path = typer.Argument(help="The run's folder, such as runs/demo."),
    step: int = typer.Option(..., "--step", help="The step, as in the metrics and events."),
    show: bool = typer.Option(
        False, "--show", help="Also print the text of each document that was in the batch."
    ),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Rebuild the batch of a past step and name its documents: file, row, and how much of the batch each had.

    Example: bessemer replay runs/demo --step 655 --show
    """
    import json

    from bessemer.supervise.replay import documents_of

    found = documents_of(run, step, texts=show)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for document in found:
        print(
            f"{document['file']}  row {document['row']}  {document['tokens']} tokens  ({document['source']})"
        )
        if "in_file" in document:
            print(f"    {_IN_FILE.get(document['in_file'], document['in_file'])}")
        for text in document.get("texts", []):
            print("\n".join("    | " + line for line in text.splitlines()))
