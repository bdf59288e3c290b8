"""Evaluation by a judge: any model behind an OpenAI-compatible endpoint.

Pairs are judged in both orders and won only if both agree, since judges prefer a position. Conversations are graded
turn by turn from 1 to 10, as in MT-Bench. Facts: the claims of an answer are listed and each is compared with a
reference text. Every kind reports how far the judge agrees with human labels, where the rows have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bessemer.data.agreement import cohen_kappa
from bessemer.endpoint import Endpoint
from bessemer.errors import UserError
from bessemer.evaluate.length_control import LengthControl, length_controlled, spearman
from bessemer.judge_replies import (
    COMPARE,
    DATA,
    GRADE,
    conversation_text,
    in_tags,
    mean,
    parse_comparison,
    parse_grade,
    parse_texts,
    parse_word,
)
from bessemer.statistics import Interval, bootstrap_interval

PAIR_RUBRIC = (
    "You compare two answers to the same request. Prefer the one that is more helpful, correct and complete. Neither "
    "length nor position matters by itself."
)
TURN_RUBRIC = (
    "You grade the last answer of a conversation for helpfulness, relevance, accuracy, depth and level of detail."
)
CLAIM_RUBRIC = (
    "List every factual claim of the answer as a short sentence that can be understood alone, without opinions and "
    "questions. Reply with a JSON list of texts only."
)
FACT_RUBRIC = (
    "Decide whether the reference supports the claim, contradicts it, or neither. Use nothing but the reference. Reply "
    'with JSON only: {"verdict": "supported"}, {"verdict": "contradicted"} or {"verdict": "absent"}'
)
LABELS = {1.0: "A", 0.5: "tie", 0.0: "B"}
VERDICTS = ("supported", "contradicted", "absent")
Row = dict[str, Any]


@dataclass(frozen=True)
class PairVerdict:
    """Values for A, 1, 0.5 or 0: `forward` with A shown first, `swapped` with B shown first; None was unreadable."""

    forward: float | None
    swapped: float | None

    @property
    def value(self) -> float | None:
        """A win only if both orders agree; otherwise a tie. None if a reply could not be read."""
        if self.forward is None or self.swapped is None:
            return None
        return self.forward if self.forward == self.swapped else 0.5


@dataclass(frozen=True)
class PairScores:
    """`win_rate` is A's, ties counting half; `first` is the share of replies that prefer the answer shown first (0.5
    without a preference); `kappa` compares verdicts with human labels."""

    rows: int
    unread: int
    win_rate: float
    interval: Interval
    wins: int
    ties: int
    losses: int
    consistency: float
    first: float
    length: LengthControl
    labelled: int
    agreement: float | None
    kappa: float | None


def read_rows(path: Path, needed: Sequence[str]) -> list[Row]:
    """The objects of a .jsonl file that all have these keys."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a .jsonl file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: is not JSON ({error}); write one object per line") from None
        if missing := [key for key in needed if not isinstance(row, dict) or key not in row]:
            raise UserError(f"{path}:{number}: has no {missing[0]!r}; every row needs {', '.join(needed)}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def _ask(endpoint: Endpoint, system: str, texts: Sequence[str]) -> list[str]:
    conversations = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in texts]
    return [answer.text for answer in endpoint.complete(conversations)]


def judge_pairs(endpoint: Endpoint, rows: Sequence[Row], rubric: str = PAIR_RUBRIC) -> list[PairVerdict]:
    """Rows have `prompt`, `answer_a` and `answer_b`."""
    system = f"{rubric}\n\n{DATA} {COMPARE}"
    orders = (("answer_a", "answer_b"), ("answer_b", "answer_a"))
    texts = [
        in_tags(conversation=conversation_text(row["prompt"]), answer_a=str(row[first]), answer_b=str(row[second]))
        for first, second in orders
        for row in rows
    ]
    replies = _ask(endpoint, system, texts)
    pairs = zip(replies[: len(rows)], replies[len(rows) :], strict=True)
    return [PairVerdict(parse_comparison(a, "A"), parse_comparison(b, "B")) for a, b in pairs]


