"""Splits a piece of text without white space into words, by the rules that the published filters count words with.
The rules are those of spaCy's blank English tokenizer, restated: punctuation is taken off both ends, then what is
left is cut at marks inside it, and `FIXED` pieces have splits of their own. Cost is linear in the length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from bessemer.data.clean.characters import LETTERS, LOWER, SYMBOLS, UPPER, characters, in_brackets
from bessemer.data.clean.fixed_splits import FIXED, LONGEST

_PUNCTUATION = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉\u2329\u232a⟦⟧"
_CURRENCY = "$£€¥฿﷼" + characters("20A0-20BF")
_UNITS = (
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa "
    "mbar mb MB kb KB gb GB tb TB T G M K % км км² км³ м м² м³ дм дм² дм³ см см² см³ мм мм² мм³ нм кг г мг м/с км/ч "
    "кПа Па мбар Кб КБ кб Мб МБ мб Гб ГБ гб Тб ТБ كم² كم³ م م² م³ سم سم² سم³ مم مم² مم³ كم غرام جرام جم كغ ملغ كوب "
    "اكواب"
)

_TAKEN_FIRST = frozenset("§%=—–" + _PUNCTUATION + _QUOTES + _CURRENCY + SYMBOLS)
_DOLLARS = ("US$", "C$", "A$")
_TAKEN_LAST = frozenset("—–" + _PUNCTUATION + _QUOTES + SYMBOLS) - {"…"}
_POSSESSIVE = ("'s", "'S", "’s", "’S")
_AFTER_DIGIT = frozenset([*_UNITS.split(), *_CURRENCY, *_DOLLARS, "+"])
_LONGEST_UNIT = max(map(len, _AFTER_DIGIT))
_FIRST_ASCII = "".join(filter(str.isascii, _TAKEN_FIRST))
_LAST_ASCII = "".join(filter(str.isascii, _TAKEN_LAST))
_CORES = frozenset(text.lstrip(_FIRST_ASCII).rstrip(_LAST_ASCII) for text in FIXED)
_ODD_FIRST = frozenset(".+UCA")
_ODD_LAST = frozenset([".", "…", "s", "S", *(unit[-1] for unit in _AFTER_DIGIT)])
_DIGITS = frozenset("0123456789")
_BEFORE_STOP = frozenset("0123456789%²-+|" + LOWER + _PUNCTUATION + _QUOTES)
_UPPER = frozenset(UPPER)

_MARKS_INSIDE = ".,:<>=/+-*^~–—…"


def _inside(ascii_only: bool) -> re.Pattern[str]:
    """Finds the marks at which the middle of a chunk is cut, written for ASCII or for all characters. A set of marks
    comes first, so that `re` can skip what is none: with what stands before the mark in front, a chunk of ASCII took
    6.3 µs and not 0.9."""
    marks, symbols, quotes, letters, lower, upper, dashes = (
        in_brackets("".join(filter(str.isascii, kind)) if ascii_only else kind)
        for kind in (_MARKS_INSIDE, SYMBOLS, _QUOTES, LETTERS, LOWER, UPPER, "–—")
    )
    return re.compile(
        rf"[{marks}{symbols}](?:(?<=\.)\.+"
        + (rf"|(?<=[…{symbols}])" if symbols else "")
        + r"|(?<=[0-9][+\-*^])(?=[0-9-])"
        rf"|(?<=[{lower}{quotes}]\.)(?=[{upper}{quotes}])"
        rf"|(?<=[{letters}],)(?=[{letters}])"
        rf"|(?<=[{letters}0-9]-)-{{0,2}}(?=[{letters}])"
        + (rf"|(?<=[{letters}0-9]—)—(?=[{letters}])" if dashes else "")
        + rf"|(?<=[{letters}0-9][:<>=/~{dashes}])(?=[{letters}]))"
    )


_INSIDE = _inside(ascii_only=False)
_INSIDE_ASCII = _inside(ascii_only=True)

_HOST = r"[A-Za-z0-9\u00a1-\uffff]"
_SCHEME = re.compile(r"[\w+.-]{2,}://")
_ADDRESS = re.compile(
    r"(?:(?!(?:10|127)(?:\.\d{1,3}){3}|(?:169\.254|192\.168)(?:\.\d{1,3}){2}"
    r"|172\.(?:1[6-9]|2\d|3[01])(?:\.\d{1,3}){2})"
    r"(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])(?:\.(?:1?\d{1,2}|2[0-4]\d|25[0-5])){2}"
    r"\.(?:[1-9]\d?|1\d\d|2[0-4]\d|25[0-4])"
    rf"|(?:{_HOST}(?:[A-Za-z0-9\u00a1-\uffff_-]{{0,62}}{_HOST})?\.)+[{in_brackets(LOWER)}]{{2,63}})"
    r"(?::\d{2,5})?(?:[/?#]|$)"
)


def split(chunk: str) -> tuple[str, ...]:
    """The words of a chunk: text without white space, and not empty. They join to the chunk."""
    if chunk in FIXED:
        return FIXED[chunk]
    if chunk.isascii():
        if chunk.isalpha():
            return (chunk,)
        words = _split_plain(chunk) or _split(chunk, FIXED)
    else:
        words = _split(chunk, FIXED)
    return words if _PAIRS.isdisjoint(pairwise(words)) else _with_fixed(words)


def _split_plain(chunk: str) -> tuple[str, ...] | None:
    """What `_split` gives, sooner, for most chunks of ASCII; None for those that need all the rules. A new chunk
    takes 2.7 µs on average with it and 3.5 µs without."""
    rest = chunk.lstrip(_FIRST_ASCII)
    core = rest.rstrip(_LAST_ASCII)
    if not core or core in _CORES or core[0] in _ODD_FIRST:
        return None
    tail = core[-1]
    if tail in _ODD_LAST:
        if tail == "." and core[:-1].isalpha() and core[-2].islower() and core[:-1] not in _CORES:
            return (*chunk[: len(chunk) - len(rest)], core[:-1], ".", *rest[len(core) :])
        if tail in ".sS" or not _DIGITS.isdisjoint(core[-1 - _LONGEST_UNIT :]):
            return None
    middle = _cut(core, FIXED)
    return middle if core is chunk else (*chunk[: len(chunk) - len(rest)], *middle, *rest[len(core) :])


def _split(chunk: str, fixed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    first: list[str] = []
    last: list[str] = []
    start, end = 0, len(chunk)
    while start < end:
        size = end - start
        if size <= LONGEST and chunk[start:end] in fixed:
            break
        mark = chunk[start]
        prefix = 1 if mark in _TAKEN_FIRST else _odd_prefix(chunk, start, end) if mark in _ODD_FIRST else 0
        if prefix and size - prefix <= LONGEST and chunk[start + prefix : end] in fixed:
            first.append(chunk[start : start + prefix])
            start += prefix
            break
        suffix = 0
        if prefix < size:
            mark = chunk[end - 1]
            if mark in _TAKEN_LAST:
                suffix = 1
            elif mark in _ODD_LAST:
                suffix = _odd_suffix(chunk, start + prefix, end)
        if suffix and size - suffix <= LONGEST and chunk[start : end - suffix] in fixed:
            last.append(chunk[end - suffix : end])
            end -= suffix
            break
        if prefix:
            first.append(chunk[start : start + prefix])
            start += prefix
        elif not suffix:
            break
        if suffix:
            last.append(chunk[end - suffix : end])
            end -= suffix
    if not first and not last:
        return _cut(chunk, fixed)
    middle = _cut(chunk[start:end], fixed) if start < end else ()
    return (*first, *middle, *reversed(last))


def _cut(middle: str, fixed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What is left after both ends were taken off: fixed, an address, or cut at the marks inside it."""
    if middle in fixed:
        return fixed[middle]
    if middle.isalnum() or ("." in middle and is_address(middle)):
        return (middle,)
    words: list[str] = []
    start = 0
    for mark in (_INSIDE_ASCII if middle.isascii() else _INSIDE).finditer(middle):
        at = mark.start()
        if at > start:
            words.append(middle[start:at])
        words.append(mark[0])
        start = mark.end()
    if not start:
        return (middle,)
    if start < len(middle):
        words.append(middle[start:])
    return tuple(words)


