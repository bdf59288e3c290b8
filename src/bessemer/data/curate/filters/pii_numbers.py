"""What the finders of personal data share, and the finders of payment cards, IBANs and US social security numbers. A
text is scanned for digits once; number finders then look only at runs that could hold a number. Cards, IBANs and social
security numbers have their own checks (Luhn, mod 97, unissued ranges), so their shape may be loose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class PiiCandidate(NamedTuple):
    """One personal value: text[start:end]. `value` is its canonical form."""

    start: int
    end: int
    value: str


class DigitRun(NamedTuple):
    """Digits with at most three characters between them: at least seven, or a dotted quad."""

    start: int
    end: int


# What may separate the digits of one number: spaces, brackets, dots, slashes and hyphens.
GAP = r" \u00a0\u2009\u202f().\u2010-\u2013/-"
DASH = r"[-\u2010-\u2013]"
# Possessive, so that a megabyte of digits causes no backtracking.
_RUN = re.compile(rf"[0-9](?<![0-9][0-9])(?:(?:[{GAP}]{{0,3}}+[0-9]){{6,}}+|[0-9]{{0,2}}(?:\.[0-9]{{1,3}}){{3}})")
_REACH = 40
_NUMBER = re.compile("(?<![a-z0-9])[0-9][0-9a-z]*")  # not the 4 of ipv4
_REST_OF_WORD = re.compile(r"\A\w+")


def number_runs(text: str) -> Iterator[DigitRun]:
    """Where a number may be; scans about 120 MB of prose per second."""
    return (DigitRun(*match.span()) for match in _RUN.finditer(text))


def words_before(text: str, start: int) -> str:
    """The words before a number: lower case, back to the previous number, at most 40 characters."""
    first = max(0, start - _REACH)
    window = text[first:start].lower()
    if first and text[first - 1].isalnum():
        window = _REST_OF_WORD.sub("", window, 1)
    return _NUMBER.split(window)[-1]


def last_cue(words: str, cues: re.Pattern[str]) -> str:
    """The name of the group of `cues` that matches last in `words`, or nothing: the nearest word decides."""
    cue = ""
    for match in cues.finditer(words):
        cue = match.lastgroup or ""
    return cue


def in_name(sign: str) -> bool:
    """Whether a character beside a number makes it part of a name. Scripts without spaces (CJK) do not."""
    return sign == "_" or (sign < "\u0530" and sign.isalnum())


def is_alone(text: str, start: int, end: int) -> bool:
    """Whether text[start:end] is not part of a longer name or number, such as x123, 0.123, 123.4 or 123abc."""
    if start:
        before = text[start - 1]
        if in_name(before) or (before == "." and start > 1 and text[start - 2].isdigit()):
            return False
    if end < len(text):
        after = text[end]
        if in_name(after) or (after == "." and text[end + 1 : end + 2].isdigit()):
            return False
    return True


def is_joined(text: str, start: int, end: int) -> bool:
    """Whether the neighbouring characters make a number part of a name, path, time or formula: CVE-2014-8148,
    /p/1234567/, 08:06 1083555, 1234567*x."""
    if start > 1:
        further, before = text[start - 2], text[start - 1]
        if (before in "-/" and not further.isspace()) or (before == ":" and further.isdigit()):
            return True
    after, further = text[end : end + 1], text[end + 1 : end + 2] or " "
    return (after in ("-", "/", "*") and in_name(further)) or (after == ":" and further.isdigit())


# Words that announce another kind of number.
OTHER_NUMBER = (
    r"order|invoice|isbn|issn|serial|s/n|sn|part|ref|reference|case|ticket|tracking|sku|model|version|ver|build|"
    r"revision|rev|bug|id|item|catalogue|catalog|lot|batch|patent|doi|pmid|account|acct|postcode|zip|ean|upc|gtin|"
    r"imei|price|timestamp|date|section|figure|table|page|pages|pp|volume|vol|policy|claim|membership|licen[cs]e|"
    r"registration|reg|vat|tax|checksum|hash|seed|matrix|formula|equation"
)

# --- payment cards -------------------------------------------------------------------------------------------------

_CARD = re.compile(
    r"(?<![0-9])(?:[0-9]{13,19}|"
    rf"[0-9]{{4}}(?P<a>[ .]|{DASH})[0-9]{{4}}(?P=a)[0-9]{{4}}(?P=a)[0-9]{{1,4}}(?:(?P=a)[0-9]{{3}})?|"
    rf"[0-9]{{4}}(?P<b>[ .]|{DASH})[0-9]{{6}}(?P=b)[0-9]{{4,5}})(?![0-9])"
)
_CARD_CUE = re.compile(r"(?P<card>card|visa|credit|debit|pan\b|maestro|karte|carte|tarjeta|carta\b)")
_CARD_NEIGHBOUR = re.compile(r"[ .-](?=[A-Z]*[0-9])[0-9A-Z]{4}(?![0-9A-Za-z])")
_LONG_BEFORE, _LONG_AFTER = re.compile(r"[0-9]{8}[ \t]{1,3}\Z"), re.compile(r"[ \t]{1,3}[0-9]{8}")
# Per network: ranges of first digits, the usual length, and rarer lengths, which need a word before them.
_MOST = (17, 18, 19)
_ISSUERS: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("4-4", 16, (13, 19)),  # Visa; 13 and 19 digits are more often ids
    ("51-55 2221-2720", 16, ()),  # Mastercard
    ("34-34 37-37", 15, ()),  # American Express
    ("6011-6011 644-649 65-65 62-62 3528-3589", 16, _MOST),  # Discover, UnionPay, JCB
    ("300-305 309-309 36-36 38-39", 14, (16,)),  # Diners Club
    ("5018-5018 5020-5020 5038-5038 5893-5893 6304-6304 6759-6759 6761-6763", 16, (13, 14, 15, *_MOST)),  # Maestro
)
_NETWORKS = [(first.split("-"), usual, rare) for firsts, usual, rare in _ISSUERS for first in firsts.split()]


def luhn(digits: str) -> bool:
    """Whether the checksum of payment cards holds."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = ord(digit) - 48
        total += value if place % 2 == 0 else value * 2 - (9 if value > 4 else 0)
    return total % 10 == 0


