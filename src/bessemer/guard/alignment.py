"""Detectors of preference and reinforcement runs: KL runaway, entropy collapse, drift of the answer length, collapse of
the format, groups with equal rewards, drift of a reward model, over-optimisation, likelihood displacement. Reward
hacking is in `hacking.py`.

Honest learning makes answers longer, lowers the entropy and raises the KL divergence while the reward rises. So these
are trouble only if they are significant against their own noise (`trends.py`), large against the run's first block or
an absolute limit of the spec, and **not paid for**: the reward has not risen over the same blocks. A run whose answers
nearly all have the highest reward has solved its task, and raises no alarm of entropy. Trouble must last two blocks (16
steps), and is reported again only after four clear ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bessemer.guard.alarm import Alarm, Record, debounce, make_alarm, robust_std
from bessemer.guard.hacking import REARM, HackingDetector
from bessemer.guard.trends import MAX_BLOCKS, SPAN, Block, Change, change, column, make_block, recent_change, smoothed
from bessemer.spec.guard import AlignmentSpec, GuardSpec

LASTING = 2  # blocks
SOLVED = 0.9  # share of answers with the highest reward
PAID = 2.0  # noise units by which the reward must rise
FAR = 4.0  # times the limit of KL, from where it is never worth it
ENTROPY_FALL = 0.1  # of the first block's
GROWTH = 0.1  # relative change of the length over the recent blocks
LESS = 0.5  # of truncation and repetition, which must have risen by this share of their limits
FORMATS = ("format", "regex", "json")  # in the names of rewards that pay for a format
FORMAT_FALL = 0.5  # of its range
DISPLACED = 0.5  # fall of the chosen reward, relative to the growth of the margin
NATS = 1.0  # least fall of a chosen answer's log-probability
LEVEL_SHIFT = 3.0  # margins
REMEMBERED = 64  # validations
METRICS = (
    "reward", "reward_std", "equal_groups", "kl", "entropy", "answer_tokens", "truncated", "repetition",
    "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_shift",
)  # fmt: skip
ALIGNMENT_ALARMS = (
    "reward_hacking", "kl_runaway", "entropy_collapse", "length_drift", "format_collapse", "equal_groups",
    "reward_drift", "over_optimisation", "likelihood_displacement",
)  # fmt: skip
ENDING = ("stop", "rollback")
PREFERENCES = ("dpo", "kto", "reward")  # objectives whose held-out accuracy is their score
POLICIES = ("grpo", "rloo", "reinforce", "ppo", "raft", "online_dpo")  # objectives whose held-out reward is


@dataclass(frozen=True)
class Trouble:
    """The result of one check. `kind` is that of the alarm; `action` the key under `guard.alignment`."""

    kind: str
    action: str
    symptom: str = ""  # "" if there is none
    confidence: float = 0.8
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass
class AlignmentDetector:
    """Fed with every step's record and every validation. `objective` and `judges` as in the spec."""

    guard: GuardSpec
    objective: str = ""
    judges: tuple[str, ...] = ()
    records: list[Record] = field(default_factory=list)  # accepted steps of the running block
    blocks: list[Block] = field(default_factory=list)
    streaks: dict[str, int] = field(default_factory=dict)
    healthy: dict[str, int] = field(default_factory=dict)  # kind -> the last step of the last block without it
    scores: list[list[float]] = field(default_factory=list)  # step, held-out score, training score
    active: dict[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> AlignmentSpec:
        return self.guard.alignment

    def step(self, record: Record, hacking: HackingDetector) -> list[Alarm]:
        """Called with every finite step."""
        names = [name for name in record if name in METRICS or name.startswith("reward_")]
        if record["veto"] is not None or not names:
            return []
        self.forget_from(record["step"])
        self.records.append({name: record[name] for name in ("step", *names)})
        if len(self.records) < SPAN:
            return []
        more, sums = hacking.measure()
        self.blocks.append(make_block(self.records, names) | more)
        self.records = []
        if len(self.blocks) > MAX_BLOCKS:
            del self.blocks[1]
        alarms = hacking.block(self.blocks, sums)
        for trouble in self.checks():
            alarms += self.judge(trouble)
        return alarms

    def forget_from(self, step: int) -> None:
        """After a rollback: the steps from here on are made again."""
        self.records = [record for record in self.records if record["step"] < step]
        self.blocks = [block for block in self.blocks if block["end"] < step]
        self.scores = [score for score in self.scores if score[0] <= step]

    def judge(self, trouble: Trouble) -> list[Alarm]:
        """An alarm when the trouble has lasted."""
        kind, end = trouble.kind, int(self.blocks[-1]["end"])
        action = getattr(self.settings, trouble.action)
        self.streaks[kind] = self.streaks.get(kind, 0) + 1 if trouble.symptom else 0
        if not trouble.symptom:
            self.healthy[kind] = end
        if not debounce(self.active, kind, self.streaks[kind] >= LASTING, REARM) or action == "off":
            return []
        if action in ENDING:  # a run that is started again, and goes on like this, is stopped again
            del self.active[kind], self.streaks[kind]
        evidence = {"healthy_step": self.healthy.get(kind, 0), **trouble.evidence}
        return make_alarm(kind, end, action, trouble.symptom, trouble.confidence, **evidence)

    def checks(self) -> Iterator[Trouble]:
        yield self.check_kl()
        yield self.check_entropy()
        yield self.check_length()
        yield self.check_format()
        yield self.check_equal_groups()
        yield self.check_reward_drift()
        yield self.check_displacement()

    def paid(self) -> bool:
        """Whether the reward has risen over the recent blocks."""
        reward = recent_change(self.blocks, "reward")
        return reward is not None and reward.z > PAID

    def solved(self) -> bool:
        return self.blocks[-1].get("at_top", 0.0) >= SOLVED

    def check_kl(self) -> Trouble:
        none, limit = Trouble("kl_runaway", "kl"), self.settings.kl_limit
        recent = recent_change(self.blocks, "kl")
        if recent is None or recent.now <= limit:
            return none
        if recent.now <= FAR * limit and (self.paid() or recent.z < PAID):
            return none
        symptom = f"KL to the reference {recent.now:.3g} per token (limit {limit:g}), {recent.before:.3g} before"
        if not self.paid():
            symptom += f"; the reward has not risen in {len(self.blocks[-6:]) * SPAN} steps"
        return Trouble(none.kind, none.action, symptom, 0.8, {"kl": asdict(recent), "limit": limit})

    def check_entropy(self) -> Trouble:
        none, entropy = Trouble("entropy_collapse", "entropy"), change(self.blocks, "entropy")
        if entropy is None or not entropy.fell or self.solved() or self.paid():
            return none
        if entropy.now >= max(self.settings.entropy_low, ENTROPY_FALL * entropy.before):
            return none
        symptom = f"entropy per token fell from {entropy.before:.3g} to {entropy.now:.3g}, and the reward rises no more"
        reward = column(self.blocks, "reward")[-1:]
        return Trouble(none.kind, none.action, symptom, 0.7, {"entropy": asdict(entropy), "reward": reward})

    def check_length(self) -> Trouble:
        none = Trouble("length_drift", "length")
        length, recent = change(self.blocks, "answer_tokens"), recent_change(self.blocks, "answer_tokens")
        if length is None or recent is None or min(length.before, length.now) <= 0 or self.paid() or self.solved():
            return none
        factor = length.now / length.before
        drifted = max(factor, 1 / factor) > self.settings.length_factor and abs(length.z) > 4
        on = (recent.now / max(recent.before, 1e-9) - 1) * (1 if factor > 1 else -1) > GROWTH and abs(recent.z) > PAID
        if not (drifted and on):
            return none
        symptom = f"answers went from {length.before:.0f} to {length.now:.0f} tokens, and the reward rises no more"
        return Trouble(none.kind, none.action, symptom, 0.8, {"answer_tokens": asdict(length)})

    def check_format(self) -> Trouble:
        none, limits = Trouble("format_collapse", "format"), self.settings
        symptoms, evidence = [], {}
        for name, limit, words in (
            ("truncated", limits.truncated, "answers without an end"),
            ("repetition", limits.repetition, "repeated 4-grams"),
        ):  # fmt: skip
            share = change(self.blocks, name)
            if share and share.rose and share.now > limit and share.size > LESS * limit and not self.paid():
                symptoms.append(f"{share.now:.0%} {words} ({share.before:.0%} at first)")
                evidence[name] = asdict(share)
        for name in (name for name in self.blocks[-1] if name.startswith("reward_")):
            means = smoothed(column(self.blocks, name))
            overall = change(self.blocks, name)
            if not any(part in name for part in FORMATS) or overall is None:
                continue
            best = max(means)
            fall = Change(best, means[-1], overall.noise)
            if fall.fell and -fall.size > FORMAT_FALL * max(abs(best), best - min(means)):
                symptoms.append(f"{name} fell from {best:.3g} to {means[-1]:.3g}")
                evidence[name] = asdict(fall)
        return Trouble(none.kind, none.action, "; ".join(symptoms), 0.85, evidence)

    def check_equal_groups(self) -> Trouble:
        none, share = Trouble("equal_groups", "equal_groups"), column(self.blocks[-3:], "equal_groups")
        if len(share) < 3 or min(share) < self.settings.equal_share:
            return none
        why = "at the highest reward: the task is solved" if self.solved() else "so most of a step teaches nothing"
        symptom = f"{share[-1]:.0%} of the groups have equal rewards, {why}"
        return Trouble(none.kind, none.action, symptom, 0.9, {"equal_groups": share, "solved": self.solved()})

    def check_reward_drift(self) -> Trouble:
        none = Trouble("reward_drift", "reward_drift")
        chosen, rejected = change(self.blocks, "chosen_reward"), change(self.blocks, "rejected_reward")
        accuracy, margin = recent_change(self.blocks, "accuracy"), change(self.blocks, "margin")
        if self.objective != "reward" or not (chosen and rejected and accuracy and margin):
            return none
        level, shift = (chosen.now + rejected.now) / 2, (chosen.size + rejected.size) / 2
        both = abs(chosen.z) > 4 and abs(rejected.z) > 4 and chosen.size * rejected.size > 0
        if not (both and abs(shift) > LEVEL_SHIFT * max(abs(margin.now), abs(margin.before)) and accuracy.z < PAID):
            return none
        symptom = (
            f"the mean reward shifted by {shift:+.3g} to {level:.3g}, {abs(shift / margin.now):.1f} margins, and the "
            f"accuracy stayed at {accuracy.now:.1%}"
        )
        return Trouble(none.kind, none.action, symptom, 0.8, {"shift": shift, "margin": margin.now})

    def check_displacement(self) -> Trouble:
        none = Trouble("likelihood_displacement", "displacement")
        shift, margin = change(self.blocks, "chosen_shift"), change(self.blocks, "margin")
        chosen, rejected = change(self.blocks, "chosen_reward"), change(self.blocks, "rejected_reward")
        if not (shift and margin and chosen and rejected and margin.rose and shift.fell and shift.now < -NATS):
            return none
        ratio = -chosen.size / margin.size
        if ratio < DISPLACED:
            return none
        symptom = (
            f"chosen answers lost {-shift.now:.3g} nats against the reference while the margin grew from "
            f"{margin.before:.3g} to {margin.now:.3g}: chosen rewards fell by {ratio:.1f} of its growth"
        )
        evidence = {"chosen_shift": asdict(shift), "margin": asdict(margin), "rejected_reward": asdict(rejected)}
        return Trouble(none.kind, none.action, symptom, 0.85, evidence)

    def validation(self, record: Record) -> list[Alarm]:
        """Over-optimisation: three validations in a row below the best held-out score, by more than its noise and a
        tenth of what it had gained, while the training score is not lower than at the best. Where the score is a judge
        that the steps do not have, it is reward hacking."""
        name = self.score_name(record)
        if self.objective not in (*PREFERENCES, *POLICIES) or name is None or not math.isfinite(record[name]):
            return []
        train = "accuracy" if self.objective in PREFERENCES else "reward"
        recent = column(self.blocks[-2:], train)
        self.scores = [*self.scores, [record["step"], record[name], recent[-1] if recent else math.nan]]
        values = [score[1] for score in self.scores]
        best = values.index(max(values))
        if len(values) > REMEMBERED:
            del self.scores[1 if best == 0 else 0]
            return []
        bends = [c - 2 * b + a for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        error = robust_std(bends or [0.0]) / math.sqrt(6)
        after, least = (
            values[best + 1 :][-3:],
            max(3 * error, 0.1 * (values[best] - values[0]), 1e-3 * abs(values[best])),
        )
        then, now = self.scores[best][2], self.scores[-1][2]
        fallen = len(after) == 3 and values[best] - max(after) > least and after[-1] <= after[0]
        judged = name.startswith("reward_") and name in self.judges and name not in (self.blocks or [{}])[-1]
        kind, action = ("reward_hacking", "hacking") if judged else ("over_optimisation", "over_optimisation")
        setting = getattr(self.settings, action)
        if not debounce(self.active, "score", fallen and not now < then, 3) or setting == "off":
            return []
        if setting in ENDING:
            del self.active["score"]
        step = int(self.scores[best][0])
        symptom = (
            f"held-out {name} was best after step {step:,} ({values[best]:.4g}) and is {after[-1]:.4g} now, while the "
            f"training {train} went from {then:.4g} to {now:.4g}"
        )
        evidence = {"best_step": step, "best": values[best], "now": after[-1], "scores": values[best:]}
        return make_alarm(kind, record["step"], setting, symptom, 0.85, **evidence)

    def score(self, record: Record) -> float:
        """What the best validation is chosen by; lower is better."""
        name = self.score_name(record) if self.objective in (*PREFERENCES, *POLICIES) else None
        return float(record["loss"] if name is None else -record[name])

    def score_name(self, record: Record) -> str | None:
        """The held-out number that says how good the model is: a judge, the accuracy of preferences, the reward."""
        names = [*self.judges, *(["accuracy"] if self.objective in PREFERENCES else []), "reward"]
        return next((name for name in names if isinstance(record.get(name), (int, float))), None)
