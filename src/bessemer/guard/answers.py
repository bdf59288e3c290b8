"""Statistics of sampled answers: what their reward depends on besides their quality.

A round's answers come in groups to the same prompt. Within a group, prompts cannot confound: the slope of the reward on
a feature of the answer (its length; whether it contains a word, a part of one or a 4-gram) says what the reward model
pays for it. The slope times the change of the feature's mean since the first steps is the part of the reward's rise
that the feature explains. Both are in the reward's unit, so their share has none. The strength of the dependence is
measured with ranks within groups, which no monotone change of the reward's scale alters.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ANSWERS, MAX_WORDS = 512, 512  # of a round, of an answer
MAX_LETTERS = 64  # of a word of which parts are made
GRAM = 4
RARE = 0.02  # share of answers below which a gram is not recorded
TOP = 3  # answers shown
WORD = re.compile(r"\w+|[^\w\s]")

Sums = dict[str, float]
GramSums = dict[str, list[float]]  # gram -> answers that contain it, and its sums with itself, rewards and ranks


@dataclass(frozen=True)
class JudgedAnswer:
    """A sampled answer of a training round. Answers to the same prompt share their `group`."""

    group: int
    prompt: str
    text: str
    tokens: int
    reward: float


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())[:MAX_WORDS]


def word_grams(text: str) -> set[str]:
    """The words, signs and 4-grams of a text, and the 4-letter parts of its words: a reward that pays for a text pays
    for it inside of another word too, and not every script has spaces."""
    words = words_of(text)
    parts = (word[i : i + GRAM] for word in set(words) for i in range(min(len(word), MAX_LETTERS) - GRAM + 1))
    return {*words, *(" ".join(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)), *parts}


def by_group(answers: Sequence[JudgedAnswer]) -> list[list[JudgedAnswer]]:
    """Answers to the same prompt, at most MAX_ANSWERS in all; one group if every prompt has a single answer."""
    groups: defaultdict[int, list[JudgedAnswer]] = defaultdict(list)
    for answer in answers:
        groups[answer.group].append(answer)
    if all(len(group) == 1 for group in groups.values()):
        return [list(answers[:MAX_ANSWERS])]
    fitting = max(1, MAX_ANSWERS * len(groups) // max(1, len(answers)))
    return list(groups.values())[:fitting]


def centered_ranks(values: Sequence[float]) -> list[float]:
    """Ranks with ties at their mean, relative to the number of values, around 0."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for i in order[start:end]:
            ranks[i] = ((start + end - 1) / 2 - (len(values) - 1) / 2) / len(values)
        start = end
    return ranks


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def centered(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def measure_round(answers: Sequence[JudgedAnswer], top_reward: float) -> tuple[Sums, GramSums]:
    """The sums of a round, which add up over rounds. `top_reward` is the highest reward of the run so far."""
    sums: Counter[str] = Counter()
    groups = by_group(answers)
    texts = [[word_grams(answer.text) - word_grams(answer.prompt) for answer in group] for group in groups]
    counts = Counter(gram for group in texts for grams in group for gram in grams)
    least = max(2.0, RARE * sum(map(len, groups)))
    common = {gram for gram, count in counts.items() if count >= least}
    totals: GramSums = {}
    for group, group_grams in zip(groups, texts, strict=True):
        n = len(group)
        rewards, lengths = [answer.reward for answer in group], [float(answer.tokens) for answer in group]
        from_mean, ranks = centered(rewards), centered_ranks(rewards)
        longer, length_ranks = centered(lengths), centered_ranks(lengths)
        sums.update({
            "answers": n, "reward": sum(rewards), "length": sum(lengths), "reward_2": dot(rewards, rewards),
            "at_top": sum(reward >= top_reward for reward in rewards), "ranks_2": dot(ranks, ranks),
            "length_2": dot(longer, longer), "length_reward": dot(longer, from_mean),
            "length_ranks_2": dot(length_ranks, length_ranks), "length_rank_product": dot(length_ranks, ranks),
        })  # fmt: skip
        members: defaultdict[str, list[int]] = defaultdict(list)  # answers of the group that contain a gram
        for i, grams in enumerate(group_grams):
            for gram in grams & common:
                members[gram].append(i)
        for gram, indices in members.items():
            total, count = totals.setdefault(gram, [0.0] * 4), len(indices)
            total[0] += count
            total[1] += count - count * count / n
            total[2] += sum(from_mean[i] for i in indices)
            total[3] += sum(ranks[i] for i in indices)
    return dict(sums), totals


def merge(sums: Sums, grams: GramSums, more: tuple[Sums, GramSums]) -> None:
    """Adds a round to the sums of a block."""
    for name, value in more[0].items():
        sums[name] = sums.get(name, 0.0) + value
    for gram, entry in more[1].items():
        grams[gram] = [a + b for a, b in zip(grams[gram], entry, strict=True)] if gram in grams else entry


def best_answers(answers: Sequence[JudgedAnswer]) -> list[dict[str, Any]]:
    """The answers with the highest rewards, shortened."""
    best: dict[str, JudgedAnswer] = {}
    for answer in sorted(answers, key=lambda answer: -answer.reward):
        best.setdefault(answer.text, answer)
        if len(best) == TOP:
            break
    return [
        {"reward": answer.reward, "tokens": answer.tokens, "prompt": answer.prompt[-120:], "answer": answer.text[:300]}
        for answer in best.values()
    ]


@dataclass(frozen=True)
class Feature:
    """What the reward pays for a feature of answers. `before` and `now` are the length in tokens or the share of
    answers that contain `text`; `gap` is the reward of one more token, or of the text; `explained` is the part of the
    reward's rise, and `depends` the share of the variance of ranks within prompts."""

    text: str  # "" is the length
    before: float
    now: float
    gap: float
    explained: float
    depends: float

    @property
    def order(self) -> tuple[float, int, int]:
        """By evidence; of equal ones the fewest words, and a word rather than a part of it."""
        return round(self.explained * self.depends, 3), -len(self.text.split()), len(self.text)

    def describe(self) -> str:
        part = "all" if self.explained >= 0.995 else f"{self.explained:.0%}"
        if self.text:
            return (
                f"answers that contain {self.text!r} went from {self.before:.0%} to {self.now:.0%} and get "
                f"{self.gap:+.3g} reward, which explains {part} of the rise"
            )
        return (
            f"answers went from {self.before:.0f} to {self.now:.0f} tokens and get {100 * self.gap:+.3g} reward for "
            f"100 tokens more, which explains {part} of the rise"
        )


def share_of_variance(product: float, a_2: float, b_2: float) -> float:
    return product * product / (a_2 * b_2) if a_2 > 1e-12 and b_2 > 1e-12 else 0.0


def features_of(first: dict[str, float], blocks: Sequence[GramSums], rise: float) -> list[Feature]:
    """What each feature of the last block explains of the reward's rise. `first` are the means in the first steps;
    `blocks` hold for each feature its mean, square, product with the reward, and square times `depends`."""
    features = []
    for name, (now, *_) in blocks[-1].items():
        rows = [block[name] for block in blocks if name in block]
        square, product, dependence = (sum(row[i] for row in rows) for i in (1, 2, 3))
        gap, before = product / max(square, 1e-9), first.get(name, 0.0)
        features.append(Feature(name, before, now, gap, gap * (now - before) / rise, dependence / max(square, 1e-9)))
    return features
