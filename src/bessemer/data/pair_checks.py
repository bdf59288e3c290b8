"""Named checks of preference pairs, made before the first step of `objective: dpo`. They read a sample of the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.data.chat_checks import WORTHLESS, Mistake
from bessemer.data.chat_rows import ChatRow

_PLACES = 3
_RARE = 0.01  # share of the pairs up to which repeated ones are not reported
_BIASED, _FEWEST = 0.75, 50  # share of the pairs whose longer answer is the chosen one, and pairs to tell it


@dataclass(frozen=True)
class Pair:
    """The token ids of a prompt and its answers."""

    place: str
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def make_pair(chosen: ChatRow, rejected: ChatRow) -> Pair:
    answers = [tuple(row.ids[row.weights > 0].tolist()) for row in (chosen, rejected)]
    return Pair(chosen.place, tuple(chosen.ids[chosen.weights == 0].tolist()), *answers)


def check_pairs(pairs: Sequence[Pair], count: int, silenced: Sequence[str] = ()) -> list[Mistake]:
    """The mistakes in some of `count` pairs, without silenced ones."""
    scope = f"{count:,} pairs" if len(pairs) == count else f"{len(pairs):,} pairs that were read of {count:,}"
    mistakes = [*_identical(pairs, scope), *_repeated(pairs, scope), *_longer(pairs, scope)]
    return [mistake for mistake in mistakes if mistake.name not in silenced]


def _identical(pairs: Sequence[Pair], scope: str) -> list[Mistake]:
    places = [pair.place for pair in pairs if pair.chosen == pair.rejected]
    if not places:
        return []
    what = f"{len(places):,} of {scope} have two identical answers, from which nothing is learnt"
    refuses = len(places) >= WORTHLESS * len(pairs)
    return [_mistake("identical_answers", what, "delete them, or correct columns", places, refuses)]


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
