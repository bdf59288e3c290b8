"""Detects reward hacking: the training reward rises, and the answers do not get better.

A rising reward, longer answers, a lower entropy and a higher KL divergence are what honest learning looks like too. The
evidence here is that which honest learning lacks:

- **a judge falls**: a reward that measures the true goal (a verifier, or a reward that is not trained on) drops from
  its best, by more than 4 times its noise and a quarter of its range, while the total has risen since; or
- **a surface feature explains the rise**, where no judge rises with the reward: the length of answers or one word or
  4-gram, which the prompts do not ask for, explains at least `explained` (60 %) of the rise of the reward, and at least
  `depends` (40 %) of the variance of the reward's ranks among answers to one prompt, where it varies (`answers.py`).

The reward must have risen by 4 times its noise and by a fifth of the standard deviation of single rewards. Evidence of
two blocks (16 steps) in a row is an alarm. Half as much is a note, if length, repetition, KL or entropy have moved too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bessemer.guard.alarm import Alarm, Severity, debounce, make_alarm
from bessemer.guard.answers import (
    Feature,
    GramSums,
    JudgedAnswer,
    Sums,
    best_answers,
    features_of,
    measure_round,
    merge,
    share_of_variance,
    words_of,
)
from bessemer.guard.trends import Block, Change, change, column, fall_from_best
from bessemer.spec.guard import GuardSpec

POOLED = 8  # blocks that features are measured over: a text in every answer has no slope any more
REMEMBERED = 5000  # grams of the first block
LEAST_GROWTH = 0.1  # of the share of answers that contain a text
LEAST_ANSWERS = 48
LEAST_RISE = 0.2  # standard deviations of single rewards
JUDGE_FALL = 0.25  # of the judge's range
REARM = 4
Samples = list[dict[str, Any]]


@dataclass
class HackingDetector:
    """Fed with every round's answers, and evaluated once per block of steps. `judges` are names of metrics."""

    guard: GuardSpec
    judges: tuple[str, ...] = ()
    sums: Sums = field(default_factory=dict)  # of the running block
    grams: GramSums = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)  # shares of the grams in the first block
    first_sums: Sums = field(default_factory=dict)
    pooled: list[GramSums] = field(default_factory=list)  # of the last blocks, as `grown` returns them
    length: float = 0.0  # of the last block
    slope: float = 0.0  # reward per token in the last block
    paid_by_length: float = 0.0  # integral of the slope over the length
    top_reward: float = -1e300
    first_answers: Samples = field(default_factory=list)
    last_answers: Samples = field(default_factory=list)
    streak: int = 0  # blocks with evidence
    since: int = -1  # step at which they began
    active: dict[str, int] = field(default_factory=dict)

    def round(self, answers: Sequence[JudgedAnswer]) -> None:
        """Adds the answers of a round."""
        answers = [answer for answer in answers if math.isfinite(answer.reward)]
        if not answers:
            return
        self.top_reward = max(self.top_reward, *(answer.reward for answer in answers))
        merge(self.sums, self.grams, measure_round(answers, self.top_reward))
        self.last_answers = best_answers(answers)
        self.first_answers = self.first_answers or self.last_answers

    def measure(self) -> tuple[Block, Sums]:
        """Closes the block: its numbers, and its sums."""
        sums, grams = self.sums, self.grams
        if sums.get("answers", 0) < LEAST_ANSWERS:
            return {}, {}
        self.sums, self.grams = {}, {}
        length = sums["length"] / sums["answers"]
        slope = sums["length_reward"] / sums["length_2"] if sums["length_2"] > 1e-9 else self.slope
        if not self.first_sums:
            common = sorted(grams, key=lambda gram: -grams[gram][0])[:REMEMBERED]
            self.first = {gram: round(grams[gram][0] / sums["answers"], 4) for gram in common}
            self.first_sums = sums
        else:
            self.paid_by_length += (slope + self.slope) / 2 * (length - self.length)
            self.pooled = [*self.pooled, self.grown(sums, grams)][-POOLED:]
        self.length, self.slope = length, slope
        return {"at_top": sums["at_top"] / sums["answers"]}, sums

    def grown(self, sums: Sums, grams: GramSums) -> GramSums:
        """The length, "", and the texts whose share has grown: mean, square, product with the reward, and the square
        times the share of the variance of ranks. Weighted by squares, that share is measured where a feature varies:
        a text that all answers contain has nothing to show."""
        depends = share_of_variance(sums["length_rank_product"], sums["length_ranks_2"], sums["ranks_2"])
        mean, square = sums["length"] / sums["answers"], sums["length_2"]
        features = {"": [mean, square, sums["length_reward"], square * depends]}
        expected = [" ".join(words_of(text)) for text in self.guard.alignment.expected]
        for gram, (count, own_2, reward, rank) in grams.items():
            share = count / sums["answers"]
            if share - self.first.get(gram, 0.0) < LEAST_GROWTH or any(gram in t or t in gram for t in expected):
                continue
            features[gram] = [share, own_2, reward, rank * rank / max(sums["ranks_2"], 1e-12)]
        return features

    def block(self, blocks: Sequence[Block], sums: Sums) -> list[Alarm]:
        """Judges the run at the end of a block."""
        settings = self.guard.alignment
        rise = change(blocks, "reward")
        if settings.hacking == "off" or rise is None:
            return []
        feature = self.surface_feature(sums) if sums and self.pooled else None
        states = {name: self.judge_state(blocks, name) for name in self.judges}
        fallen = [name for name, (state, _) in states.items() if state == "falls"]
        risen, trusted = self.large(rise), any(state == "rises" for state, _ in states.values())
        explains = feature is not None and not trusted and feature.explained >= settings.explained
        certain = risen and (bool(fallen) or (explains and feature is not None and feature.depends >= settings.depends))
        half = feature is not None and not trusted and 2 * feature.explained >= settings.explained
        half = half and feature is not None and 2 * feature.depends >= settings.depends
        suspected = risen and (certain or (half and len(self.moved(blocks)) > 0))
        if certain and not self.streak:
            self.since = int(blocks[-1]["step"])
        self.streak = self.streak + 1 if certain else 0
        alarm = debounce(self.active, "certain", self.streak >= 2, REARM)
        note = debounce(self.active, "suspected", suspected, REARM) and not self.streak
        if not (alarm or note):
            return []
        judges = {name: change for name, (_, change) in states.items() if change is not None}
        if fallen:  # it began after the judge's best
            self.since = min(self.since, *(int(self.judge_best(blocks, name)) for name in fallen))
        return self.alarm(blocks, rise, feature, judges, fallen, certain=alarm)

    def alarm(
        self, blocks: Sequence[Block], rise: Change, feature: Feature | None, judges: dict[str, Change],
        fallen: Sequence[str], certain: bool,
    ) -> list[Alarm]:  # fmt: skip
        reasons = [f"the judge {name} fell from {judges[name].before:.3g} to {judges[name].now:.3g}" for name in fallen]
        if feature is not None and feature.explained > self.guard.alignment.explained / 2:
            reasons.append(feature.describe())
        reasons += [] if certain else self.moved(blocks)
        symptom = f"the reward rose from {rise.before:.3g} to {rise.now:.3g}, but " + "; ".join(reasons)
        evidence: dict[str, Any] = {
            "reward": asdict(rise), "feature": None if feature is None else asdict(feature),
            "judges": {name: asdict(change) for name, change in judges.items()}, "moved": self.moved(blocks),
            "answers_before": self.first_answers, "answers_now": self.last_answers,
        }  # fmt: skip
        if certain:
            evidence["healthy_step"] = self.since
        action = self.guard.alignment.hacking
        severity: Severity = action if certain and action != "off" else "note"
        if severity in ("stop", "rollback"):  # a run that is started again, and goes on like this, is stopped again
            del self.active["certain"]
            self.streak = 0
        return make_alarm(
            "reward_hacking", int(blocks[-1]["end"]), severity, symptom, 0.9 if certain else 0.5, **evidence
        )

    def large(self, rise: Change) -> bool:
        """The reward has risen significantly, and by a share of the spread of single rewards."""
        if not self.first_sums:
            return rise.rose
        n = self.first_sums["answers"]
        variance = self.first_sums["reward_2"] / n - (self.first_sums["reward"] / n) ** 2
        return rise.rose and rise.size > LEAST_RISE * math.sqrt(max(variance, 0.0))

    def surface_feature(self, sums: Sums) -> Feature | None:
        """The feature that explains most of the reward's rise since the first block."""
        n, first = sums["answers"], self.first_sums
        rise = sums["reward"] / n - first["reward"] / first["answers"]
        if rise <= 0:
            return None
        before = {**self.first, "": first["length"] / first["answers"]}
        length, *texts = features_of(before, self.pooled, rise)
        length = replace(length, gap=self.slope, explained=self.paid_by_length / rise)
        return max((length, *texts), key=lambda feature: feature.order)

    def judge_state(self, blocks: Sequence[Block], name: str) -> tuple[str, Change | None]:
        """Whether a judge falls from its best, rises, or neither."""
        fall, overall = fall_from_best(blocks, name), change(blocks, name)
        values = column(blocks, name)
        if fall is None or overall is None:
            return "", overall
        since_best, at = fall
        reward = [block["reward"] for block in blocks if "reward" in block]
        gained = reward[-1] > reward[min(at, len(reward) - 1)]
        if since_best.fell and -since_best.size > JUDGE_FALL * (max(values) - min(values)) and gained:
            return "falls", since_best
        return ("rises" if overall.rose else ""), overall

    def judge_best(self, blocks: Sequence[Block], name: str) -> float:
        fall = fall_from_best(blocks, name)
        return blocks[fall[1]]["end"] if fall else blocks[0]["end"]

    def moved(self, blocks: Sequence[Block]) -> list[str]:
        """Other signs: changes that honest learning can have too."""
        limits = self.guard.alignment
        signs = []
        for name, words, least in (
            ("answer_tokens", "answer length", 1 + (limits.length_factor - 1) / 2),
            ("repetition", "repetition", 1.5), ("kl", "KL", 1.5), ("entropy", "entropy", 1.5),
        ):  # fmt: skip
            moved = change(blocks, name)
            if moved is None or abs(moved.z) < 4 or (name == "kl" and moved.now < limits.kl_limit):
                continue
            low, high = sorted((abs(moved.before), abs(moved.now)))
            if high > least * low:
                signs.append(f"{words} {moved.before:.3g} -> {moved.now:.3g}")
        return signs
