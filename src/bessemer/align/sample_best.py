"""Best-of-N with a model, prompts and a reward: samples, scores, writes rows to train on and the curve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
import yaml
from pydantic import ValidationError

from bessemer.align.best_of import (
    ScoredAnswer,
    best_of_curve,
    best_rows,
    curve_chart,
    curve_json,
    curve_lines,
    pair_rows,
)
from bessemer.align.records import forget_partial, resumable
from bessemer.align.reward_model import RewardModel
from bessemer.align.rewards.reward import Sample, make_rewards
from bessemer.align.scored_rows import check_new_file
from bessemer.errors import UserError
from bessemer.observe.figure import svg_file
from bessemer.observe.format import align_columns
from bessemer.observe.progress import ProgressReport, silent, working
from bessemer.spec.rewards import RewardSpec
from bessemer.storage import write_atomic
from bessemer.train.answers import AnswerSettings, Prompt, PromptRow, answer_all, read_prompt_rows
from bessemer.train.trained import LoadedModel, load_model

Scorer = Callable[[Sequence[Sample]], list[tuple[float, float]]]
CHUNK = 64  # prompts whose answers are scored together


def open_scorer(reward: str, device: str = "auto", option: str = "--reward") -> Scorer:
    """The mean and standard deviation that a reward gives to samples: a reward model's folder, a verifier's name, a
    function as file.py:name, or a section of `rl.rewards` as YAML."""
    place = Path(os.path.expanduser(reward))
    if place.is_dir():
        return model_scorer(place, device)
    try:
        settings = yaml.safe_load(reward) if reward.lstrip().startswith("{") else reward
        spec = RewardSpec.model_validate(settings)
    except (ValidationError, yaml.YAMLError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "is no YAML"
        problem = reason.removeprefix("Value error, ")
        raise UserError(f"{option} {reward}: no such folder of a reward model, and {problem}") from None
    if spec.model is not None:
        return model_scorer(Path(spec.model), device)
    (part,) = make_rewards({"reward": spec})

    def score(samples: Sequence[Sample]) -> list[tuple[float, float]]:
        values = part.score(samples)
        if None in values:
            place = samples[values.index(None)].place
            raise UserError(f"{option} {reward}: it gave None for an answer to {place}; give every answer a number")
        return [(spec.weight * (value or 0.0), 0.0) for value in values]

    return score


def model_scorer(place: Path, device: str = "auto") -> Scorer:
    """A reward model as a reward."""
    model = RewardModel.load(place, device=device)
    return lambda samples: model.score_with_std(
        [sample.prompt for sample in samples], [sample.completion for sample in samples]
    )


def sample_candidates(
    loaded: LoadedModel, rows: Sequence[PromptRow], settings: AnswerSettings, reward: Scorer,
    held_out: Scorer | None = None, report: ProgressReport = silent,
) -> Iterator[list[ScoredAnswer]]:  # fmt: skip
    """The scored samples of each prompt. A text is a turn of the user for a model with a chat template, and a beginning
    to continue for others."""
    answers = answer_all(loaded, [_as_conversation(row.prompt, loaded) for row in rows], settings)
    for first in range(0, len(rows), CHUNK):
        samples, finished = [], []
        for number, row in enumerate(rows[first : first + CHUNK], first):
            report("sampling", number, len(rows))
            for answer in next(answers)["samples"]:
                ended = answer["finish_reason"] != "length"
                samples.append(Sample(row.prompt, answer["text"], (), row.columns, ended, row.place))
                finished.append(ended)
        scores = reward(samples)
        others: Sequence[tuple[float | None, float]] = held_out(samples) if held_out else [(None, 0.0)] * len(samples)
        candidates = [
            ScoredAnswer(sample.completion, mean, std, ended, other)
            for sample, (mean, std), ended, (other, _) in zip(samples, scores, finished, others, strict=True)
        ]
        yield from (candidates[k : k + settings.samples] for k in range(0, len(candidates), settings.samples))


def _as_conversation(prompt: Prompt, loaded: LoadedModel) -> Prompt:
    if isinstance(prompt, str) and loaded.template not in (None, "none"):
        return [{"role": "user", "content": prompt}]
    return prompt


@dataclass(frozen=True)
class BestOf:
    """A best-of-N job. With `pairs`, `write` gets the best and the worst answer of each prompt as a pair."""

    model: Path
    prompts: Path
    reward: str
    held_out: str | None = None
    settings: AnswerSettings = field(default_factory=AnswerSettings)
    write: Path | None = None
    pairs: bool = False
    figure: Path | None = None
    checkpoint: str = "last"
    device: str = "auto"

    def run(self) -> dict[str, Any]:
        """Samples, scores and writes; the summary with the curve. Memory grows with all answers."""
        if self.write is not None:
            check_new_file(self.write, "--write")
        rows = read_prompt_rows(self.prompts)
        with working("loading the model") as report:
            reward = open_scorer(self.reward, self.device)
            held_out = open_scorer(self.held_out, self.device, "--held-out") if self.held_out else None
            loaded = load_model(self.model, self.checkpoint, self.device)
            groups = self._sample(loaded, rows, reward, held_out, report)
        curve = best_of_curve(groups)
        flat = [candidate for group in groups for candidate in group]
        summary: dict[str, Any] = {
            "prompts": len(rows), "samples": self.settings.samples, "curve": curve_json(curve),
            "finished": sum(candidate.finished for candidate in flat) / len(flat),
            "mean_std": sum(candidate.std for candidate in flat) / len(flat),
        }  # fmt: skip
        summary["lines"] = align_columns(curve_lines(curve))
        if self.write is not None:
            make = pair_rows if self.pairs else best_rows
            made = [line for row, group in zip(rows, groups, strict=True) for line in make(row.prompt, group)]
            write_atomic(
                self.write, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in made), parents=True
            )
            summary |= {"written": str(self.write), "rows": len(made)}
            forget_partial(self.write)
        if self.figure is not None:
            write_atomic(self.figure, svg_file(curve_chart(curve).svg()), parents=True)
            summary["figure"] = str(self.figure)
        return summary

    def _sample(
        self, loaded: LoadedModel, rows: Sequence[PromptRow], reward: Scorer, held_out: Scorer | None,
        report: ProgressReport,
    ) -> list[list[ScoredAnswer]]:  # fmt: skip
        """The scored samples of all prompts. With `write` a stopped command continues with the next group of prompts:
        a prompt's samples depend on the seed and the prompt alone."""

        def work(numbers: Sequence[int]) -> list[dict[str, Any]]:
            part = [rows[number] for number in numbers]
            made = sample_candidates(loaded, part, self.settings, reward, held_out)
            return [{"samples": [asdict(candidate) for candidate in group]} for group in made]

        settings = {
            "model": str(self.model), "checkpoint": self.checkpoint, "reward": self.reward, "held_out": self.held_out,
            "settings": repr(self.settings), "prompts": xxhash.xxh3_64_hexdigest(repr(rows).encode("utf-8", "replace")),
        }  # fmt: skip
        groups = resumable(self.write, settings, len(rows), work, report, "sampling")
        return [[ScoredAnswer(**sample) for sample in group["samples"]] for group in groups]


def best_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for a terminal."""
    cut = f", {1 - summary['finished']:.1%} cut off at --max-tokens" if summary["finished"] < 1 else ""
    lines = [f"{summary['prompts']:,} prompts, {summary['samples']} samples each{cut}", "", *summary["lines"]]
    if "written" in summary:
        left_out = summary["prompts"] - summary["rows"]
        why = f", {left_out:,} prompts left out: no finished answer, or none better than another" if left_out else ""
        lines += ["", f"written  {summary['written']}  {summary['rows']:,} rows{why}"]
    return [*lines, *([f"figure   {summary['figure']}"] if "figure" in summary else [])]
