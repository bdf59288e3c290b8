"""Telephone numbers: international ones by code and length, national ones by shape, the rest by the word before.
Digits with gaps are the most common look-alike of all (dates, prices, serials, tables), so a number counts when its
shape is one that telephone numbers have and few other numbers do, or when a word says that it is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from bessemer.data.clean.pii_numbers import (
    DASH,
    OTHER_NUMBER,
    Found,
    Run,
    in_name,
    is_alone,
    is_joined,
    last_cue,
    words_before,
)

_CUE = re.compile(
    r"\b(?P<phone>tele?(?:phone|fon\w*|foon|f)?|t[ée]l(?:[ée]phone|[ée]fono)?|phones?|ph(?=[.:])|fax|mobile?|móvil|movil|"
    r"handy|cell(?:ulare|phone|ular|(?=\.?:))|rufnummer|hotline|whatsapp|whats\s?app|viber|sms|landline|"
    r"telefono|teléfono|telefone|numéro|тел|телефон|helpline|switchboard|"
    r"(?:call|ring|text|reach)\s+(?:me|us|him|her|them)\s+(?:at|on|under))\b|"
    r"(?P<cjk>电话|電話|手机|手機|携帯|전화|휴대폰)|"
    r"\b(?P<call>(?:call|dial|ring|text|reach|phoned?)(?:\s+(?:me|us|him|her|them|now|toll.?free|\w+))?(?:\s+(?:at|on|by))?"
    r"[\s:]{0,3}\Z)|"
    rf"\b(?P<other>{OTHER_NUMBER})\b|(?P<sign>[#$€£¥§])\s?\Z"
)
_SAME_LIST = re.compile(r"[ \t)]*(?:,|;|/|\||or|and|und|et|o|y|&)\s*[(+]?")  # between two numbers of one list
_GROUP = re.compile("[0-9]+")
_DATE = re.compile(
    r"(?:19|20)[0-9]{2}[-/. ][01]?[0-9][-/. ][0-3]?[0-9](?![0-9])|"
    r"[0-3]?[0-9][-/. ][0-3]?[0-9][-/. ](?:19|20)[0-9]{2}(?![0-9])|(?:19|20)[0-9]{6}(?![0-9])|"
    r"[0-3]?[0-9][-/.][0-3]?[0-9][-/.][0-9]{2}(?![0-9]|[-/. ][0-9]{2}[-/. ][0-9])|"
    rf"(?:19|20)[0-9]{{2}}\s?{DASH}\s?(?:19|20)[0-9]{{2}}(?![0-9])"
)
_DATE_OR_DECIMAL = re.compile(rf"{_DATE.pattern}|[0-9]{{1,2}}\.[0-9]+|[0-9]+\.[0-9]{{1,3}}")
_QUAD = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?!\.?[0-9])")
_DECIMAL = re.compile(r"(?![0-9]{3}\.[0-9]{4}\Z)[0-9]+\.[0-9]+")
_ISBN = re.compile(r"97[89][ -]?[0-9]")

# Digits after the country code, from and to, where the plan of the country is narrow; 7 to 12 elsewhere.
_NATIONAL_DIGITS = {
    "1": (10, 10), "7": (10, 10), "20": (9, 10), "27": (9, 9), "30": (10, 10), "31": (9, 9), "32": (8, 9),
    "33": (9, 9), "34": (9, 9), "36": (8, 9), "39": (8, 11), "40": (9, 9), "41": (9, 9), "43": (7, 12), "44": (9, 10),
    "45": (8, 8), "46": (7, 10), "47": (8, 8), "48": (9, 9), "49": (7, 11), "51": (8, 9), "52": (10, 11),
    "54": (10, 11), "55": (10, 11), "56": (9, 9), "57": (10, 10), "60": (8, 10), "61": (9, 9), "62": (8, 12),
    "63": (8, 10), "64": (8, 10), "65": (8, 8), "66": (8, 9), "81": (9, 10), "82": (8, 10), "84": (9, 10),
    "86": (10, 11), "90": (10, 10), "91": (10, 10), "92": (9, 10), "94": (9, 9), "98": (10, 10), "351": (9, 9),
    "353": (7, 9), "354": (7, 7), "358": (6, 11), "359": (7, 9), "370": (8, 8), "371": (8, 8), "372": (7, 8),
    "380": (9, 9), "385": (8, 9), "386": (8, 8), "420": (9, 9), "421": (9, 9), "852": (8, 8), "880": (8, 10),
    "886": (8, 9), "961": (7, 8), "966": (8, 9), "971": (8, 9), "972": (8, 9),
}  # fmt: skip
_CODES = (
    "53 58 93 95 211 212 213 216 218 220 221 222 223 224 225 226 227 228 229 230 231 232 233 234 235 236 237 "
    "238 239 240 241 242 243 244 245 246 247 248 249 250 251 252 253 254 255 256 257 258 260 261 262 263 264 "
    "265 266 267 268 269 290 291 297 298 299 350 352 355 356 357 373 374 375 376 377 378 381 382 383 387 389 "
    "423 500 501 502 503 504 505 506 507 508 509 590 591 592 593 594 595 596 597 598 599 670 672 673 674 675 "
    "676 677 678 679 680 681 682 683 685 686 687 688 689 690 691 692 850 853 855 856 870 881 882 883 888 960 "
    "962 963 964 965 967 968 970 973 974 975 976 977 979 992 993 994 995 996 998"
)
_OTHER_CODES = frozenset(_CODES.split())

_PLUS = re.compile(r"\+ ?\(?\Z")
_DOUBLE_ZERO = re.compile(r"00[ -]?[1-9]")
_S = rf"(?:[ .\u00a0\u202f]|{DASH})"
_NO_DOT = rf"(?:[ \u00a0\u202f]|{DASH})"
# Shapes that stand for themselves, each with what it is.
_SHAPES = tuple(
    re.compile(rf"(?<![0-9])(?:{shape})(?![0-9])")
    for shape in (
        # North America: 212-555-0199, (212) 555-0199, 1 212.555.0199
        rf"(?:1{_S}?)?\([2-9][0-9]{{2}}\){_S}?[2-9][0-9]{{2}}{_S}[0-9]{{4}}",
        rf"(?:1{_S}?)?[2-9][0-9]{{2}}(?P<n>{_S})[2-9][0-9]{{2}}(?P=n)[0-9]{{4}}",
        r"[2-9][0-9]{2}/[2-9][0-9]{2}-[0-9]{4}",
        # France and others in pairs: 01 23 45 67 89
        rf"0[1-9](?P<f>{_S})[0-9]{{2}}(?P=f)[0-9]{{2}}(?P=f)[0-9]{{2}}(?P=f)[0-9]{{2}}",
        # A trunk zero with an area of two to five digits: 020 7946 0958, 0171/1234567, 03-1234-5678, 07700 900123
        rf"\(?0[1-9][0-9]{{1,4}}\)?(?:{_NO_DOT}| ?[/-] ?)[0-9]{{3,8}}(?:{_NO_DOT}[0-9]{{2,6}}){{0,4}}",
        rf"\(?0[1-9]\)?(?:{_NO_DOT}|/)(?:[0-9]{{3,4}}{_NO_DOT}[0-9]{{4}}|[0-9]{{7,8}})",
        # An area in brackets: (11) 91234-5678
        rf"\([1-9][0-9]{{1,3}}\){_S}?[0-9]{{3,5}}{_S}[0-9]{{4}}",
        # Russia: 8 (495) 123-45-67; China: 138-1234-5678
        rf"8{_S}?\([0-9]{{3,4}}\){_S}?[0-9]{{2,3}}{DASH}[0-9]{{2}}{DASH}[0-9]{{2}}",
        r"1[3-9][0-9]-[0-9]{4}-[0-9]{4}",
    )
)
_SHORTEST_SHAPE = 9
# A postcode, a number and a year, a year in brackets.
_NOT_PHONE = re.compile(r"[0-9]{5}-[0-9]{4}\Z|[0-9]+ (?:19|20)[0-9]{2}\Z|\((?:19|20)[0-9]{2}\)")


def phones(text: str, runs: list[Run]) -> Iterator[Found]:
    """Telephone numbers, each once, in order."""
    last = Found(-9, -9, "")
    for run in runs:
        if run.end - run.start <= 10 and _DATE_OR_DECIMAL.fullmatch(text, run.start, run.end):
            continue  # most runs are: this one test saves the others
        beside = run.start - last.end < 8 and _SAME_LIST.fullmatch(text, last.end, run.start)
        for found in _in_run(text, run, len(last.value) if beside else 0):
            yield found
            last = found


def _in_run(text: str, run: Run, listed: int) -> Iterator[Found]:
    """The numbers of one run. `listed`: a number of so many digits stands just before, as in `555-0142, 5550143`."""
    cue = last_cue(words_before(text, run.start), _CUE)
    said = cue in ("phone", "cjk")
    shapes = _SHAPES if run.end - run.start >= _SHORTEST_SHAPE else ()
    spans = [one.span() for shape in shapes for one in shape.finditer(text, max(0, run.start - 1), run.end)]
    shaped = [
        _found(text, start, end)
        for start, end in sorted(spans)
        if _plausible(text, start, end, cue if start <= run.start else "")
    ]
    begun = _international(text, *run, said)
    if begun is None and (said or listed or cue == "call") and not (shaped and shaped[0].start <= run.start):
        begun = _introduced(text, *run, bare_digits=7 if said or listed else 10)
        if begun and not said and cue != "call" and len(begun.value) != listed:
            begun = None
    at = 0
    for found in [begun, *shaped] if begun else shaped:
        if found.start >= at:
            yield found
            at = found.end


def _found(text: str, start: int, end: int) -> Found:
    if text[start] == "(" and text.find(")", start, end) < 0:
        start += 1  # it opens a remark, not an area
    return Found(start, end, "".join(_GROUP.findall(text, start, end)))


def _international(text: str, start: int, end: int, said: bool) -> Found | None:
    """+49 30 123456, +44 (0)20 7946 0958, 0049 30 123456: the longest end at which the country's length is right."""
    lead = _PLUS.search(text[max(0, start - 3) : start])
    skip = 0
    if lead:
        begin = start - len(lead[0])
        if begin and (in_name(text[begin - 1]) or text[begin - 1] in "+)^"):
            return None
        if " " in lead[0] and not said:
            return None  # a sum
    elif _DOUBLE_ZERO.match(text, start) and not (start and text[start - 1] in ":.-/"):
        begin, skip = start, 2
    else:
        return None
    digits, gaps, closed = "", 0, start + skip
    ends: list[Found] = []
    for group in _GROUP.finditer(text, start + skip, end):
        between = text[closed : group.start()]
        if "  " in between or ("(" in between and ends):
            break
        gaps += bool(between)
        closed = group.end()
        if group[0] == "0" and between.endswith("(") and text[closed : closed + 1] == ")":
            continue  # the trunk zero of +44 (0)20
        if not digits and not _begins_with_code(group[0], whole=skip > 0 and not said):
            return None
        digits += group[0]
        if len(digits) > 15:
            break
        if between == "." and len(group[0]) == 1:
            continue  # a decimal
        enough = 8 if gaps or said else 10
        if _lengths_fit(digits, bool(skip)) and len(digits) >= enough and (not skip or gaps or said):
            ends.append(Found(begin, closed, digits))
    alone = (found for found in reversed(ends) if is_alone(text, start, found.end))
    return next((found for found in alone if not is_joined(text, begin, found.end)), None)


