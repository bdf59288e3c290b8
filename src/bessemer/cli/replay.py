"""`bessemer replay`: a past step again: its documents, and why it was as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

_IN_FILE = {"same": "this text stands in the file", "cleaned": "the text as the cleaning steps left it"}


def replay(
    run: Path = typer.Argument(help="The run's folder, such as runs/demo."),
    step: int = typer.Option(..., "--step", help="The step, as in the metrics and events."),
    documents: bool = typer.Option(False, "--documents", help="Only name the documents of the batch: no trial."),
    show: bool = typer.Option(False, "--show", help="The documents with the text of each that was in the batch."),
    budget: float = typer.Option(None, "--budget", min=1, help="Seconds for the trial (default: the spec's)."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda or mps."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Rebuild a past step and put it on trial: which documents made its loss, which layers it began in, and what the
    same step does with other weights, other batches, other precision. Nothing of the run is changed.

    Example: bessemer replay runs/demo --step 655
    Example: bessemer replay runs/demo --step 655 --show
    """
    if documents or show:
        _documents(run, step, show, as_json)
        return
    import json

    from bessemer.observe.page import markdown
    from bessemer.observe.progress import working
    from bessemer.session.replay import BY_HAND, try_step
    from bessemer.trial.report import deviations, report_sections
    from bessemer.trial.verdict import STEP_IS_NORMAL

    with working("replaying the step"):
        case = try_step(run, step, budget, device)
    if as_json:
        print(json.dumps(case.to_json(), indent=1, default=str))
    elif case.symptom == BY_HAND and case.trial and case.trial.reason == STEP_IS_NORMAL:
        print(f"step {step:,} of {case.run} is normal, nothing is to be explained: {', '.join(deviations(case))}")
    else:
        print(markdown(f"{case.run}: step {step:,} on trial", report_sections(case)))


def _documents(run: Path, step: int, show: bool, as_json: bool) -> None:
    import json

    from bessemer.session.replay import documents_of

    found = documents_of(run, step, texts=show)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for document in found:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    print(f"{document['file']}  row {document['row']}  {document['tokens']} tokens  ({document['source']})")
    if "in_file" in document:
        print(f"    {_IN_FILE.get(document['in_file'], document['in_file'])}")
    for text in document.get("texts", []):
        print("\n".join("    | " + line for line in text.splitlines()))
