"""Blind votes between two models: answers in random order without names, saved so that they resume and become pairs."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.align.records import Row, read_rows, write_rows
from bessemer.align.responder import Responder, answer_prompts, conversation, prompt_value
from bessemer.data.agreement import Agreement, measure_agreement
from bessemer.errors import UserError
from bessemer.observe.progress import ProgressReport, silent
from bessemer.statistics import Rate, sign_test
from bessemer.train.answers import Prompt

MODEL_A, MODEL_B, TIE, SKIP = "a", "b", "tie", "skip"
DECIDED = (MODEL_A, MODEL_B)
_SIDES = {"1": 0, "2": 1, "a": 0, "b": 1}
_WORDS = {"t": TIE, "tie": TIE, "s": SKIP, "skip": SKIP}
_HELP = "1 or 2 for the better answer, t for a tie, s to skip, q to quit: "


def comparisons(
    path: Path, models: Sequence[str], prompts: Sequence[Prompt], open_models: Callable[[], Sequence[Responder]],
    seed: int = 0, report: ProgressReport = silent,
) -> list[Row]:  # fmt: skip
    """The answers of both models to every prompt: {number, prompt, a, b, models}. They are written to `path` once;
    later calls read them, so voters need no models. `models` are the names."""
    values = [prompt_value(conversation(prompt)) for prompt in prompts]
    if path.exists():
        rows = [row for _, row, _ in read_rows(path)]
        if [row.get("prompt") for row in rows] != values or rows[0].get("models") != list(models):
            raise UserError(f"{path}: has the answers of other models or prompts: remove it or name other --votes")
        return rows
    answers = []
    for name, responder in zip(models, open_models(), strict=True):
        report(f"answering: {name}")
        answers.append(answer_prompts(responder, [conversation(prompt) for prompt in prompts], seed))
    rows = [
        {"number": number, "prompt": value, MODEL_A: first, MODEL_B: second, "models": list(models)}
        for number, (value, first, second) in enumerate(zip(values, *answers, strict=True))
    ]
    write_rows(path, rows)
    return rows


class Ballot:
    """The rows that a voter has not judged yet, in random order, each with its answers in random order. Votes are
    appended to the file at once; rows with equal answers are ties that nobody is asked about."""

    def __init__(self, path: Path, rows: Sequence[Row], voter: str, seed: int = 0) -> None:
        self.path, self.voter, self.seed = path, voter, seed
        voted = {row["number"] for row in read_votes(path) if row["voter"] == voter} if path.exists() else set()
        self.open = [row for row in rows if row["number"] not in voted]
        random.Random(f"{seed} {voter}").shuffle(self.open)
        self.total = len(self.open)

    def next(self) -> Row | None:
        """The row to vote on; None if there is none left."""
        while self.open and self.open[0][MODEL_A] == self.open[0][MODEL_B]:
            self.vote(TIE)
        return self.open[0] if self.open else None

    @property
    def position(self) -> str:
        return f"{self.total - len(self.open) + 1} of {self.total}"

    def sides(self, row: Row) -> list[str]:
        """The models of the first and the second answer."""
        sides = [MODEL_A, MODEL_B]
        random.Random(f"{self.seed} {self.voter} {row['number']}").shuffle(sides)
        return sides

    def vote(self, vote: str) -> None:
        """Record a vote on the present row."""
        _append(self.path, {**self.open[0], "vote": vote, "voter": self.voter})
        self.open.pop(0)


def hold_vote(
    path: Path, rows: Sequence[Row], voter: str, read: Callable[[str], str | None], write: Callable[[str], None],
    seed: int = 0,
) -> int:  # fmt: skip
    """Asks for a vote on every row without one until `read` gives None or q. Returns how many rows have no vote yet."""
    ballot = Ballot(path, rows, voter, seed)
    while (row := ballot.next()) is not None:
        vote = _ask(row, ballot.sides(row), ballot.position, read, write)
        if vote is None:
            break
        ballot.vote(vote)
    return len(ballot.open)


def shown_prompt(row: Row) -> str:
    """The prompt as a person reads it."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _ask(
    row: Row, sides: Sequence[str], position: str, read: Callable[[str], str | None], write: Callable[[str], None]
) -> str | None:
    write(f"\n[{position}]\n{shown_prompt(row)}\n\n--- 1 ---\n{row[sides[0]]}\n\n--- 2 ---\n{row[sides[1]]}\n")
    while True:
        line = read(_HELP)
        key = "q" if line is None else line.strip().lower()
        if key in ("q", "quit"):
            return None
        if key in _SIDES:
            return sides[_SIDES[key]]
        if key in _WORDS:
            return _WORDS[key]


def _append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_votes(path: Path) -> list[Row]:
    votes = []
    for place, row, _ in read_rows(path):
        if missing := [name for name in ("number", "prompt", "vote", "voter", "models", *DECIDED) if name not in row]:
            raise UserError(f"{place}: has no {missing[0]!r}: it is not a vote of `bessemer align vote`")
        votes.append(row)
    return votes


@dataclass(frozen=True)
class Tally:
    """The votes of one or more voters. A prompt counts once: for the model with more of its votes."""

    models: tuple[str, str]
    votes: list[Row]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Tally:
        votes: list[Row] = []
        for path in paths:
            votes += read_votes(path)
        names = {tuple(row["models"]) for row in votes}
        if len(names) > 1:
            raise UserError(f"the files compare different models: {' and '.join(map(str, sorted(names)))}")
        return cls(next(iter(names)), votes)

    @property
    def wins(self) -> tuple[int, int]:
        """Prompts that A and B won."""
        balance: dict[int, int] = defaultdict(int)
        for row in self.votes:
            balance[row["number"]] += (row["vote"] == MODEL_B) - (row["vote"] == MODEL_A)
        return sum(value < 0 for value in balance.values()), sum(value > 0 for value in balance.values())

    def pairs(self) -> list[Row]:
        return [
            {"prompt": row["prompt"], "chosen": row[row["vote"]],
             "rejected": row[MODEL_A if row["vote"] == MODEL_B else MODEL_B], "voter": row["voter"]}
            for row in self.votes if row["vote"] in DECIDED
        ]  # fmt: skip

    def agreement(self) -> Agreement | None:
        """Agreement on the prompts that all voters judged; None with one voter, or without such a prompt."""
        by_prompt: dict[int, dict[str, str]] = defaultdict(dict)
        for row in self.votes:
            if row["vote"] != SKIP:
                by_prompt[row["number"]][row["voter"]] = row["vote"]
        voters = sorted({row["voter"] for row in self.votes})
        common = [[some[voter] for voter in voters] for some in by_prompt.values() if len(some) == len(voters)]
        return measure_agreement(common)

    def to_json(self) -> dict[str, Any]:
        a, b = self.wins
        counts = {kind: sum(row["vote"] == kind for row in self.votes) for kind in (*DECIDED, TIE, SKIP)}
        voters = sorted({row["voter"] for row in self.votes})
        return {
            "models": list(self.models), "voters": voters, "votes": counts, "wins": {MODEL_A: a, MODEL_B: b},
            "win_rate_b": Rate(b, a + b).to_json(), "p": sign_test(a, b),
            "agreement": vars(agreement) if (agreement := self.agreement()) else None,
        }  # fmt: skip


def answer_lines(read: Callable[[], str]) -> Callable[[str], str | None]:
    """A reader of the terminal for `hold_vote`: None at the end of the input."""

    def ask(question: str) -> str | None:
        print(question, end="", flush=True)
        try:
            return read()
        except EOFError:
            print()
            return None

    return ask