def _begins_with_code(group: str, whole: bool) -> bool:
    """Nobody splits a country code: +1 402 has one, 008 278 has none. `whole`: the group has to be the code alone."""
    codes = [group[:width] for width in (1, 2, 3) if len(group) >= width]
    return any(code in _NATIONAL_DIGITS or code in _OTHER_CODES for code in ([group] if whole else codes))


def _lengths_fit(digits: str, after_zeros: bool) -> bool:
    """Whether the country has numbers of this length. After 00, a zero behind the code means padding, not a trunk."""
    for width in (1, 2, 3):
        code, national = digits[:width], digits[width:]
        if code in _NATIONAL_DIGITS or code in _OTHER_CODES:
            low, high = _NATIONAL_DIGITS.get(code, (6, 12))
            padded = national.startswith("0") and (after_zeros or code == "1") and code != "39"
            return low <= len(national) <= high and not padded and not (code == "1" and national[0] == "1")
    return False


def _plausible(text: str, start: int, end: int, cue: str) -> bool:
    """Whether a national shape is one: the right number of digits, alone, and not introduced as something else."""
    written = text[start:end]
    digits = "".join(_GROUP.findall(written))
    if not 9 <= len(digits) <= 12 or len(set(digits)) < 3 or cue in ("other", "sign"):
        return False
    if _DATE.match(text, start) or _QUAD.match(text, start) or _NOT_PHONE.match(written):
        return False
    if not is_alone(text, start, end) or is_joined(text, start, end) or _counts_up(written):
        return False
    if cue == "" and len(digits) < 10 and written.count(" ") > 1:
        return False  # 041 117 132
    return not (cue == "" and _in_a_row(text, start, end))


