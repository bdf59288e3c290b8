"""`bessemer review`: faults of a training script, found without running it, with patches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.console import AS_JSON, print_json

if TYPE_CHECKING:
    from bessemer.diagnose.review.review import ScriptReview


def review(
    files: list[Path] = typer.Argument(help="Python files, notebooks, or folders of Python files."),
    patch: bool = typer.Option(False, "--patch", help="Print a unified diff instead, for `git apply` or `patch -p1`."),
    fix: bool = typer.Option(False, "--fix", help="Change the files."),
    as_json: bool = AS_JSON,
) -> None:
    """Find faults in training scripts of PyTorch, Accelerate, Lightning, DeepSpeed or the Hugging Face Trainer.

    Reads each script without running it and names faulty lines: missing or misplaced calls, wrong losses and labels,
    collectives on one rank, checkpoints that do not load. Of a folder, all *.py are read, without hidden folders and
    installed packages; of a notebook, the code cells. Exit code 1 if a fault above a note is left.

    Example: bessemer review train.py --patch | git apply

    Example: bessemer review src/ notebooks/train.ipynb
    """
    from bessemer.diagnose.review.review import review_source, review_text
    from bessemer.diagnose.review.sources import read_source, script_paths
    from bessemer.errors import UserError
    from bessemer.storage import write_atomic

    if patch and (fix or as_json):
        raise UserError("--patch prints a diff; leave out --fix and --json")
    reviews, refused = [], []
    for path, in_folder in script_paths(files):
        if path.suffix == ".ipynb" and (patch or fix):
            convert = f"jupyter nbconvert --to script {path}"
            raise UserError(f"{path}: a notebook is reviewed, not changed; `{convert}` writes a script of it")
        try:
            reviews.append(review_source(read_source(path)))
        except UserError as error:
            if not in_folder:
                raise
            refused.append(str(error))  # the other files of the folder are reviewed
    if fix:
        for result in reviews:
            if result.changed:
                write_atomic(Path(result.path), result.source.content(result.patched))
    remaining = [review_text(result.patched, result.path) for result in reviews] if fix else reviews
    if as_json:
        print_json([result.to_json() for result in reviews])
    elif patch:
        print("".join(result.patch for result in reviews), end="")
    else:
        _print_reviews(reviews, remaining, fix)
    for message in refused:
        print(f"not reviewed: {message}", file=sys.stderr)
    if refused or any(fault.severity != "note" for result in remaining for fault in result.faults):
        raise typer.Exit(1)


def _print_reviews(reviews: list[ScriptReview], remaining: list[ScriptReview], fix: bool) -> None:
    from bessemer.diagnose.review.catalogue import RULES

    for result, after in zip(reviews, remaining, strict=True):
        left = {(fault.rule, fault.symptom) for fault in after.faults}
        for fault in result.faults:
            rule = RULES[fault.rule]
            state = " (fixed)" if fix and (fault.rule, fault.symptom) not in left else ""
            place = f"{result.path}:{result.source.place(fault.line)}"
            print(f"{place}: {fault.severity}: {result.symptom(fault)} [{fault.rule}]{state}")
            print(f"    {rule.why} Fix: {rule.fix}{'' if fault.edits else ' (no patch)'}.")
    all_faults = [fault for result in reviews for fault in result.faults]
    notes = sum(fault.severity == "note" for fault in all_faults)
    patches = sum(bool(fault.edits) for fault in all_faults)
    counts = [_count(len(all_faults) - notes, "fault"), _count(notes, "note"), f"{patches} with a patch"]
    print(f"{_count(len(reviews), 'file')}: {', '.join(counts)}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
