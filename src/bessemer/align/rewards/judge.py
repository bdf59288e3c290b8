"""A model behind an endpoint as judge (RLAIF, Lee et al. 2023): grades answers by a rubric, or compares each with
another answer in both orders, since judges prefer a position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.endpoint import Endpoint
from bessemer.errors import UserError
from bessemer.judge_replies import (
    COMPARE,
    DATA,
    GRADE,
    conversation_text,
    in_tags,
    mean,
    parse_comparison,
    parse_grade,
)  # fmt: skip
from bessemer.spec.rewards import EndpointSpec, JudgeSpec

if TYPE_CHECKING:
    from bessemer.align.rewards.reward import Sample


def make_endpoint(spec: EndpointSpec) -> Endpoint:
    """The client of an endpoint of the spec."""
    return Endpoint(
        spec.url, spec.model, spec.key_env, spec.temperature, spec.max_tokens, spec.parallel, spec.timeout,
        spec.retries,
    )  # fmt: skip


class Judgement:
    """Rewards between 0 and 1; None for an answer that the judge did not grade. `key` names it in messages."""

    def __init__(self, spec: JudgeSpec, key: str) -> None:
        self.spec, self.key, self.endpoint = spec, key, make_endpoint(spec)
        try:
            self.rubric = Path(spec.rubric).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{key}.judge.rubric: {spec.rubric} cannot be read ({error}); name a text file") from None
        if not self.rubric:
            raise UserError(f"{key}.judge.rubric: {spec.rubric} is empty; write what the judge should grade")

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        if not samples:
            return []
        rewards, replies = self._compare(samples) if self.spec.against else self._grade(samples)
        if all(reward is None for reward in rewards):
            problem = f"{self.key}.judge: {self.spec.model} gave no grade for any of {len(samples)} answers"
            raise UserError(f"{problem}; the first reply: {replies[0]!r:.120}; name a model that follows the format")
        return rewards

    def _grade(self, samples: Sequence[Sample]) -> tuple[list[float | None], list[str]]:
        low, high = self.spec.lowest, self.spec.highest
        system = f"{self.rubric}\n\n{DATA} {GRADE.format(lowest=low, highest=high)}"
        replies = self._ask(system, [_shown(sample, answer=sample.completion) for sample in samples])
        grades = [parse_grade(reply) for reply in replies]
        return [None if g is None else min(max((g - low) / (high - low), 0.0), 1.0) for g in grades], replies

    def _compare(self, samples: Sequence[Sample]) -> tuple[list[float | None], list[str]]:
        key = f"{self.key}.judge.against"
        others = [str(sample.column(self.spec.against or "", key)) for sample in samples]
        system = f"{self.rubric}\n\n{DATA} {COMPARE}"
        pairs = list(zip(samples, others, strict=True))
        forward = [_shown(sample, answer_a=sample.completion, answer_b=other) for sample, other in pairs]
        swapped = [_shown(sample, answer_a=other, answer_b=sample.completion) for sample, other in pairs]
        replies = self._ask(system, forward + swapped)
        wins: list[float | None] = []
        for first, second in zip(replies[: len(pairs)], replies[len(pairs) :], strict=True):
            values = [parse_comparison(first, "A"), parse_comparison(second, "B")]
            wins.append(mean(values))
        return wins, replies

    def _ask(self, system: str, texts: Sequence[str]) -> list[str]:
        conversations = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in texts]
        return [answer.text for answer in self.endpoint.complete(conversations)]


def _shown(sample: Sample, **answers: str) -> str:
    """The conversation and the answers in tags."""
    return in_tags(conversation=conversation_text(sample.prompt), **answers)