def _counts_up(written: str) -> bool:
    """Whether the groups are 01 02 03 04 05, as in examples of bytes."""
    groups = [int(group) for group in _GROUP.findall(written)]
    return len(groups) > 3 and all(b - a == 1 for a, b in pairwise(groups))


def _in_a_row(text: str, start: int, end: int) -> bool:
    """Whether the number is written with spaces only and other numbers stand beside it, as in a table."""
    if any(sign in "()/-" for sign in text[start:end]):
        return False
    before = text[max(0, start - 2) : start].rstrip(" \t")
    after = text[end : end + 3].lstrip(" \t")
    return before[-1:].isdigit() or after[:1].isdigit()


def _introduced(text: str, start: int, end: int, bare_digits: int) -> Found | None:
    """Any number of 7 to 15 digits that a word introduces, in whatever groups it is written."""
    begin = start - (text[start - 1 : start] in ("(", "+"))
    if _DATE.match(text, start) or _QUAD.match(text, start) or _ISBN.match(text, start):
        return None
    count, closed, best, joined = 0, start, 0, False
    for group in _GROUP.finditer(text, start, end):
        gap = text[closed : group.start()]
        if "  " in gap:
            break
        complete = gap.isspace() and (count >= 9 or (count >= 7 and joined))
        if count and (complete or count + len(group[0]) > 15):
            break
        joined |= bool(gap.strip())
        count += len(group[0])
        closed = group.end()
        if count >= 7 and (closed - start > count or count >= bare_digits):
            best = closed
    if not best or not is_alone(text, begin, best) or is_joined(text, begin, best):
        return None
    return None if _DECIMAL.fullmatch(text, begin, best) else _found(text, begin, best)
