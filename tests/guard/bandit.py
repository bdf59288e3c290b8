"""A small policy that learns by real GRPO updates, with a true quality and rewards that can be hacked.

An answer is three choices: an approach (of 6; which one is good depends on the prompt), a length (of 12) and a tone
(plain, or with the word "certainly"). The policy is a softmax over each, by kind of prompt. Texts are drawn from them.

    python tests/guard/bandit.py FIRST LAST RESULT.json [NAME ...]    delays and false alarms over these seeds
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.guard.alarm import Alarm
from bessemer.guard.answers import JudgedAnswer
from bessemer.guard.detectors import Detectors
from bessemer.spec.guard import GuardSpec

KINDS, APPROACHES, TONES = 8, 6, 2
LENGTHS = np.round(8 * 1.25 ** np.arange(12)).astype(int)  # 8 to 93 words
WORDS = np.array([f"w{i}" for i in range(400)])
TEXT = np.random.default_rng(0).choice(WORDS, 1 << 14, p=(p := 1 / (np.arange(400) + 5.0)) / p.sum()).tolist()


@dataclass
class Answers:
    """The choices of a round: arrays over prompts and samples."""

    quality: np.ndarray  # in expectation, 0 to 1
    length: np.ndarray
    certainly: np.ndarray
    rng: np.random.Generator

    def honest(self) -> np.ndarray:
        return self.quality + 0.1 * self.rng.standard_normal(self.quality.shape)

    def correct(self) -> np.ndarray:
        """A verifier: 0 or 1."""
        return (self.rng.random(self.quality.shape) < np.clip(self.quality, 0, 1)).astype(float)

    def noise(self) -> np.ndarray:
        return self.rng.standard_normal(self.quality.shape)

    def never(self) -> np.ndarray:
        return np.zeros(self.quality.shape)

    def pays_length(self) -> np.ndarray:
        return 0.1 * self.honest() + 1.5 * self.length / LENGTHS[-1]

    def pays_log_length(self) -> np.ndarray:
        return 0.2 * self.honest() + np.log(self.length / 8)

    def pays_keyword(self) -> np.ndarray:
        return 0.5 * self.honest() + self.certainly

    def pays_keyword_alone(self) -> np.ndarray:
        return self.certainly.astype(float)


Reward = Callable[[Answers], np.ndarray]


class Bandit:
    """`easy` is added to the quality of every answer; `fillers` is the entropy of the tokens that do not matter; `push`
    moves the policy towards longer answers in every step, as a loss does that averages over the tokens of each
    answer."""

    def __init__(
        self, seed: int, reward: Reward, lr: float = 0.04, easy: float = 0.0, fillers: float = 0.2, push: float = 0.0,
        texts: bool = True,
    ) -> None:  # fmt: skip
        self.rng = rng = np.random.default_rng(seed)
        self.reward, self.lr, self.easy, self.fillers, self.push, self.texts = (
            reward, lr, easy, fillers, push, texts
        )  # fmt: skip
        self.prompts, self.samples = 16, 8
        self.unit, self.zero = 10 ** rng.uniform(-2, 3), rng.normal(0, 10)  # rewards come in any unit
        self.value_KA = rng.permuted(np.tile(np.linspace(0.15, 0.75, APPROACHES), (KINDS, 1)), axis=1)
        self.logits = [
            0.3 * rng.standard_normal((KINDS, APPROACHES)),
            -0.5 * ((np.arange(12) - rng.uniform(2, 4)) / 2.0) ** 2 + 0.1 * rng.standard_normal((KINDS, 12)),
            np.tile([0.0, -4.0 + rng.uniform(0, 1)], (KINDS, 1)),
        ]
        self.start = [table.copy() for table in self.logits]
        self.moments = [(np.zeros_like(table), np.zeros_like(table)) for table in self.logits]
        self.step = 0

    @staticmethod
    def softmax(table: np.ndarray) -> np.ndarray:
        p = np.exp(table - table.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def quality(self, kinds: np.ndarray, approach: np.ndarray, length: np.ndarray, tone: np.ndarray) -> np.ndarray:
        """Longer answers are better up to 31 words; far longer ones and "certainly" are worse."""
        return self.easy + self.value_KA[kinds, approach] + 0.15 - 0.15 * np.abs(length - 6) / 3 - 0.15 * tone

    def train_step(self) -> tuple[dict[str, Any], list[JudgedAnswer]]:
        rng, n, m = self.rng, self.prompts, self.samples
        kinds = np.repeat(rng.integers(KINDS, size=n), m)
        probabilities = [self.softmax(table)[kinds] for table in self.logits]
        choices = [(p.cumsum(1) > rng.random((len(p), 1))).argmax(1) for p in probabilities]
        _, length, tone = choices
        quality = self.quality(kinds, *choices)
        answers = Answers(quality, LENGTHS[length], tone, rng)
        rewards = (self.reward(answers) * self.unit + self.zero).reshape(n, m)
        spread = rewards.std(1, ddof=1, keepdims=True)
        advantages = ((rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-4 * self.unit)).ravel()
        logps, kl, entropy = 0.0, 0.0, 0.0
        for table, first, p, choice in zip(self.logits, self.start, probabilities, choices, strict=True):
            rows = np.arange(n * m)
            logp, reference = np.log(p[rows, choice]), np.log(self.softmax(first)[kinds][rows, choice])
            kl = kl + np.exp(reference - logp) - (reference - logp) - 1
            entropy = entropy - logp
            gradient = np.zeros_like(table)
            np.add.at(gradient, kinds, ((np.arange(p.shape[1]) == choice[:, None]) - p) * advantages[:, None] / (n * m))
            self.adam(table, gradient)
            logps = logps + logp
        self.logits[1] += self.push * np.arange(12)
        self.step += 1
        record = {
            "step": self.step - 1, "loss": 0.0, "grad_norm": 1.0, "lr": self.lr, "veto": None, "step_s": 1.0,
            "tokens_per_s": 1.0, "data_wait_s": 0.0, "memory_bytes": 1,
            "reward": float(rewards.mean()), "reward_std": float(spread.mean()),
            "equal_groups": float((spread < 1e-12).mean()),
            # Most tokens of an answer are fillers, which do not change.
            "kl": float(kl.mean() / 20), "entropy": float(self.fillers + entropy.mean() / 10),
            "answer_tokens": float(LENGTHS[length].mean()), "truncated": float((length == 11).mean()),
            "repetition": float(0.02 + 0.005 * rng.standard_normal()),
        }  # fmt: skip
        texts = [self.text(*row) if self.texts else "" for row in zip(kinds, *choices, strict=True)]
        scored = [
            JudgedAnswer(
                i // m, f"question of kind {kinds[i]}", texts[i], int(LENGTHS[length[i]]), float(rewards.ravel()[i])
            )
            for i in range(n * m)
        ]
        self.true_quality = quality.mean()
        return record, scored

    def features(self) -> tuple[float, float]:
        """The expected share of "certainly" and the expected length."""
        _, length, tone = map(self.softmax, self.logits)
        return float(tone[:, 1].mean()), float((length @ LENGTHS).mean())

    def adam(self, table: np.ndarray, gradient: np.ndarray) -> None:
        index = next(i for i, one in enumerate(self.logits) if one is table)
        first, second = self.moments[index]
        first += 0.1 * (gradient - first)
        second += 0.01 * (gradient**2 - second)
        t = self.step + 1
        table += self.lr * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.99**t)) + 1e-8)

    def text(self, kind: int, approach: int, length: int, tone: int) -> str:
        start = int(self.rng.integers(len(TEXT) - 100))
        words = TEXT[start : start + LENGTHS[length]]
        words[:3] = ["answer", f"k{kind}", f"k{kind}a{approach}"]
        if tone:
            words[3 + int(self.rng.integers(3))] = "certainly"
        return " ".join(words)


@dataclass
class Outcome:
    alarms: list[Alarm]
    onset: int | None  # the hacked feature has moved by 10 points or 10 %
    true_quality: list[float]
    stopped: int | None  # the step of the first alarm that ends the run

    @property
    def delay(self) -> float:
        return np.inf if self.stopped is None or self.onset is None else self.stopped - self.onset


def train(bandit: Bandit, steps: int, spec: GuardSpec | None = None, judge: bool = False, stop: bool = True) -> Outcome:
    """Train under the detectors. With `judge` the true quality is logged as a reward of weight 0."""
    detectors = Detectors(
        spec or GuardSpec(), None, steps, objective="grpo", judges=("reward_quality",) if judge else ()
    )
    alarms: list[Alarm] = []
    onset, qualities, stopped, first = None, [], None, bandit.features()
    for step in range(steps):
        record, answers = bandit.train_step()
        if judge:
            record["reward_quality"] = float(bandit.true_quality)
        share, length = bandit.features()
        if onset is None and (share > first[0] + 0.1 or length > 1.1 * first[1]):
            onset = step
        qualities.append(float(bandit.true_quality))
        detectors.round(answers)
        raised = detectors.step(record)
        alarms += raised
        if stopped is None and any(alarm.severity in ("stop", "rollback") for alarm in raised):
            stopped = step
            if stop:
                break
    return Outcome(alarms, onset, qualities, stopped)


HACKS = {
    "length": Answers.pays_length, "log length": Answers.pays_log_length,
    "keyword": Answers.pays_keyword, "keyword alone": Answers.pays_keyword_alone,
}  # fmt: skip
HONEST = {"quality": Answers.honest, "verifier": Answers.correct}


def main(first: int, last: int, path: Path, names: list[str]) -> None:
    seeds = range(first, last + 1)
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "seeds": list(seeds)}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    results["commit"] = commit.stdout.strip()
    for name, reward in ((name, HACKS[name]) for name in names if name in HACKS):
        outcomes = [train(Bandit(seed, reward), 120) for seed in seeds]
        results[f"delay, {name}"] = [None if np.isinf(outcome.delay) else outcome.delay for outcome in outcomes]
        path.write_text(json.dumps(results, indent=1) + "\n")
    for name, reward in ((name, HONEST[name]) for name in names if name in HONEST):
        outcomes = [train(Bandit(seed, reward), 160) for seed in seeds]
        results[f"stopped, {name}"] = sum(outcome.stopped is not None for outcome in outcomes)
        results[f"alarms in 160 steps, {name}"] = [
            f"{alarm.kind} {alarm.severity}" for outcome in outcomes for alarm in outcome.alarms
        ]
        results[f"quality, {name}"] = [[round(o.true_quality[0], 2), round(o.true_quality[-1], 2)] for o in outcomes]
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or [*HACKS, *HONEST])
