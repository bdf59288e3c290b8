"""`bessemer review`: faults of a training script, found without running it, with patches."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, print_json


def review(
    files: list[Path] = typer.Argument(help="Python files."),
    patch: bool = typer.Option(False, "--patch", help="Print a unified diff instead, for `git apply` or `patch -p1`."),
    fix: bool = typer.Option(False, "--fix", help="Change the files."),
    as_json: bool = AS_JSON,
) -> None:
    """Review training scripts for PyTorch, Accelerate, Lightning, DeepSpeed or the Hugging Face Trainer.

    Reads each script without running it and names faulty lines: missing or misplaced calls, wrong losses and labels,
    collectives on one rank, checkpoints that do not load. Exit code 1 if a fault above a note is left.

    Example: bessemer review train.py --patch | git apply
    """
    from bessemer.diagnose.review.catalogue import RULES
    from bessemer.diagnose.review.review import review_file, review_text
    from bessemer.errors import UserError
    from bessemer.storage import write_atomic

    if patch and (fix or as_json):
        raise UserError("--patch prints a diff; leave out --fix and --json")
    reviews = [review_file(path) for path in files]
    if fix:
        for result in reviews:
            if result.patched != result.text:
                write_atomic(Path(result.path), result.patched)
    remaining = [review_text(result.patched, result.path) for result in reviews] if fix else reviews
    if as_json:
        print_json([result.to_json() for result in reviews])
    elif patch:
        print("".join(result.patch for result in reviews), end="")
    else:
        for result, after in zip(reviews, remaining, strict=True):
            left = {(fault.rule, fault.symptom) for fault in after.faults}
            for fault in result.faults:
                rule = RULES[fault.rule]
                state = " (fixed)" if fix and (fault.rule, fault.symptom) not in left else ""
                print(f"{result.path}:{fault.line}: {fault.severity}: {fault.symptom} [{fault.rule}]{state}")
                print(f"    {rule.why} Fix: {rule.fix}{'' if fault.edits else ' (no patch)'}.")
        faults = sum(fault.severity != "note" for result in reviews for fault in result.faults)
        notes = sum(fault.severity == "note" for result in reviews for fault in result.faults)
        patches = sum(bool(fault.edits) for result in reviews for fault in result.faults)
        print(f"{len(reviews)} file{'s' * (len(reviews) != 1)}: {faults} faults, {notes} notes, {patches} with a patch")
    if any(fault.severity != "note" for result in remaining for fault in result.faults):
        raise typer.Exit(1)
