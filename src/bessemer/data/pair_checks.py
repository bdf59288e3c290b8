"""Named checks of preference pairs and of labelled answers, made before the first step of `objective: dpo` and `kto`,
and by `bessemer data check`. They read a sample of the rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bessemer.data.agreement import FAIR, Agreement
from bessemer.data.chat_checks import WORTHLESS, Mistake
from bessemer.data.chat_rows import ChatRow
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.groups import GroupSizes
from bessemer.spec.preference import KtoSpec

_PLACES = 5
_RARE = 0.01  # share of the pairs up to which repeated ones are not reported
_BIASED, _FEWEST = 0.75, 50  # share of the pairs whose longer answer is the chosen one, and pairs to tell it
_AGREEABLE, _FEWEST_AGREEABLE = 0.05, 10  # share and number of pairs of which only one answer is agreeable
_BALANCED = (0.99, 1.34)  # Ethayarajh et al. 2024, Eq. 8: 1 to 4/3
# Phrases of agreement with the user and of flattery.
_FLATTERY = re.compile(
    r"(?i)\byou(?:'|’)?(?:re| are) (?:\w+ )?(?:right|correct|spot on)\b|\bi (?:\w+ )?agree\b|\bcouldn['’]t agree more\b"
    r"|\b(?:great|good|excellent|fantastic|brilliant|wonderful|insightful) (?:question|point|idea|thinking|insight)\b"
    r"|\bwhat an? (?:great|excellent|brilliant|wonderful|insightful)\b|\byes,? (?:that(?:'|’)?s|that is|you)\b"
    r"|\bas you (?:rightly|correctly)\b|\bthat(?:'|’)?s (?:absolutely |completely )?(?:right|correct|true)\b"
)


@dataclass(frozen=True)
class Pair:
    """The token ids of a prompt and its answers. The prompts are those before the first token of either answer."""

    place: str
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    prompts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def make_pair(chosen: ChatRow, rejected: ChatRow) -> Pair:
    answers = [tuple(row.ids[row.weights > 0].tolist()) for row in (chosen, rejected)]
    first, second = (tuple(row.ids[: int((row.weights > 0).argmax())].tolist()) for row in (chosen, rejected))
    return Pair(chosen.place, tuple(chosen.ids[chosen.weights == 0].tolist()), *answers, (first, second))


def check_pairs(
    pairs: Sequence[Pair], count: int, silenced: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
) -> list[Mistake]:  # fmt: skip
    """The mistakes in some of `count` pairs, without silenced ones. `decode` gives the text of an answer."""
    scope = f"{count:,} pairs" if len(pairs) == count else f"{len(pairs):,} pairs that were read of {count:,}"
    mistakes = [*_identical(pairs, scope), *_other_prompts(pairs, scope), *_repeated(pairs, scope)]
    mistakes += _longer(pairs, scope)
    if decode and "chosen_agreeable" not in silenced:
        mistakes += _agreeable(pairs, scope, decode)
    return [mistake for mistake in mistakes if mistake.name not in silenced]


def check_lengths(store: TokenStore, groups: GroupSizes, context: int, kind: str) -> list[Mistake]:
    """Rows whose answers the context would cut off. Nothing is cut: the run would refuse them one by one."""
    too_long = np.flatnonzero(groups.columns > context)
    if not too_long.size:
        return []
    what = (
        f"{too_long.size:,} of {groups.columns.size:,} {kind} exceed data.context {context}: answers would be cut off"
    )
    places = [groups.place(store, int(group)) for group in too_long[:_PLACES]]
    fix = f"raise it to {groups.columns.max()}, or delete these rows"
    return [Mistake("answer_past_context", what, fix, too_long.size, places, refuses=True)]


def check_labels(rows: Sequence[tuple[ChatRow, bool]], good: int, bad: int, spec: KtoSpec) -> list[Mistake]:
    """The mistakes of labelled answers: a sample with their labels, and the counts of all of them."""
    if not good or not bad:
        side = "desirable" if good else "undesirable"
        what = f"all {good + bad:,} answers are {side}: there is nothing to compare"
        return [_mistake("one_sided_labels", what, "add answers of the other kind, or correct the label", [], True)]
    mistakes, labels = [], dict[tuple[int, ...], bool]()
    opposite = [row.place for row, label in rows if labels.setdefault(tuple(row.ids.tolist()), label) != label]
    if opposite:
        what = f"{len(opposite):,} of {len(rows):,} answers that were read have both labels in different rows"
        mistakes.append(_mistake("contradictory_labels", what, "delete these rows, or correct the labels", opposite))
    ratio = spec.desirable_weight * good / (spec.undesirable_weight * bad) if spec.undesirable_weight else np.inf
    if good != bad and not _BALANCED[0] <= ratio <= _BALANCED[1]:
        what = f"{good:,} desirable and {bad:,} undesirable answers weigh as {ratio:.2f} to 1"
        low, high = spec.undesirable_weight * bad / good, spec.desirable_weight * good / bad
        fix = f"write kto: {{desirable_weight: {low:.2f}}} to {low * 4 / 3:.2f}, or {{undesirable_weight: "
        fix += f"{high * 3 / 4:.2f}}} to {high:.2f}, not both (Ethayarajh et al. 2024, Eq. 8: 1 to 4/3)"
        mistakes.append(_mistake("unbalanced_labels", what, fix, []))
    return mistakes


def check_agreement(agreement: Agreement) -> list[Mistake]:
    if agreement.kappa is None or agreement.kappa >= FAIR:
        return []
    fix = "look at rows whose votes differ; clearer instructions or more votes a row help, and dpo: {loss: robust}"
    return [_mistake("low_agreement", agreement.line(), fix, [])]


def _identical(pairs: Sequence[Pair], scope: str) -> list[Mistake]:
    places = [pair.place for pair in pairs if pair.chosen == pair.rejected]
    if not places:
        return []
    what = f"{len(places):,} of {scope} have two identical answers, from which nothing is learnt"
    refuses = len(places) >= WORTHLESS * len(pairs)
    return [_mistake("identical_answers", what, "delete them, or correct columns", places, refuses)]


def _other_prompts(pairs: Sequence[Pair], scope: str) -> list[Mistake]:
    places = [pair.place for pair in pairs if pair.prompts[0] != pair.prompts[1]]
    if not places:
        return []
    what = f"{len(places):,} of {scope} have different prompts for the two answers, which are then not comparable"
    refuses = len(places) >= WORTHLESS * len(pairs)
    return [_mistake("prompt_differs", what, "correct these rows, or name the prompt's column", places, refuses)]


def _agreeable(pairs: Sequence[Pair], scope: str, decode: Callable[[list[int]], str]) -> list[Mistake]:
    """Answers that agree with the user or flatter, by phrases: a model learns that too (Sharma et al. 2023)."""
    sides = [[bool(_FLATTERY.search(decode(list(ids)))) for ids in (pair.chosen, pair.rejected)] for pair in pairs]
    chosen, rejected = ([a and not b for a, b in sides], [b and not a for a, b in sides])
    only, other = sum(chosen), sum(rejected)
    if only < max(_FEWEST_AGREEABLE, _AGREEABLE * len(pairs)) or only < _BIASED * (only + other):
        return []
    places = [pair.place for pair, agrees in zip(pairs, chosen, strict=True) if agrees]
    what = f"in {only / len(pairs):.0%} of {scope} only the chosen answer agrees with the user or flatters (only the "
    what += f"rejected one in {other / len(pairs):.0%}): the model may learn to agree instead of to be right"
    fix = "delete or correct them, and add pairs whose chosen answer corrects a wrong claim"
    return [_mistake("chosen_agreeable", what, fix, places)]


def _repeated(pairs: Sequence[Pair], scope: str) -> list[Mistake]:
    """Pairs that stand there twice, as they are or with the answers exchanged."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    again, opposite = [], []
    for pair in pairs:
        if pair.chosen == pair.rejected:
            continue
        if (pair.prompt, pair.rejected, pair.chosen) in seen:
            opposite.append(pair.place)
        elif (pair.prompt, pair.chosen, pair.rejected) in seen:
            again.append(pair.place)
        seen.add((pair.prompt, pair.chosen, pair.rejected))
    mistakes = []
    if opposite:
        what = f"{len(opposite):,} of {scope} contradict another one: the same prompt, and the answers exchanged"
        fix = "delete one of each, or write dpo: {loss: robust, smoothing: 0.1}"
        mistakes.append(_mistake("contradictory_pairs", what, fix, opposite))
    if len(again) > _RARE * len(pairs):
        what = f"{len(again):,} of {scope} repeat another one ({len(again) / len(pairs):.0%})"
        mistakes.append(_mistake("duplicate_pairs", what, "delete them: they count twice", again))
    return mistakes


def _longer(pairs: Sequence[Pair], scope: str) -> list[Mistake]:
    differences = [len(pair.chosen) - len(pair.rejected) for pair in pairs]
    unequal = [difference for difference in differences if difference]
    share = sum(difference > 0 for difference in unequal) / max(1, len(unequal))
    if len(unequal) < _FEWEST or max(share, 1 - share) < _BIASED:
        return []
    side, part = ("longer", share) if share > 0.5 else ("shorter", 1 - share)
    mean = abs(sum(differences)) / len(pairs)
    what = (
        f"the chosen answer is the {side} one in {part:.0%} of {scope}, by {mean:.0f} tokens on average: the model may"
    )
    what += " learn length"
    fix = "balance the pairs, or write dpo: {loss: sigmoid_norm}, which divides by length"
    return [_mistake("length_bias", what, fix, [])]


def _mistake(name: str, what: str, fix: str, places: list[str], refuses: bool = False) -> Mistake:
    return Mistake(name, what, fix, len(places), places[:_PLACES], refuses)