def _odd_prefix(chunk: str, start: int, end: int) -> int:
    """Length of a mark of several characters, or one with a condition, at the front of chunk[start:end], or 0."""
    mark = chunk[start]
    if mark == ".":
        at = start + 1
        while at < end and chunk[at] == ".":
            at += 1
        return at - start if at > start + 1 else 0
    if mark == "+":
        return 0 if start + 1 < end and chunk[start + 1] in _DIGITS else 1
    return next((len(sign) for sign in _DOLLARS if chunk.startswith(sign, start, end)), 0)


def _odd_suffix(chunk: str, start: int, end: int) -> int:
    """The same at the back; nothing before `start` is seen."""
    mark = chunk[end - 1]
    if mark == ".":
        return _stops(chunk, start, end)
    if mark == "…":
        return 2 if end - start > 1 and chunk[end - 2] == "…" else 1
    if mark in "sS" and chunk.endswith(_POSSESSIVE, start, end):
        return 2
    for length in range(1, min(_LONGEST_UNIT, end - start - 1) + 1):
        if chunk[end - length - 1] in _DIGITS:
            return length if chunk[end - length : end] in _AFTER_DIGIT else 0
    return 0


def _stops(chunk: str, start: int, end: int) -> int:
    """A run of full stops comes off whole; one alone only after a lower-case letter, a digit, a mark, or two capitals
    (so that J. keeps its own)."""
    at = end - 1
    while at > start and chunk[at - 1] == ".":
        at -= 1
    if end - at > 1:
        return end - at
    if at > start and chunk[at - 1] in _BEFORE_STOP:
        return 1
    if at - 1 > start and chunk[at - 1] in _UPPER and chunk[at - 2] in _UPPER:
        return 1
    return 1 if at - 1 > start and chunk[at - 2] == "°" and chunk[at - 1] in "FfCcKk" else 0


