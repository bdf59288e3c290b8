"""What the finders of personal data share: a find, the digit runs of a text, and the words before a number.

A text is scanned for digits once; every finder of numbers then looks only at the runs that could hold one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Found(NamedTuple):
    """One personal value: text[start:end]. `value` is the same however the text writes it."""

    start: int
    end: int
    value: str


class Run(NamedTuple):
    """Digits with at most three signs between them: at least seven, or a dotted quad."""

    start: int
    end: int


# What may stand between the digits of one number: spaces, brackets, dots, slashes and every kind of hyphen.
GAP = r" \u00a0\u2009\u202f().\u2010-\u2013/-"
DASH = r"[-\u2010-\u2013]"
# Possessive, so that a megabyte of digits costs neither backtracking nor memory.
_RUN = re.compile(
    rf"[0-9](?<![0-9][0-9])(?:(?:[{GAP}]{{0,3}}+[0-9]){{6,}}+|[0-9]{{0,2}}(?:\.[0-9]{{1,3}}){{3}})"
)
_REACH = 40
_NUMBER = re.compile("(?<![a-z0-9])[0-9][0-9a-z]*")  # the 4 of ipv4 is none
_REST_OF_WORD = re.compile(r"\A\w+")


def number_runs(text: str) -> Iterator[Run]:
    """Where a number of interest may stand; some 120 MB of prose a second."""
    return (Run(*match.span()) for match in _RUN.finditer(text))


def words_before(text: str, start: int) -> str:
    """The words that introduce a number: lower case, back to the number before it, 40 characters at most."""
    first = max(0, start - _REACH)
    window = text[first:start].lower()
    if first and text[first - 1].isalnum():
        window = _REST_OF_WORD.sub("", window, 1)
    return _NUMBER.split(window)[-1]


def last_cue(words: str, cues: re.Pattern[str]) -> str:
    """The name of the group of `cues` that matches last in `words`, or nothing: the nearest word decides."""
    found = ""
    for match in cues.finditer(words):
        found = match.lastgroup or ""
    return found


def is_name_sign(sign: str) -> bool:
    """Whether a sign beside a number makes it part of a name. Scripts without spaces (CJK) do not."""
    return sign == "_" or (sign < "\u0530" and sign.isalnum())


def stands_alone(text: str, start: int, end: int) -> bool:
    """Whether text[start:end] is no piece of a longer name or number: x123, 0.123, 123.4 and 123abc are."""
    if start:
        before = text[start - 1]
        if is_name_sign(before) or (before == "." and start > 1 and text[start - 2].isdigit()):
            return False
    if end < len(text):
        after = text[end]
        if is_name_sign(after) or (after == "." and text[end + 1 : end + 2].isdigit()):
            return False
    return True


def is_joined(text: str, start: int, end: int) -> bool:
    """Whether the signs beside a number make it a piece of a name, path, time or formula: CVE-2014-8148, /p/1234567/,
    08:06 1083555, 1234567*x."""
    if start > 1:
        further, before = text[start - 2], text[start - 1]
        if (before in "-/" and not further.isspace()) or (before == ":" and further.isdigit()):
            return True
    after, further = text[end : end + 1], text[end + 1 : end + 2] or " "
    return (after in ("-", "/", "*") and is_name_sign(further)) or (after == ":" and further.isdigit())