def score_pairs(rows: Sequence[Row], verdicts: Sequence[PairVerdict]) -> PairScores:
    """Win rate, consistency and length control; agreement with `label` (A, B or tie) where rows have one. `difficulty`
    of all rows, if they have it, enters the length control."""
    read = [(row, verdict, verdict.value) for row, verdict in zip(rows, verdicts, strict=True)]
    known = [(row, verdict, value) for row, verdict, value in read if value is not None]
    if not known:
        raise UserError(f"the judge gave no verdict on any of {len(rows)} pairs: name a model that follows the format")
    values = [value for _, _, value in known]
    replies = [x for _, verdict, _ in known for x in (verdict.forward, 1 - (verdict.swapped or 0.0)) if x is not None]
    lengths = [float(len(str(row["answer_a"])) - len(str(row["answer_b"]))) for row, _, _ in known]
    rated = all("difficulty" in row for row, _, _ in known)
    difficulty = [float(row["difficulty"]) for row, _, _ in known] if rated else None
    labelled = [(_label(row), LABELS[value]) for row, _, value in known if row.get("label") is not None]
    return PairScores(
        rows=len(rows), unread=len(rows) - len(known), win_rate=sum(values) / len(values),
        interval=bootstrap_interval(values), wins=values.count(1.0), ties=values.count(0.5), losses=values.count(0.0),
        consistency=sum(v.forward == v.swapped for _, v, _ in known) / len(known), first=sum(replies) / len(replies),
        length=length_controlled(values, lengths, difficulty), labelled=len(labelled),
        agreement=sum(a == b for a, b in labelled) / len(labelled) if labelled else None,
        kappa=cohen_kappa(*map(list, zip(*labelled, strict=True))) if labelled else None,
    )  # fmt: skip


def _label(row: Row) -> str:
    labels = {label.casefold(): label for label in LABELS.values()}
    label = labels.get(str(row["label"]).casefold())
    if label is None:
        raise UserError(f"label {row['label']!r}: write A, B or tie")
    return label


@dataclass(frozen=True)
class TurnScores:
    """Mean grades of all turns, by turn and by `category`; `spearman` with `human` grades."""

    grades: int
    unread: int
    mean: float | None
    interval: Interval
    by_turn: list[float | None]
    by_category: dict[str, float | None]
    labelled: int
    spearman: float | None


def answer_turns(endpoint: Endpoint, rows: Sequence[Row]) -> list[Row]:
    """Rows with the `answers` of a model to their `turns`, each turn with the conversation before it."""
    answers: list[list[str]] = [[] for _ in rows]
    for turn in range(max(len(row["turns"]) for row in rows)):
        waiting = [i for i, row in enumerate(rows) if turn < len(row["turns"])]
        conversations = [_messages(rows[i]["turns"][: turn + 1], answers[i]) for i in waiting]
        for i, answer in zip(waiting, endpoint.complete(conversations), strict=True):
            answers[i].append(answer.text)
    return [{**row, "answers": given} for row, given in zip(rows, answers, strict=True)]


def _messages(turns: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """The turns of a user with the answers between them."""
    messages: list[dict[str, str]] = []
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answers[i]}] if i < len(answers) else []
    return messages


def judge_turns(endpoint: Endpoint, rows: Sequence[Row], rubric: str = TURN_RUBRIC) -> list[list[float | None]]:
    """A grade from 1 to 10 for each answer of each row; rows have `turns`, `answers` and perhaps `references`."""
    system = f"{rubric}\n\n{DATA} {GRADE.format(lowest=1, highest=10)}"
    places = [(row, turn) for row in rows for turn in range(len(row["turns"]))]
    if short := next((row for row in rows if len(row["answers"]) < len(row["turns"])), None):
        raise UserError(f"a row has {len(short['turns'])} turns and {len(short['answers'])} answers: give one for each")
    texts = []
    for row, turn in places:
        before = _messages(row["turns"][: turn + 1], row["answers"][:turn])
        reference = {"reference": str(row["references"][turn])} if turn < len(row.get("references") or ()) else {}
        texts.append(in_tags(conversation=conversation_text(before), **reference, answer=str(row["answers"][turn])))
    grades = (parse_grade(reply) for reply in _ask(endpoint, system, texts))
    readable = iter([grade if grade is not None and 1 <= grade <= 10 else None for grade in grades])
    return [[next(readable) for _ in row["turns"]] for row in rows]


