"""`bessemer align score` and `best`: what a reward model says of answers, and best-of-N."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, CHECKPOINT, DEVICE, print_json
from bessemer.errors import UserError

FIGURE = typer.Option(None, "--figure", help="Also draw it as an SVG file.")


def score(
    model: Path = typer.Argument(help="A run of objective: reward, its export, or a folder of a reward model."),
    rows: Path = typer.Argument(help="A .jsonl of pairs, of prompts with completions, or of conversations."),
    columns: list[str] = typer.Option(
        [], "--column", help="A column by its purpose, such as chosen=good (repeatable); default: as named."
    ),
    write: Path | None = typer.Option(None, "--write", help="Write the rows with their scores to this .jsonl."),
    figure: Path | None = FIGURE,
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Score answers with a reward model; on pairs, measure its accuracy and calibration.

    Example: bessemer align score runs/reward pairs.jsonl --write scored.jsonl
    """
    from bessemer.align.scored_rows import score_file, summary_lines

    summary = score_file(model, rows, columns, write, figure, checkpoint, device)
    if as_json:
        print_json(summary)
    else:
        print("\n".join(summary_lines(summary)))


def best(
    model: Path = typer.Argument(help="A run, one of its checkpoints, an import or export, a Hugging Face folder."),
    prompts: Path = typer.Option(..., "--prompts", help='One prompt per line, or .jsonl with "prompt" or "messages".'),
    reward: str = typer.Option(
        ..., "--reward", help="A reward model's folder, exact, math, regex, json or code, file.py:function, or YAML."
    ),
    held_out: str | None = typer.Option(
        None, "--held-out", help="Another reward, which measures the chosen answers: falls where --reward is gamed."
    ),
    n: int = typer.Option(16, "--n", min=1, max=4096, help="Samples of each prompt."),
    write: Path | None = typer.Option(
        None, "--write", help="Write the best answers to this .jsonl, as rows for objective: sft."
    ),
    pairs: bool = typer.Option(
        False, "--pairs", help="Write the best and the worst answer of a prompt as a pair, for dpo or reward."
    ),
    figure: Path | None = FIGURE,
    max_tokens: int = typer.Option(200, "--max-tokens", min=1, help="Maximum number of tokens of an answer."),
    temperature: float = typer.Option(1.0, "--temperature", help="0 always takes the most likely token."),
    top_p: float = typer.Option(1.0, "--top-p", help="Sample from the most likely tokens that reach this probability."),
    stop: list[str] = typer.Option([], "--stop", help="End an answer before this text (repeatable)."),
    seed: int = typer.Option(0, "--seed", help="The same seed gives the same answers."),
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
    as_json: bool = AS_JSON,
) -> None:
    """Sample N answers to each prompt, take what a reward prefers, and estimate the reward of fewer samples.

    With --write, a stopped command continues where it was.

    Example: bessemer align best runs/sft --prompts prompts.jsonl --reward runs/reward --n 16 --write best.jsonl
    """
    from bessemer.align.sample_best import BestOf, best_lines
    from bessemer.model.generate import Sampling
    from bessemer.train.answers import AnswerSettings

    if pairs and write is None:
        raise UserError("--pairs: says what to write: add --write pairs.jsonl")
    settings = AnswerSettings(max_tokens, n, Sampling(temperature, 0, top_p, seed), tuple(stop))
    job = BestOf(model, prompts, reward, held_out, settings, write, pairs, figure, checkpoint, device)
    summary = job.run()
    lines = best_lines(summary)
    if as_json:
        print_json({key: value for key, value in summary.items() if key != "lines"})
    else:
        print("\n".join(lines))
