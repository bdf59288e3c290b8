"""`bessemer evaluate judge pairs`, `turns` and `facts`: answers in a file, judged by a model behind an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import AS_JSON, CommandGroup, print_json, print_rows
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.endpoint import Endpoint

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Judge answers with a model behind an OpenAI-compatible endpoint.\n\n"
    "Example: bessemer evaluate judge pairs pairs.jsonl --url http://127.0.0.1:8000/v1 --model judge",
)
FILE = typer.Argument(help="A .jsonl file.")
URL = typer.Option(..., "--url", help="The endpoint, which ends in /v1, such as that of `bessemer serve`.")
MODEL = typer.Option(..., "--model", help="The judge's name there.")
KEY_ENV = typer.Option(None, "--key-env", help="The environment variable that holds the key.")
RUBRIC = typer.Option(None, "--rubric", help="A text file that says what to prefer (default: helpful and correct).")
PARALLEL = typer.Option(8, "--parallel", min=1, help="Requests at a time.")
MAX_TOKENS = typer.Option(512, "--max-tokens", min=1, help="Maximum number of tokens of a reply.")
WRITE = typer.Option(None, "--write", help="Write each row with its verdict to this .jsonl file.")


def _endpoint(url: str, model: str, key_env: str | None, parallel: int, max_tokens: int) -> Endpoint:
    from bessemer.endpoint import Endpoint

    return Endpoint(url.rstrip("/"), model, key_env, parallel=parallel, max_tokens=max_tokens)


def _rubric(path: Path | None, default: str) -> str:
    if path is None:
        return default
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--rubric {path}: cannot be read ({error}); name a text file") from None
    if not text:
        raise UserError(f"--rubric {path}: is empty; write what the judge should prefer")
    return text


def _write(path: Path | None, rows: list[dict[str, Any]], results: list[Any]) -> None:
    import json

    from bessemer.evaluate.judge import judged_rows
    from bessemer.storage import write_atomic

    if path is not None:
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in judged_rows(rows, results)))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@app.command()
def pairs(
    file: Path = FILE,
    url: str = URL,
    model: str = MODEL,
    key_env: str | None = KEY_ENV,
    rubric: Path | None = RUBRIC,
    parallel: int = PARALLEL,
    max_tokens: int = MAX_TOKENS,
    write: Path | None = WRITE,
    as_json: bool = AS_JSON,
) -> None:
    """Compare two answers to each prompt in both orders: win rate of A, also controlled for length, and consistency.

    Rows have `prompt` (a text or messages), `answer_a` and `answer_b`, perhaps a human `label` (A, B or tie) and a
    `difficulty`. An answer wins only if it is preferred in both orders.

    Example: bessemer evaluate judge pairs pairs.jsonl --url http://127.0.0.1:8000/v1 --model judge
    """
    from dataclasses import asdict

    from bessemer.evaluate.judge import PAIR_RUBRIC, judge_pairs, read_rows, score_pairs
    from bessemer.observe.progress import working

    rows = read_rows(file, ("prompt", "answer_a", "answer_b"))
    with working(f"judging {len(rows)} pairs"):
        endpoint = _endpoint(url, model, key_env, parallel, max_tokens)
        verdicts = judge_pairs(endpoint, rows, _rubric(rubric, PAIR_RUBRIC))
    scores = score_pairs(rows, verdicts)
    _write(write, rows, verdicts)
    if as_json:
        print_json(asdict(scores))
        return
    low, high = scores.interval
    table = [
        ["win rate of A", f"{_share(scores.win_rate)} ({_share(low)} to {_share(high)})"],
        ["wins, ties, losses", f"{scores.wins}, {scores.ties}, {scores.losses}; {scores.unread} unreadable"],
        ["length-controlled", f"{_share(scores.length.rate)} (effect of length {scores.length.phi:+.2f})"],
        ["consistency", f"{_share(scores.consistency)} equal in both orders; the first shown wins {scores.first:.1%}"],
    ]
    if scores.labelled:
        human = f"{_share(scores.agreement)} equal, kappa {_number(scores.kappa)}, {scores.labelled} labelled pairs"
        table.append(["agreement with people", human])
    print_rows(table)


@app.command()
def turns(
    file: Path = FILE,
    url: str = URL,
    model: str = MODEL,
    key_env: str | None = KEY_ENV,
    rubric: Path | None = RUBRIC,
    answers_url: str | None = typer.Option(None, "--answers-url", help="Ask this endpoint for the answers first."),
    answers_model: str = typer.Option("", "--answers-model", help="The name of the model that answers."),
    answers_key_env: str | None = typer.Option(None, "--answers-key-env", help="The variable with its key."),
    parallel: int = PARALLEL,
    max_tokens: int = MAX_TOKENS,
    write: Path | None = WRITE,
    as_json: bool = AS_JSON,
) -> None:
    """Grade each answer of conversations with several turns from 1 to 10, as MT-Bench does.

    Rows have `turns` (what the user says) and `answers`, perhaps `references`, a `category`, and `human` grades.

    Example: bessemer evaluate judge turns chats.jsonl --url http://127.0.0.1:8000/v1 --model judge
    """
    from dataclasses import asdict

    from bessemer.evaluate.judge import TURN_RUBRIC, answer_turns, judge_turns, read_rows, score_turns
    from bessemer.observe.progress import working

    rows = read_rows(file, ("turns",) if answers_url else ("turns", "answers"))
    with working(f"judging {len(rows)} conversations"):
        if answers_url:
            rows = answer_turns(_endpoint(answers_url, answers_model, answers_key_env, parallel, max_tokens), rows)
        endpoint = _endpoint(url, model, key_env, parallel, max_tokens)
        grades = judge_turns(endpoint, rows, _rubric(rubric, TURN_RUBRIC))
    scores = score_turns(rows, grades)
    _write(write, rows, grades)
    if as_json:
        print_json(asdict(scores))
        return
    low, high = scores.interval
    table = [["mean grade", f"{_number(scores.mean)} ({low:.2f} to {high:.2f}), {scores.unread} unreadable"]]
    table += [[f"turn {turn}", _number(grade)] for turn, grade in enumerate(scores.by_turn, start=1)]
    table += [[name, _number(grade)] for name, grade in scores.by_category.items()]
    if scores.labelled:
        human = f"rank correlation {_number(scores.spearman)}, {scores.labelled} graded answers"
        table.append(["agreement with people", human])
    print_rows(table)


@app.command()
def facts(
    file: Path = FILE,
    url: str = URL,
    model: str = MODEL,
    key_env: str | None = KEY_ENV,
    parallel: int = PARALLEL,
    max_tokens: int = MAX_TOKENS,
    write: Path | None = WRITE,
    as_json: bool = AS_JSON,
) -> None:
    """List the claims of each answer and compare each with a reference: supported, contradicted or absent.

    Rows have `answer` and `reference`, perhaps a `prompt`, given `claims`, and human `labels` of these.

    Example: bessemer evaluate judge facts answers.jsonl --url http://127.0.0.1:8000/v1 --model judge
    """
    from dataclasses import asdict

    from bessemer.evaluate.judge import judge_facts, read_rows, score_facts
    from bessemer.observe.progress import working

    rows = read_rows(file, ("answer", "reference"))
    with working(f"judging {len(rows)} answers"):
        results = judge_facts(_endpoint(url, model, key_env, parallel, max_tokens), rows)
    scores = score_facts(rows, results)
    _write(write, rows, results)
    if as_json:
        print_json(asdict(scores))
        return
    table = [
        ["claims", f"{scores.claims} of {scores.answers} answers; {scores.unread} replies unreadable"],
        ["supported", _share(scores.supported)],
        ["contradicted", _share(scores.contradicted)],
        ["absent from the reference", _share(scores.absent)],
        ["answers with a contradiction", _share(scores.contradicting)],
    ]
    if scores.labelled:
        table.append(["agreement with people", f"kappa {_number(scores.kappa)}, {scores.labelled} labelled claims"])
    print_rows(table)
