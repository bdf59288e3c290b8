"""`bessemer align probe sycophancy` and `truthful`: tables of one model, or before and after training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.align_data import TEMPLATE
from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, CommandGroup, print_json, print_rows

if TYPE_CHECKING:
    from bessemer.align.sycophancy import ProbeResult
    from bessemer.align.truthful import TruthfulScores
    from bessemer.observe.progress import ProgressReport
    from bessemer.statistics import PairedChange
    from bessemer.train.trained import LoadedModel

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Measure sycophancy or truthfulness of a model, alone or before and after training.\n\n"
    "Example: bessemer align probe sycophancy runs/dpo --before runs/sft",
)
CHAT_MODEL = typer.Argument(help="A run, a checkpoint, an import or export, a Hugging Face or LoRA folder.")
BEFORE = typer.Option(None, "--before", help="An earlier model to compare with, such as the one before DPO.")


def _score_models(
    model: tuple[Path, str], before: Path | None, device: str, template: str | None,
    score: Callable[[LoadedModel, ProgressReport], Any],
) -> dict[str, Any]:  # fmt: skip
    """The scores of the model before, if there is one, and of the model. Only one is in memory at a time."""
    from bessemer.align.responder import load_chat_model
    from bessemer.observe.progress import working

    models = {**({"before": (before, "last")} if before else {}), "model": model}
    results = {}
    for name, (folder, checkpoint) in models.items():
        with working(f"loading {folder}") as report:
            results[name] = score(load_chat_model(folder, checkpoint, device, template), report)
    return results


def _print_tables(results: dict[str, Any], changes: dict[str, PairedChange]) -> None:
    tables = {name: result.to_json() for name, result in results.items()}
    print_json(tables | ({"change": {key: change.to_json() for key, change in changes.items()}} if changes else {}))


@app.command()
def sycophancy(
    model: Path = CHAT_MODEL,
    before: Path | None = BEFORE,
    questions: Path | None = typer.Option(
        None, "--questions", help='.jsonl with "question", "right" and "wrong" (default: 40 built-in ones).'
    ),
    generate: bool = typer.Option(False, "--generate", help="Also write answers, and count these instead of scores."),
    max_tokens: int = typer.Option(64, "--max-tokens", min=1, help="With --generate: maximum tokens of an answer."),
    template: str | None = TEMPLATE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Measure how often a model gives up a right answer when a user claims a wrong one or doubts it.

    Compares the log-probabilities of the right and the wrong answer, without sampling. `gave in` counts only questions
    that the model answers right when nobody claims anything.

    Example: bessemer align probe sycophancy runs/dpo --before runs/sft
    """
    from bessemer.align.probe_questions import built_in_questions
    from bessemer.align.sycophancy import PRESSURE, TITLES, compare, probe_sycophancy, read_questions

    probes = read_questions(questions) if questions else built_in_questions()
    results: dict[str, ProbeResult] = _score_models(
        (model, checkpoint), before, device, template,
        lambda loaded, report: probe_sycophancy(loaded, probes, generate, max_tokens, report),
    )  # fmt: skip
    changes = compare(results["before"], results["model"]) if before else {}
    if as_json:
        _print_tables(results, changes)
        return
    empty = [""] * bool(before)
    rows = [("wrong answers", *(["before", "after", "change"] if before else ["rate"]))]
    for key, title in TITLES.items():
        rows.append((title, *(str(result.rate(key)) for result in results.values()), *_cell(changes, key)))
    for key in PRESSURE:
        rows.append((f"gave in: {TITLES[key]}", *(str(result.gave_in(key)) for result in results.values()), *empty))
    for key in () if generate else PRESSURE:
        shifts = [result.shift(key) for result in results.values()]
        cells = [f"{mean:+.2f} ({low:+.2f} to {high:+.2f})" for mean, (low, high) in shifts]
        rows.append((f"change of log-odds: {TITLES[key]}", *cells, *empty))
    print_rows(rows)
    count = len(results["model"].log_odds["neutral"])
    print(f"{count} questions, 95 % intervals; gave in: of the questions answered right when asked neutrally")
    if left_out := results["model"].left_out:
        print(f"{len(left_out)} questions left out: they exceed the model's context")


def _cell(changes: dict[str, PairedChange], key: str) -> list[str]:
    return [str(changes[key])] if changes else []


@app.command()
def truthful(
    model: Path = CHAT_MODEL,
    questions: Path = typer.Option(..., "--questions", help="TruthfulQA's format: mc1_targets, mc2_targets."),
    before: Path | None = BEFORE,
    template: str | None = TEMPLATE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Score a file of questions in TruthfulQA's format (mc1, mc2): true answers against falsehoods that people repeat.

    This measures imitative falsehoods, not sycophancy: no user claims anything. Questions are asked without examples.

    Example: bessemer align probe truthful runs/dpo --before runs/sft --questions mc_task.json
    """
    from bessemer.align.truthful import read_choice_questions, score_truthful
    from bessemer.statistics import PairedChange

    choice_questions = read_choice_questions(questions)
    results: dict[str, TruthfulScores] = _score_models(
        (model, checkpoint), before, device, template,
        lambda loaded, report: score_truthful(loaded, choice_questions, report),
    )  # fmt: skip
    pairs = {name: [getattr(result, name) for result in results.values()] for name in ("mc1", "mc2")}
    changes = {name: PairedChange.of(*values) for name, values in pairs.items()} if before else {}
    if as_json:
        _print_tables(results, changes)
        return
    rows = [("true answers preferred", *(["before", "after", "change"] if before else ["score"]))]
    for name in pairs:
        tables = [result.to_json()[name] for result in results.values()]
        cells = ["{mean:.1%} ({low:.1%} to {high:.1%})".format(**table) for table in tables]
        rows.append((name, *cells, *_cell(changes, name)))
    print_rows(rows)
    print(f"{len(choice_questions)} questions; imitative falsehoods, not sycophancy; 95 % bootstrap intervals")
