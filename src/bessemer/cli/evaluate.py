"""`bessemer evaluate`: score a model on tasks with error bars, compare results, find questions in the training data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, group_with_default, print_json, print_rows
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.evaluate.results import Evaluation

app = typer.Typer(
    cls=group_with_default("model"), no_args_is_help=True,
    help="Score a model on tasks with error bars, or compare scored models.\n\n"
    "Example: bessemer evaluate runs/demo --tasks my_questions.jsonl,gsm8k --data eval-data",
)  # fmt: skip


@app.callback()
def _group() -> None:
    """`evaluate MODEL` is `evaluate model MODEL`."""


@app.command("model")
def evaluate(
    model: Path = typer.Argument(help="A run such as runs/demo, or any model that `bessemer generate` takes."),
    tasks: str = typer.Option(
        "", "--tasks", help="Comma-separated: names (mmlu, gsm8k, ...), lm-eval's .yaml files, .jsonl of own questions."
    ),
    suite: str = typer.Option("", "--suite", help="standard, medical or code: several tasks with the usual shots."),
    data: Path | None = typer.Option(None, "--data", help="Folder with the data of named tasks."),
    texts: list[str] = typer.Option(
        [], "--text", help="Also the loss of held-out text: NAME=FILE (.jsonl with text, or a text). Repeatable."
    ),
    held_out: bool = typer.Option(False, "--held-out", help="Also loss and bits per byte of the run's held-out data."),
    limit: int | None = typer.Option(None, "--limit", min=1, help="Questions of each task."),
    shots: int | None = typer.Option(None, "--shots", min=0, help="Examples before a question (default: the task's)."),
    chat: bool = typer.Option(False, "--chat", help="Ask in the model's chat template."),
    formats: int = typer.Option(1, "--formats", min=1, max=10, help="Prompt formats to try on own questions."),
    contamination: bool = typer.Option(
        False, "--contamination", help="Search the run's training data for the questions; score with and without them."
    ),
    out: Path | None = typer.Option(None, "--out", help="Folder for results.json and samples (default, of a run: "
                                    "RUN/evaluations/CHECKPOINT)."),
    fail_below: list[str] = typer.Option(
        [], "--fail-below", help="TASK=SCORE or TASK.METRIC=SCORE: exit code 1 if the score is lower. Repeatable."
    ),
    seed: int = typer.Option(1234, "--seed", help="The same seed draws the same examples."),
    needle: bool = typer.Option(False, "--needle", help="Instead: a needle in a haystack, by length and depth."),
    lengths: str = typer.Option("auto", "--lengths", help="With --needle: tokens of the text, such as 4Ki,16Ki."),
    kind: str = typer.Option("auto", "--kind", help="With --needle: key, copy or auto (by size)."),
    trials: int = typer.Option(10, "--trials", min=1, help="With --needle: questions per length and depth."),
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:  # fmt: skip
    """Score a model: accuracy with 95 % intervals, calibration, and what the number of questions can show.

    Example: bessemer evaluate runs/demo --tasks my_questions.jsonl,gsm8k --data eval-data --fail-below my_questions=0.4
    """
    from bessemer.observe.progress import working

    if needle:
        from bessemer.cli.evaluate_needle import measure

        return measure(model, lengths, kind, trials, seed, checkpoint, device, as_json)
    from bessemer.evaluate.model import evaluate_model, results_folder
    from bessemer.evaluate.run_tasks import TaskSettings, open_tasks
    from bessemer.evaluate.suite import SUITES

    names = tuple(name.strip() for name in f"{tasks},{suite}".split(",") if name.strip())
    if not (names or texts or held_out):
        raise UserError("evaluate: name what to measure: --tasks, --suite, --held-out, --text or --needle")
    if suite and suite not in SUITES:
        raise UserError(f"--suite {suite}: write {', '.join(SUITES)}; single tasks go into --tasks")
    if out is not None and not _can_be_folder(out):
        raise UserError(f"--out {out}: cannot be made; name a folder that can be written")
    gates = [_gate(text) for text in fail_below]
    settings = TaskSettings(names, limit, shots, chat, data, seed, formats)
    opened = open_tasks(settings)
    with working("loading the model") as report:
        result = evaluate_model(
            model, settings, opened, checkpoint, device, texts, held_out, contamination, report=report
        )
    folder = out or results_folder(model, checkpoint)
    path = result.write(folder) if folder else None
    _print(result, path, as_json)
    _check_gates(result, gates)
    return None


def _print(result: Evaluation, path: Path | None, as_json: bool) -> None:
    from bessemer.evaluate.results import power_line, score_lines

    if as_json:
        print_json(result.to_json())
        return
    if result.results:
        print_rows(score_lines(result))
        if line := power_line(result.results):
            print(line)
    for name, numbers in result.held_out.items():
        print(f"held out  {name}: " + "  ".join(f"{key} {value:.4f}" for key, value in numbers.items()))
    for task, facts in result.settings.get("contamination", {}).items():
        for line in facts["lines"]:
            print(f"found  {task}: {line}")
    if result.settings.get("truncated"):
        print(f"cut  {result.settings['truncated']:,} prompts were longer than the model's context")
    for note in result.settings.get("missing", []):
        print(f"left out  {note}")
    if registered := result.settings.get("registered"):
        print(f"registered  {registered}")
    if path:
        print(f"written  {path}")


def _can_be_folder(path: Path) -> bool:
    """Makes the folder: a score of hours must not be lost for a wrong path."""
    import os

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


def _gate(text: str) -> tuple[str, str | None, float]:
    name, _, number = text.rpartition("=")
    try:
        limit = float(number)
    except ValueError:
        limit = float("nan")
    if not name or limit != limit:
        raise UserError(f"--fail-below {text}: write TASK=SCORE, such as gsm8k=0.4")
    task, _, metric = name.partition(".")
    return task, metric or None, limit


def _check_gates(result: Evaluation, gates: list[tuple[str, str | None, float]]) -> None:
    failed = False
    for task, metric, limit in gates:
        score = result.find(task, metric)
        if score is None:
            known = ", ".join(dict.fromkeys(each.task for each in result.results)) or "none"
            raise UserError(f"--fail-below {task}: was not scored; there are {known}")
        worse = score.reported < limit if score.higher_is_better else score.reported > limit
        if worse:
            print(f"failed  {score.name} is {score.reported:.4g}, the limit is {limit:g}", file=sys.stderr)
            failed = True
    if failed:
        raise typer.Exit(1)


@app.command()
def compare(
    results: list[Path] = typer.Argument(help="Two or more folders or results.json that `evaluate --out` wrote."),
    metric: str = typer.Option("", "--metric", help="TASK or TASK.METRIC that chooses the best (default: the first)."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare scored models question by question: paired tests against the first, corrected for their number.

    Example: bessemer evaluate compare runs/a/evaluations/step-00001000.a1 runs/b/evaluations/step-00001000.a1
    """
    from bessemer.evaluate.compare import comparison, comparison_lines
    from bessemer.evaluate.results import Evaluation

    if len(results) < 2:
        raise UserError("compare: give at least two results")
    facts = comparison([Evaluation.read(path) for path in results], [str(path) for path in results], metric)
    if as_json:
        print_json(facts)
        return
    print_rows(comparison_lines(facts))
    print(f"best  {facts['best']['model']} by {facts['best']['metric']}: {facts['best']['score']:.4g}")
