"""Constitutional AI (Bai et al. 2022): a model answers, criticises its answer by a principle and writes it again.

The original and the revision become a preference pair; the revisions alone are rows for supervised fine-tuning.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from bessemer.align.behaviour import Detector, make_samples
from bessemer.align.records import Row, resumable
from bessemer.align.responder import (
    Conversation,
    Responder,
    answer_prompts,
    case_seed,
    conversation,
    prompt_value,
    with_turns,
)
from bessemer.errors import UserError
from bessemer.observe.progress import ProgressReport, silent
from bessemer.spec.document import parse_yaml
from bessemer.spec.load import read_text
from bessemer.spec.quantity import SpecSection
from bessemer.statistics import PairedChange, Rate
from bessemer.train.answers import PromptRow

UNCHANGED = "revision says the same"
EXAMPLE = "principles: [{name: polite, critique: Name any insult in your answer., revision: Write it without insults.}]"


class Principle(SpecSection):
    """What a model is asked to look for in its own answer, and how to write it again."""

    name: str = Field(min_length=1)
    critique: str = Field(min_length=1)
    revision: str = Field(min_length=1)


class Constitution(SpecSection):
    principles: list[Principle] = Field(min_length=1)


def load_principles(path: Path) -> list[Principle]:
    """The principles of a YAML file."""
    document = parse_yaml(read_text(path), str(path))
    try:
        return Constitution.model_validate(document.data).principles
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "principles"
        raise UserError(f"{path}: {place}: {first['msg'].lower()}; write {EXAMPLE}") from None


@dataclass(frozen=True)
class CritiqueResult:
    """`records` has one for each prompt, with every round; `before` and `after` are rates of the unwanted behaviour in
    the answers and in their revisions, if it is measured."""

    records: list[Row]
    before: Rate | None = None
    after: Rate | None = None
    change: PairedChange | None = None

    def pairs(self) -> list[Row]:
        """The revision is preferred to the answer. No pair teaches an unfinished revision, one that says the same, or
        one with the unwanted behaviour."""
        return [
            {"prompt": record["prompt"], "chosen": record["revision"], "rejected": record["answer"],
             **{name: record[name] for name in ("principle", "critique", "number")}}
            for record in self.records if not _fault(record)
        ]  # fmt: skip

    def revisions(self) -> list[Row]:
        """Rows for `objective: sft`: revisions that say the same too."""
        return [
            {"prompt": record["prompt"], "completion": record["revision"], "principle": record["principle"]}
            for record in self.records if _fault(record) in ("", UNCHANGED)
        ]  # fmt: skip

    def left_out(self) -> dict[str, int]:
        """Why prompts have no pair, with their number."""
        return dict(Counter(fault for record in self.records if (fault := _fault(record))))

    def to_json(self) -> dict[str, Any]:
        rates = {
            "before": self.before and self.before.to_json(), "after": self.after and self.after.to_json(),
            "change": self.change and self.change.to_json(),
        }  # fmt: skip
        return {"prompts": len(self.records), "pairs": len(self.pairs()), "left_out": self.left_out(), **rates}


def _fault(record: Row) -> str:
    if not record["finished"] or not record["revision"]:
        return "revision cut off or empty"
    if record.get("unwanted_after"):
        return "revision still unwanted"
    return UNCHANGED if record["revision"] == record["answer"] or not record["answer"] else ""


def critique_all(
    answerer: Responder, prompts: Sequence[PromptRow], principles: Sequence[Principle], rounds: int = 1, seed: int = 0,
    critic: Responder | None = None, detector: Detector | None = None, path: Path | None = None,
    report: ProgressReport = silent,
) -> CritiqueResult:  # fmt: skip
    """Answer every prompt, then criticise and revise it `rounds` times, each time by a principle drawn by the seed.
    `critic` (default: the same model) criticises and revises. `path`: where `resumable` notes finished prompts."""
    conversations = [conversation(row.prompt) for row in prompts]
    critic = critic or answerer

    def work(numbers: Sequence[int]) -> list[Row]:
        some = [conversations[number] for number in numbers]
        return _critique(answerer, critic, some, numbers, principles, rounds, seed)

    settings = {
        "models": [answerer.identity, critic.identity], "rounds": rounds, "seed": seed, "prompts": conversations,
        "principles": [principle.model_dump() for principle in principles],
    }  # fmt: skip
    records = resumable(path, settings, len(prompts), work, report, "answering, criticising, revising")
    if detector is None:
        return CritiqueResult(records)
    before = detector(make_samples(prompts, [record["answer"] for record in records]))
    after = detector(make_samples(prompts, [record["revision"] for record in records]))
    for record, early, late in zip(records, before, after, strict=True):
        record |= {"unwanted_before": early, "unwanted_after": late}
    return CritiqueResult(records, Rate.of(before), Rate.of(after), PairedChange.of(before, after))


def _critique(
    answerer: Responder, critic: Responder, conversations: Sequence[Conversation], numbers: Sequence[int],
    principles: Sequence[Principle], rounds: int, seed: int,
) -> list[Row]:  # fmt: skip
    answers = answer_prompts(answerer, conversations, case_seed(seed, numbers[0], "answer"))
    records: list[Row] = [
        {"number": number, "prompt": prompt_value(messages), "answer": answer, "revision": answer,
         "finished": True, "principle": "", "critique": ""}
        for number, messages, answer in zip(numbers, conversations, answers, strict=True)
    ]  # fmt: skip
    for turn in range(rounds):
        drawn = [random.Random(f"{seed} {number} {turn}").choice(principles) for number in numbers]
        asked_for = [
            with_turns(messages, record["revision"], principle.critique)
            for messages, record, principle in zip(conversations, records, drawn, strict=True)
        ]
        critiques = critic.reply(asked_for, case_seed(seed, numbers[0], turn, "critique"))
        rewriting = [
            [*messages, *with_turns([], critique.text, principle.revision)]
            for messages, critique, principle in zip(asked_for, critiques, drawn, strict=True)
        ]
        revisions = critic.reply(rewriting, case_seed(seed, numbers[0], turn, "revision"))
        for record, principle, critique, revision in zip(records, drawn, critiques, revisions, strict=True):
            record |= {
                "principle": principle.name, "critique": critique.text, "revision": revision.text,
                "finished": revision.finished,
            }  # fmt: skip
    return records
