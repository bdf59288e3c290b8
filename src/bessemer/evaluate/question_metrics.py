"""Metrics of answers to own questions, each from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|-?\.\d+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
TOLERANCE = 1e-6  # relative


def exact(answer: str, expected: str) -> float:
    """The same text, apart from spaces."""
    return float(answer.split() == expected.split())


def contains(answer: str, expected: str) -> float:
    """The expected text occurs in the answer, in upper or lower case."""
    return float(" ".join(expected.lower().split()) in " ".join(answer.lower().split()))


def numeric(answer: str, expected: str) -> float:
    """The last number of the answer is the expected one; `,` and `$` do not count."""
    given, wanted = (_last_number(text) for text in (answer, expected))
    if given is None or wanted is None:
        return 0.0
    return float(abs(given - wanted) <= TOLERANCE * max(1.0, abs(wanted)))


def _last_number(text: str) -> float | None:
    given = _NUMBER.findall(text.replace("$", ""))
    return float(given[-1].replace(",", "")) if given else None


def f1(answer: str, expected: str) -> float:
    """Overlap of words as in SQuAD: without case, punctuation and articles."""
    given, wanted = (_words(text) for text in (answer, expected))
    common = (Counter(given) & Counter(wanted)).total()
    if not given or not wanted:
        return float(given == wanted)
    return 2 * common / (len(given) + len(wanted))


def _words(text: str) -> list[str]:
    bare = "".join(" " if c in string.punctuation and c in "-" else c for c in text.lower())
    bare = "".join(c for c in bare if c not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def regex(answer: str, expected: str) -> float:
    """The expected pattern is found in the answer."""
    return float(re.search(expected, answer) is not None)


METRICS: dict[str, Callable[[str, str], float]] = {
    "exact": exact, "contains": contains, "numeric": numeric, "f1": f1, "regex": regex,
}  # fmt: skip