def score_turns(rows: Sequence[Row], grades: Sequence[Sequence[float | None]]) -> TurnScores:
    """Rows may have a `category`, and `human` grades of each turn."""
    known = [grade for row in grades for grade in row if grade is not None]
    turns = max(map(len, grades))
    categories: dict[str, list[float | None]] = {}
    for row, given in zip(rows, grades, strict=True):
        categories.setdefault(str(row.get("category", "")), []).extend(given)
    humans = [
        (float(human), grade)
        for row, given in zip(rows, grades, strict=True)
        for human, grade in zip(row.get("human") or (), given, strict=False)
        if grade is not None
    ]
    return TurnScores(
        grades=len(known), unread=sum(map(len, grades)) - len(known), mean=mean(known),
        interval=bootstrap_interval(known), labelled=len(humans),
        by_turn=[mean([given[turn] for given in grades if turn < len(given)]) for turn in range(turns)],
        by_category={name: mean(values) for name, values in sorted(categories.items()) if name},
        spearman=spearman(*map(list, zip(*humans, strict=True))) if humans else None,
    )  # fmt: skip


@dataclass(frozen=True)
class FactVerdict:
    """The claims of one answer, and for each supported, contradicted, absent, or None if the reply was unreadable."""

    claims: list[str] | None
    verdicts: list[str | None]


@dataclass(frozen=True)
class FactScores:
    """Shares of the claims of all answers; `contradicting` of the answers have a contradicted claim. `kappa` compares
    the judge with human `labels` of given claims."""

    answers: int
    unread: int
    claims: int
    supported: float | None
    contradicted: float | None
    absent: float | None
    contradicting: float | None
    labelled: int
    kappa: float | None


def judge_facts(endpoint: Endpoint, rows: Sequence[Row]) -> list[FactVerdict]:
    """Rows have `answer` and `reference`; `claims` are taken as given, or listed by the judge first."""
    listing = [row for row in rows if "claims" not in row]
    texts = [in_tags(**_question(row), answer=str(row["answer"])) for row in listing]
    listed = iter([parse_texts(reply) for reply in _ask(endpoint, f"{CLAIM_RUBRIC} {DATA}", texts)])
    claims = [list(map(str, row["claims"])) if "claims" in row else next(listed) for row in rows]
    pairs = [(row, claim) for row, texts in zip(rows, claims, strict=True) for claim in texts or ()]
    shown = [in_tags(reference=str(row["reference"]), claim=claim) for row, claim in pairs]
    replies = iter(_ask(endpoint, f"{FACT_RUBRIC} {DATA}", shown))
    return [FactVerdict(texts, [_fact(next(replies)) for _ in texts or ()]) for texts in claims]


def _question(row: Row) -> dict[str, str]:
    return {"conversation": conversation_text(row["prompt"])} if "prompt" in row else {}


def _fact(reply: str) -> str | None:
    word = parse_word(reply, "verdict").casefold()
    return word if word in VERDICTS else None


def score_facts(rows: Sequence[Row], results: Sequence[FactVerdict]) -> FactScores:
    """Rows with `claims` may have human `labels` of them."""
    words = [word for result in results for word in result.verdicts if word is not None]
    shares = {verdict: words.count(verdict) / len(words) if words else None for verdict in VERDICTS}
    read = [result for result in results if result.claims is not None]
    labelled = [
        (str(label), word)
        for row, result in zip(rows, results, strict=True)
        for label, word in zip(row.get("labels") or (), result.verdicts, strict=False)
        if word is not None
    ]
    return FactScores(
        answers=len(rows), unread=len(rows) - len(read) + sum(r.verdicts.count(None) for r in read), claims=len(words),
        contradicting=sum("contradicted" in r.verdicts for r in read) / len(read) if read else None,
        supported=shares["supported"], contradicted=shares["contradicted"], absent=shares["absent"],
        labelled=len(labelled), kappa=cohen_kappa(*map(list, zip(*labelled, strict=True))) if labelled else None,
    )  # fmt: skip


def judged_rows(rows: Sequence[Row], results: Sequence[Any]) -> Iterator[Row]:
    """Each row with the judge's verdict, for --write."""
    for row, result in zip(rows, results, strict=True):
        yield {**row, "judge": result if isinstance(result, list) else asdict(result)}