def _is_issued(digits: str, has_cue: bool) -> bool:
    """Whether a card network issues such a number; `has_cue`: a word before it speaks of cards."""
    return any(
        first <= digits[: len(first)] <= last and (len(digits) == usual or (has_cue and len(digits) in rare))
        for (first, last), usual, rare in _NETWORKS
    )


def credit_cards(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """Card numbers of known networks and lengths with a valid Luhn checksum, in one piece or in a card's groups."""
    for run in runs:
        if run.end - run.start < 13:
            continue
        for match in _CARD.finditer(text, run.start, run.end):
            start, end = match.span()
            digits = re.sub("[^0-9]", "", match[0])
            if not 13 <= len(digits) <= 19 or not luhn(digits) or len(set(digits)) == 1:
                continue
            has_cue = bool(_CARD_CUE.search(words_before(text, start)))
            if not _is_issued(digits, has_cue) or not is_alone(text, start, end) or is_joined(text, start, end):
                continue
            if not has_cue and _beside_numbers(text, start, end):
                continue
            if match["a"] and (
                _CARD_NEIGHBOUR.match(text, end) or _CARD_NEIGHBOUR.match(text[max(0, start - 5) : start][::-1])
            ):
                continue  # a table row of four-digit numbers, or part of an IBAN
            yield PiiCandidate(start, end, digits)


def _beside_numbers(text: str, start: int, end: int) -> bool:
    """Whether the number is in a row of long numbers, or after a number sign."""
    before = text[max(0, start - 12) : start]
    return before.endswith("#") or bool(_LONG_BEFORE.search(before) or _LONG_AFTER.match(text, end))


# --- IBAN ----------------------------------------------------------------------------------------------------------

# fmt: off
_IBAN_LENGTH = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29,
    "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29,
    "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
    "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20,
    "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19,
    "MN": 20, "MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29,
    "PT": 25, "QA": 29, "RO": 24, "RS": 22, "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24,
    "SM": 27, "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
    "YE": 30,
}
# fmt: on
_IBAN_GAP = r"[ \u00a0\u2009\u202f-]"
_IBAN = re.compile(
    rf"[A-Z][A-Z](?<![0-9A-Za-z_][A-Z][A-Z])[0-9]{{2}}{_IBAN_GAP}?[0-9A-Z]{{4}}(?:{_IBAN_GAP}?[0-9A-Z]){{3,26}}"
)
# In lower or mixed case; words and hex hashes look similar more often.
_ANY_IBAN = re.compile(
    rf"(?<![0-9A-Za-z_])[A-Za-z]{{2}}[0-9]{{2}}{_IBAN_GAP}?[0-9A-Za-z]{{4}}(?:{_IBAN_GAP}?[0-9A-Za-z]){{3,26}}"
)
_BEFORE_DIGITS, _LONGEST_IBAN = 24, 42  # characters of an IBAN, including gaps
_GROUPED = re.compile(rf"\w{{4}}(?:{_IBAN_GAP}\w{{4}})+(?:{_IBAN_GAP}\w{{1,4}})?")
_BANK_AND_DIGITS = re.compile(r"[A-Z]{2}[0-9]{2}(?:[A-Z]{4})?[0-9]+")