def is_address(text: str) -> bool:
    """Whether it is a URL, a host with a known shape of name, an e-mail address or a public IPv4 address."""
    if _ADDRESS.match(text):
        return True
    scheme = _SCHEME.match(text)
    if scheme and _ADDRESS.match(text, scheme.end()):
        return True
    at = text.find("@", 1)
    while at > 0:  # whatever stands before an @ may be a user and a password
        if _ADDRESS.match(text, at + 1):
            return True
        at = text.find("@", at + 1)
    return False


def _with_fixed(words: tuple[str, ...]) -> tuple[str, ...]:
    """Fixed pieces that the rules cut apart are put together again, the longest first: `see:)` ends in `:)`."""
    found = [
        (start, stop)
        for start, word in enumerate(words)
        for stop in range(start + 2, min(start + _MOST_WORDS, len(words)) + 1)
        if words[start:stop] in _CUT_APART
    ]
    if not found:
        return words
    taken: set[int] = set()
    chosen: dict[int, int] = {}
    for start, stop in sorted(found, key=lambda span: (span[0] - span[1], span[0])):
        if start not in taken and stop - 1 not in taken:
            chosen[start] = stop
        taken.update(range(start, stop))
    joined: list[str] = []
    at = 0
    while at < len(words):
        end = chosen.get(at, at + 1)
        joined.extend(FIXED["".join(words[at:end])] if at in chosen else [words[at]])
        at = end
    return tuple(joined)


# What the rules make of each fixed piece, where they make several words of it.
_CUT_APART = frozenset(words for text in FIXED if len(words := _split(text, {})) > 1)
_PAIRS = frozenset(words[:2] for words in _CUT_APART)
_MOST_WORDS = max(map(len, _CUT_APART))
