import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bessemer.align.responder import Conversation, Reply
from bessemer.align.vote import Tally, comparisons, hold_vote
from bessemer.errors import UserError

PROMPTS = [f"prompt {number}" for number in range(12)]


class Fixed:
    def __init__(self, identity: str) -> None:
        self.identity = identity

    def reply(self, conversations: Sequence[Conversation], seed: int = 0) -> list[Reply]:
        return [
            Reply("the same" if number == 0 else f"{self.identity}: {messages[-1]['content']}", True)
            for number, messages in enumerate(conversations)
        ]


def open_rows(folder: Path) -> list[dict]:
    return comparisons(folder / "v.answers.jsonl", ["x", "y"], PROMPTS, lambda: [Fixed("good"), Fixed("bad")])


class Judge:
    """Votes for the answer that begins with a word; `limit` votes, then the input ends."""

    def __init__(self, word: str, limit: int = 100) -> None:
        self.word, self.limit, self.screens = word, limit, [""]

    def write(self, text: str) -> None:
        self.screens.append(text)

    def read(self, _: str) -> str | None:
        self.limit -= 1
        if self.limit < 0:
            return None
        first, second = self.screens[-1].split("--- 2 ---")
        return "1" if f"--- 1 ---\n{self.word}" in first else "2" if second.strip().startswith(self.word) else "t"


def test_votes_are_blind_resume_and_become_pairs(tmp_path: Path) -> None:
    rows, path = open_rows(tmp_path), tmp_path / "v.jsonl"
    early = Judge("good", limit=4)
    left = hold_vote(path, rows, "anna", early.read, early.write)
    assert 7 <= left <= 8  # one prompt has equal answers and is not asked
    late = Judge("good")
    assert hold_vote(path, rows, "anna", late.read, late.write) == 0
    votes = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(vote["number"] for vote in votes) == list(range(12))
    assert not any("x" in screen.split() or "y" in screen.split() for screen in late.screens)
    firsts = ["--- 1 ---\ngood" in screen for screen in early.screens[1:] + late.screens[1:]]
    assert 0 < sum(firsts) < len(firsts)  # either side comes first
    tally = Tally.of([path])
    assert tally.wins == (11, 0) and tally.to_json()["votes"] == {"a": 11, "b": 0, "tie": 1, "skip": 0}
    assert tally.to_json()["p"] == pytest.approx(2 / 2**11)
    assert tally.to_json()["win_rate_b"]["rate"] == 0.0
    pairs = tally.pairs()
    assert len(pairs) == 11 and all(
        pair == {"prompt": pair["prompt"], "chosen": f"good: {pair['prompt']}", "rejected": f"bad: {pair['prompt']}",
                 "voter": "anna"}
        for pair in pairs
    )  # fmt: skip


def test_several_voters_agree_or_not(tmp_path: Path) -> None:
    rows = open_rows(tmp_path)
    for voter, word in (("anna", "good"), ("ben", "good"), ("cy", "bad")):
        judge = Judge(word)
        hold_vote(tmp_path / f"{voter}.jsonl", rows, voter, judge.read, judge.write)
    both = Tally.of([tmp_path / "anna.jsonl", tmp_path / "ben.jsonl"])
    agreement = both.agreement()
    assert agreement is not None and (agreement.equal, agreement.kappa) == (1.0, pytest.approx(1.0))
    split = Tally.of([tmp_path / "anna.jsonl", tmp_path / "cy.jsonl"])
    assert split.wins == (0, 0)
    agreement = split.agreement()
    assert agreement is not None and agreement.equal == pytest.approx(1 / 12)
    assert agreement.kappa is not None and agreement.kappa < 0.1
    three = Tally.of([tmp_path / f"{voter}.jsonl" for voter in ("anna", "ben", "cy")])
    assert three.wins == (11, 0) and len(three.pairs()) == 33
    # Fleiss' kappa by hand: 11 prompts with votes (2, 1, 0), one with three ties.
    observed = (11 * (2 * 1 + 0) / (3 * 2) + 1) / 12
    chance = (22 / 36) ** 2 + (11 / 36) ** 2 + (3 / 36) ** 2
    agreement = three.agreement()
    assert agreement is not None and agreement.kappa == pytest.approx((observed - chance) / (1 - chance))
    assert Tally.of([tmp_path / "anna.jsonl"]).agreement() is None


def test_bad_keys_are_asked_again(tmp_path: Path) -> None:
    keys: Iterator[str] = iter(["", "x", "3", "s", "tie", " 1 ", "quit"])
    rows = open_rows(tmp_path)[1:]
    left = hold_vote(tmp_path / "v.jsonl", rows, "anna", lambda _: next(keys), lambda _: None)
    votes = [json.loads(line)["vote"] for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert votes[:2] == ["skip", "tie"] and votes[2] in ("a", "b") and left == 8


def test_mistakes_have_one_line(tmp_path: Path) -> None:
    open_rows(tmp_path)
    with pytest.raises(UserError, match="answers of other models or prompts"):
        comparisons(tmp_path / "v.answers.jsonl", ["x", "z"], PROMPTS, list)
    (tmp_path / "v.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"v\.jsonl:1: has no 'number'"):
        Tally.of([tmp_path / "v.jsonl"])