def ibans(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """IBANs with the country's length and a valid checksum. In lower or mixed case they must also be mostly digits in
    groups of four, or four letters of a bank and digits, or follow the word IBAN."""
    yield from _search_ibans(text, _IBAN)
    for candidate in _ibans_near_digits(text, runs):
        iban = text[candidate.start : candidate.end]
        if iban != iban.upper() and (
            _BANK_AND_DIGITS.fullmatch(candidate.value)
            or (_GROUPED.fullmatch(iban) and sum(map(str.isdigit, candidate.value)) * 2 > len(candidate.value))
            or "iban" in text[max(0, candidate.start - 20) : candidate.start].lower()
        ):
            yield candidate


def _ibans_near_digits(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """IBANs in any case, around the runs of digits: searching the whole text would take five times as long."""
    at = 0
    for run in runs:
        for candidate in _search_ibans(text, _ANY_IBAN, max(at, run.start - _BEFORE_DIGITS), run.end + _LONGEST_IBAN):
            at = candidate.end
            yield candidate


def _search_ibans(text: str, pattern: re.Pattern[str], at: int = 0, end: int | None = None) -> Iterator[PiiCandidate]:
    end = len(text) if end is None else end
    while match := pattern.search(text, at, end):
        candidate = _check_iban(text, match.start(), match[0].upper())
        at = candidate.end if candidate else match.start() + 2  # a match may reach into the next number
        if candidate:
            yield candidate


def _check_iban(text: str, start: int, matched: str) -> PiiCandidate | None:
    length = _IBAN_LENGTH.get(matched[:2])
    if length is None:
        return None
    characters: list[str] = []
    end = start
    for sign in matched:  # the match may extend into the next word
        end += 1
        if sign.isalnum():
            characters.append(sign)
            if len(characters) == length:
                break
    if len(characters) != length or (end < len(text) and in_name(text[end])):
        return None
    value = "".join(characters)
    number = "".join(str(int(sign, 36)) for sign in value[4:] + value[:4])
    return PiiCandidate(start, end, value) if int(number) % 97 == 1 else None


# --- US social security numbers ------------------------------------------------------------------------------------

_SSN = re.compile(r"(?<![0-9])([0-9]{3})([ -]?|[\u2010-\u2013])([0-9]{2})\2([0-9]{4})(?![0-9])")
_SSN_CUE = re.compile(
    rf"(?P<ssn>ssn\s?#?|social\s+sec[^#]*#?|soc\.?\s*sec|ss\s?#|taxpayer)|\b(?P<other>{OTHER_NUMBER})\b|(?P<sign>#)\s?\Z"
)
_NOT_ISSUED = {"078051120", "219099999"}  # void, because printed in advertisements


def social_security(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """US social security numbers: 123-45-6789; with spaces or without separators only after words that say so."""
    for run in runs:
        if run.end - run.start < 9:
            continue
        for match in _SSN.finditer(text, run.start, run.end):
            start, end = match.span()
            area, gap, group, serial = match.groups()
            digits = area + group + serial
            if area in ("000", "666") or area[0] == "9" or group == "00" or serial == "0000":
                continue
            if digits in _NOT_ISSUED or not is_alone(text, start, end) or is_joined(text, start, end):
                continue
            cue = last_cue(words_before(text, start), _SSN_CUE)
            if cue == "ssn" or (not cue and gap and gap != " "):
                yield PiiCandidate(start, end, digits)
