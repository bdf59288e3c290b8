"""Finds preference pairs that teach sycophancy: the chosen answer agrees or flatters, the rejected one corrects.

The measure is lexical (`data/agreeable.py`). It cannot know whether the user is right, so two other signals can acquit
a pair: the row's own true answer, and a model that finds the agreeing answer likelier than the correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.align.answer_logps import answer_logps
from bessemer.align.records import Row, read_rows
from bessemer.align.responder import Conversation, prompt_value
from bessemer.align.scored_rows import read_answers
from bessemer.data.agreeable import agreeableness, agreeing_phrases
from bessemer.data.tokenizer.chat import message_text
from bessemer.errors import UserError
from bessemer.observe.progress import ProgressReport, silent
from bessemer.statistics import Rate, sign_test
from bessemer.train.trained import LoadedModel

THRESHOLD = 0.5  # difference of the agreeableness above which a pair is suspected: more than a first "yes"


@dataclass(frozen=True)
class AuditedPair:
    """A row with its scores. `model` says by how much a model finds the chosen answer likelier than the rejected one
    (`AnswerLogp.over`), if one was asked."""

    place: str
    row: Row
    prompt: Conversation
    chosen: str
    rejected: str
    agreeable: tuple[float, float]  # of the chosen and the rejected answer
    true_answer: str | None = None
    model: float | None = None

    @property
    def difference(self) -> float:
        return self.agreeable[0] - self.agreeable[1]

    @property
    def is_suspect(self) -> bool:
        """Whether, by its words, the chosen answer agrees or flatters, and clearly more than the rejected one."""
        return self.agreeable[0] > 0 and self.difference > THRESHOLD

    @property
    def is_listed(self) -> bool:
        """Suspect, and acquitted neither by the row's true answer nor by the model."""
        right = self.true_answer is not None and self.true_answer.lower() in self.chosen.lower()
        return self.is_suspect and not right and (self.model is None or self.model <= 0)

    @property
    def corrects(self) -> bool:
        """The rejected answer contradicts the user: exchanged, the pair teaches to correct."""
        return self.agreeable[1] < 0

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place, "phrases": agreeing_phrases(self.chosen), "chosen_agreeable": self.agreeable[0],
            "rejected_agreeable": self.agreeable[1], "model": self.model, "prompt": prompt_value(self.prompt),
            "chosen": self.chosen, "rejected": self.rejected,
        }  # fmt: skip


@dataclass(frozen=True)
class AuditReport:
    """All pairs of a file, in order."""

    pairs: list[AuditedPair]

    @property
    def listed(self) -> list[AuditedPair]:
        return [pair for pair in self.pairs if pair.is_listed]

    @property
    def more_agreeable(self) -> Rate:
        """How often the chosen answer is the more agreeable one, among the pairs that differ in it."""
        return Rate.of(pair.difference > 0 for pair in self.pairs if pair.difference)

    def clean_rows(self) -> list[Row]:
        return [pair.row for pair in self.pairs if not pair.is_listed]

    def scored_rows(self) -> list[Row]:
        """Every row, with its scores under `audit`."""
        return [
            {**pair.row, "audit": {"listed": pair.is_listed, "agreeable": list(pair.agreeable), "model": pair.model}}
            for pair in self.pairs
        ]

    def corrections(self) -> list[Row]:
        """The listed pairs whose rejected answer corrects, exchanged."""
        return [
            {"prompt": prompt_value(pair.prompt), "chosen": pair.rejected, "rejected": pair.chosen, "from": pair.place}
            for pair in self.listed if pair.corrects
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        rate = self.more_agreeable
        p = sign_test(rate.hits, rate.total - rate.hits)
        return {
            "pairs": len(self.pairs), "suspects": sum(pair.is_suspect for pair in self.pairs),
            "chosen_more_agreeable": {**rate.to_json(), "p": p}, "listed": [pair.to_json() for pair in self.listed],
        }  # fmt: skip


def audit_pairs(
    path: Path, columns: dict[str, str] | None = None, truth_field: str | None = None,
    loaded: LoadedModel | None = None, report: ProgressReport = silent,
) -> AuditReport:  # fmt: skip
    """Scores every pair of a .jsonl file. `columns` are those of a source: prompt, chosen, rejected. `truth_field`
    names a field with the true answer. A model (see `load_chat_model`) is asked about suspects only."""
    answers = read_answers(path, columns)
    pairs = [
        _make_pair(place, row, answer.answers, truth_field)
        for (place, row, _), answer in zip(read_rows(path), answers, strict=True)
    ]
    suspects = [number for number, pair in enumerate(pairs) if pair.is_suspect] if loaded else []
    if loaded is not None and suspects:
        cases = [(pairs[i].prompt, answer) for i in suspects for answer in (pairs[i].chosen, pairs[i].rejected)]
        scores = answer_logps(loaded, cases, report)
        for number, chosen, rejected in zip(suspects, scores[::2], scores[1::2], strict=True):
            pairs[number] = replace(pairs[number], model=chosen.over(rejected))
    return AuditReport(pairs)


def _make_pair(place: str, row: Row, answers: Sequence[Conversation], truth_field: str | None) -> AuditedPair:
    if len(answers) != 2:
        raise UserError(f"{place}: is not a pair; name the columns, such as --column chosen=good --column rejected=bad")
    if truth_field and truth_field not in row:
        raise UserError(f"{place}: --truth {truth_field}: no such field; it has {', '.join(list(row)[:8])}")
    sides = list(zip(*answers, strict=False))[: min(map(len, answers)) - 1]
    common = next((i for i, (one, other) in enumerate(sides) if one != other), len(sides))
    chosen, rejected = ("\n".join(message_text(turn) for turn in turns[common:]) for turns in answers)
    scores = (agreeableness(chosen), agreeableness(rejected))
    truth = str(row[truth_field]) if truth_field else None
    return AuditedPair(place, row, answers[0][:common], chosen, rejected, scores, truth)
