"""`bessemer align vote` and `tally`: blind votes between two models in the terminal, and their result."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.align_data import (
    KEY_ENV,
    MAX_TOKENS,
    PROMPTS,
    SEED,
    TEMPERATURE,
    TEMPLATE,
    check_new_files,
    open_model,
)
from bessemer.cli.console import AS_JSON, DEVICE, print_json, print_rows
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.align.vote import Ballot, Tally


def vote(
    a: str = typer.Argument(help="The first model: a folder, or an endpoint as URL#NAME."),
    b: str = typer.Argument(help="The second model."),
    prompts: Path = PROMPTS,
    votes: Path = typer.Option(..., "--votes", help="Your votes (.jsonl); an existing file is continued."),
    voter: str | None = typer.Option(None, "--voter", help="Your name in the votes (default: the user's name)."),
    max_tokens: int = MAX_TOKENS,
    temperature: float = TEMPERATURE,
    seed: int = SEED,
    template: str | None = TEMPLATE,
    device: str = DEVICE,
    key_env: str | None = KEY_ENV,
    page: bool = typer.Option(False, "--page", help="Vote in a browser of this machine instead of the terminal."),
    port: int = typer.Option(8010, "--port", min=0, max=65535, help="With --page: its port; 0 takes a free one."),
) -> None:
    """Compare the answers of two models blindly: 1, 2, tie or skip, in random order and without names.

    The answers are written once to a file next to the votes (VOTES.answers.jsonl); copy it for other voters.

    Example: bessemer align vote runs/sft runs/dpo --prompts test.txt --votes votes-anna.jsonl --voter anna
    """
    from bessemer.align.vote import Ballot, Tally, answer_lines, comparisons, hold_vote
    from bessemer.observe.progress import working
    from bessemer.train.answers import read_prompts

    if votes.suffix != ".jsonl":
        raise UserError(f"--votes {votes}: the votes are JSON lines: write a name that ends in .jsonl")
    texts = read_prompts(prompts)
    with working("answering") as report:
        rows = comparisons(
            votes.with_suffix(".answers.jsonl"), [a, b], texts,
            lambda: [open_model(model, max_tokens, temperature, "last", device, template, key_env) for model in (a, b)],
            seed, report,
        )  # fmt: skip
    name = voter or getpass.getuser()
    if page:
        left = _vote_on_page(Ballot(votes, rows, name, seed), port)
    else:
        left = hold_vote(votes, rows, name, answer_lines(input), lambda text: print(text, end="", flush=True), seed)
    if left:
        print(f"{left:,} left: the same command continues")
    if votes.exists():
        _print_tally(Tally.of([votes]))


def _vote_on_page(ballot: Ballot, port: int) -> int:
    try:
        from bessemer.serve.vote import serve_vote
    except ImportError:
        raise UserError("--page needs a package: pip install 'bessemer[serve]'") from None
    serve_vote(ballot, port)
    return len(ballot.open)


def tally(
    votes: list[Path] = typer.Argument(help="Files of `bessemer align vote`, of one or more voters."),
    write: Path | None = typer.Option(None, "--write", help="Write the decided votes as pairs for dpo (.jsonl)."),
    as_json: bool = AS_JSON,
) -> None:
    """Count blind votes: win rate with interval, sign test, agreement between voters; write them as pairs.

    Example: bessemer align tally votes-anna.jsonl votes-ben.jsonl --write pairs.jsonl
    """
    from bessemer.align.records import write_rows
    from bessemer.align.vote import Tally

    check_new_files({"--write": write})
    result = Tally.of(votes)
    if as_json:
        print_json(result.to_json())
    else:
        _print_tally(result)
    if write:
        count = write_rows(write, result.pairs())
        if not as_json:
            print(f"written  {write}  {count:,} pairs")


def _print_tally(result: Tally) -> None:
    from bessemer.statistics import Rate, format_p, sign_test

    wins_a, wins_b = result.wins
    counts = result.to_json()["votes"]
    rows = [
        ("a", result.models[0], f"preferred for {wins_a:,} prompts"),
        ("b", result.models[1], f"preferred for {wins_b:,} prompts"),
        ("b wins", str(Rate(wins_b, wins_a + wins_b)), f"sign test p {format_p(sign_test(wins_a, wins_b))}"),
        ("votes", f"{sum(counts.values()):,}", f"{counts['tie']:,} ties, {counts['skip']:,} skipped"),
    ]
    print_rows(rows)
    if agreement := result.agreement():
        print(agreement.line())
