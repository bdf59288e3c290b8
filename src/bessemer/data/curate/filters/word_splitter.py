"""Splits text without white space into words, by the rules that the published filters count words with: those of
spaCy's blank English tokenizer. Punctuation is taken off both ends, the rest is cut at marks inside it, and `FIXED`
pieces (contractions, abbreviations, emoticons) have their own splits. Linear in the length.

Character classes are written as ranges of code points instead of using `unicodedata`, because the filters' definitions
are tied to one version of Unicode and must not change with Python.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np


def characters(ranges: str) -> str:
    """The characters of hexadecimal ranges such as "41-5A 5F", in order."""
    ends = [[int(end, 16) for end in entry.split("-")] for entry in ranges.split()]
    return "".join(chr(i) for codes in ends for i in range(codes[0], codes[-1] + 1))


@functools.cache
def in_brackets(chosen: str) -> str:
    """The body of a regex class that matches exactly these characters, as ranges."""
    codes = np.unique(np.frombuffer(chosen.encode("utf-32-le"), np.uint32))
    breaks = np.flatnonzero(codes[1:] != codes[:-1] + 1)
    ends = zip(np.append(codes[:1], codes[breaks + 1]), np.append(codes[breaks], codes[-1:]), strict=True)
    return "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ends)


# Letters at which a word may be cut: Latin, Greek, Cyrillic, Arabic, Hebrew, the larger scripts of India, Ethiopic,
# Hangul, kana and Chinese, with combining marks. Other scripts (such as Thai) are cut only at white space and marks.
LETTERS = characters(
    "41-5A 61-7A C0-D6 D8-F6 F8-1BF 1C4-2AF 386 388-38F 391-3A1 3A3-3A9 3AC-3AF 3B1-3C9 3CC-3CE 400-401 403-40A "
    "40C-40D 410-451 453-45A 45C-45D 490-491 496-497 4A2-4A3 4AE-4AF 4BA-4BB 4D8-4D9 4E8-4E9 591-5F4 620-64A "
    "66E-6D5 6E5-6FF 750-77F 8A0-8BD 900-9FF B80-CFF D80-DFF 1100-137F 1D00-1D25 1D6B-1D77 1D79-1D9A 1E00-1EFF "
    "2C60-2C7B 2C7E-2C7F 2E80-2FDF 2FF0-30FF 31C0-31EF 3200-4DBF 4E00-9FFF A722-A76F A771-A787 A78B-A78E A790-A7B9 "
    "A7FA AB30-AB5A AB60-AB64 AC00-D7AF F900-FAFF FB1D-FBB1 FBD3-FD3D FD50-FDC7 FDF0-FDFB FE30-FE4F FE70-FEFC "
    "FF21-FF3A FF41-FF5A 1EE00-1EEBB 1F200-1F2FF 20000-2A6DF 2A700-2EBEF 2F800-2FA1F"
)
# A letter without case counts as both.
LOWER = "".join(letter for letter in LETTERS if not letter.istitle())
UPPER = "".join(letter for letter in LETTERS if not letter.islower() and letter not in "ǅǈǋǲ")

# Unicode's "other symbols" (arrows, boxes, dingbats, emoji) as of version 11.
SYMBOLS = characters(
    "A6 A9 AE B0 482 58D-58E 60E-60F 6DE 6E9 6FD-6FE 7F6 9FA B70 BF3-BF8 BFA C7F D4F D79 F01-F03 F13 F15-F17 "
    "F1A-F1F F34 F36 F38 FBE-FC5 FC7-FCC FCE-FCF FD5-FD8 109E-109F 1390-1399 1940 19DE-19FF 1B61-1B6A 1B74-1B7C "
    "2100-2101 2103-2106 2108-2109 2114 2116-2117 211E-2123 2125 2127 2129 212E 213A-213B 214A 214C-214D 214F "
    "218A-218B 2195-2199 219C-219F 21A1-21A2 21A4-21A5 21A7-21AD 21AF-21CD 21D0-21D1 21D3 21D5-21F3 2300-2307 "
    "230C-231F 2322-2328 232B-237B 237D-239A 23B4-23DB 23E2-2426 2440-244A 249C-24E9 2500-25B6 25B8-25C0 "
    "25C2-25F7 2600-266E 2670-2767 2794-27BF 2800-28FF 2B00-2B2F 2B45-2B46 2B4D-2B73 2B76-2B95 2B98-2BC8 "
    "2BCA-2BFE 2CE5-2CEA 2E80-2E99 2E9B-2EF3 2F00-2FD5 2FF0-2FFB 3004 3012-3013 3020 3036-3037 303E-303F 3190-3191 "
    "3196-319F 31C0-31E3 3200-321E 322A-3247 3250 3260-327F 328A-32B0 32C0-32FE 3300-33FF 4DC0-4DFF A490-A4C6 "
    "A828-A82B A836-A837 A839 AA77-AA79 FDFD FFE4 FFE8 FFED-FFEE FFFC-FFFD 10137-1013F 10179-10189 1018C-1018E "
    "10190-1019B 101A0 101D0-101FC 10877-10878 10AC8 1173F 16B3C-16B3F 16B45 1BC9C 1D000-1D0F5 1D100-1D126 "
    "1D129-1D164 1D16A-1D16C 1D183-1D184 1D18C-1D1A9 1D1AE-1D1E8 1D200-1D241 1D245 1D300-1D356 1D800-1D9FF "
    "1DA37-1DA3A 1DA6D-1DA74 1DA76-1DA83 1DA85-1DA86 1ECAC 1F000-1F02B 1F030-1F093 1F0A0-1F0AE 1F0B1-1F0BF "
    "1F0C1-1F0CF 1F0D1-1F0F5 1F110-1F16B 1F170-1F1AC 1F1E6-1F202 1F210-1F23B 1F240-1F248 1F250-1F251 1F260-1F265 "
    "1F300-1F3FA 1F400-1F6D4 1F6E0-1F6EC 1F6F0-1F6F9 1F700-1F773 1F780-1F7D8 1F800-1F80B 1F810-1F847 1F850-1F859 "
    "1F860-1F887 1F890-1F8AD 1F900-1F90B 1F910-1F93E 1F940-1F970 1F973-1F976 1F97A 1F97C-1F9A2 1F9B0-1F9B9 "
    "1F9C0-1F9C2 1F9D0-1F9FF 1FA60-1FA6D"
)

# Sentence ends in the scripts for which FineWeb counts a line as properly ended.
LINE_ENDS = characters(
    "21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 17D4-17D6 "
    "17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D 2047-2049 "
    "2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB "
    "FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1 11141-11143 "
    "111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 "
    "1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 "
    "16B37-16B38 16B44 16E98 1BC9F 1DA88"
)
# The same without Khmer, Samaritan and recently added marks: used to count sentences.
SENTENCE_ENDS = frozenset(LINE_ENDS) - frozenset(
    characters("61D-61E 837-83E 17D4-17DA 1B7D-1B7E 2E53-2E54 10F55-10F89 11944-11946 11EF7-11F44 16E98")
)

# A word made only of these is a symbol in the Gopher rules. They include control characters except tab and newline, and
# one full-width digit, as in the rules that reproduce FineWeb.
PUNCTUATION = frozenset(
    "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»"
    + characters("0-8 B-1F 7F-9F")
    + LINE_ENDS
)


# Endings that are split off as separate words, with or without an apostrophe: I'll, Ill.
_WILL = ("'ll", "'ll 've", "'d", "'d 've")
_ENDINGS = {
    "i": (*_WILL, "'m", "'m a", "'ve"),
    "you we they": (*_WILL, "'ve", "'re"),
    "he she it": (*_WILL, "'s"),
    "who what when where why how there": (*_WILL, "'s", "'re", "'ve"),
    "that this": (*_WILL, "'s"),
    "these those": (*_WILL, "'re", "'ve"),
    "ca could do does did had may might must need ought sha should wo would": ("n't", "n't 've"),
    "could might must should would": ("'ve",),
    "ai are is was were have has dare": ("n't",),
    "not": ("'ve",),
}
_NOT_CONTRACTIONS = "Ill ill Its its Hell hell Shell shell Shed shed were Were Well well Whore whore"
_CUT = "y' all|y all|how 'd 'y|How 'd 'y|can not|Can not|gon na|Gon na|got ta|Got ta|let 's|Let 's|c'm on|C'm on"
_HOURS = ("a.m.", "am", "p.m.", "pm")
_DEGREES = "cfkCFK"

# Never split. Single letters with a full stop are initials or list items.
_UNSPLIT = r"""
doin doin' Doin Doin' goin goin' Goin Goin' nothin nothin' Nothin Nothin' nuthin nuthin' Nuthin Nuthin' ol ol' Ol Ol'
somethin somethin' Somethin Somethin' lovin lovin' Lovin Lovin' havin havin' Havin Havin' em 'em ll 'll nuff 'nuff
' '' \") <space> C++ \t \n — 's 'S ‘s ‘S 'd 're 'cause 'Cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'bout and/or w/o ma'am
Ma'am o'clock O'clock
a. b. c. d. e. f. g. h. i. j. k. l. m. n. o. p. q. r. s. t. u. v. w. x. y. z. ä. ö. ü.
Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. Del. Feb. Fla. Ga. Ia. Id. Ill. Ind. Jan. Jul. Jun. Kan. Kans.
Ky. La. Mar. Mass. Mich. Minn. Miss. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa. S.C.
Sep. Sept. Tenn. Va. Wash. Wis.
a.m. p.m. Adm. Bros. co. Co. Corp. D.C. Dr. e.g. E.g. E.G. Gen. Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo.
Mont. Mr. Mrs. Ms. Ph.D. Prof. Rep. Rev. Sen. St. vs. v.s.
:) :-) :)) :-)) :))) :-))) (: (-: =) (= :] :-] [: [-: [= =] :o) (o: :} :-} 8) 8-) (-8 ;) ;-) (; (-; :( :-( :(( :-((
:((( :-((( ): )-: =( >:( :') :'-) :'( :'-( :/ :-/ =/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :-O :o :-o :0 :-0 :() >:o
:* :-* :3 :-3 =3 :> :-> :X :-X :x :-x :D :-D ;D ;-D =D xD XD xDD XDD 8D 8-D
^_^ ^__^ ^___^ >.< >.> <.< ._. ;_; -_- -__- v.v V.V v_v V_V o_o o_O O_o O_O 0_o o_0 0_0 o.O O.o O.O o.o 0.0 o.0 0.o
@_@ <3 <33 <333 </3 (^_^) (-_-) (._.) (>_<) (*_*) (¬_¬) ಠ_ಠ ಠ︵ಠ (ಠ_ಠ) ¯\(ツ)/¯ (╯°□°）╯︵┻━┻ ><(((*>
"""


def _contractions() -> Iterator[tuple[str, ...]]:
    for heads, endings in _ENDINGS.items():
        for head in [form for word in heads.split() for form in (word, word.title())]:
            for ending in endings:
                yield (head, *ending.split())
                yield (head, *ending.replace("'", "").split())


def _fixed_splits() -> dict[str, tuple[str, ...]]:
    splits = {"".join(words): words for words in _contractions()}
    for word in _NOT_CONTRACTIONS.split():
        splits.pop(word, None)
    cut = [tuple(words.split()) for words in _CUT.split("|")]
    cut += [(str(hour), half) for hour in range(1, 13) for half in _HOURS]
    cut += [("°", degree, ".") for degree in _DEGREES]
    splits.update(("".join(words), words) for words in cut)
    splits.update((word, (word,)) for word in _UNSPLIT.split())
    curly = {text: words for text, words in splits.items() if "'" in text}
    for text, words in curly.items():
        splits[text.replace("'", "’")] = tuple(word.replace("'", "’") for word in words)
    return splits


FIXED = _fixed_splits()
LONGEST = max(map(len, FIXED))


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
_SPECIAL_FIRST = frozenset(".+UCA")
_SPECIAL_LAST = frozenset([".", "…", "s", "S", *(unit[-1] for unit in _AFTER_DIGIT)])
_DIGITS = frozenset("0123456789")
_BEFORE_STOP = frozenset("0123456789%²-+|" + LOWER + _PUNCTUATION + _QUOTES)
_UPPER = frozenset(UPPER)

_MARKS_INSIDE = ".,:<>=/+-*^~–—…"


def _compile_inside(ascii_only: bool) -> re.Pattern[str]:
    """Finds the marks at which the middle of a chunk is cut, for ASCII or for all characters. The set of marks comes
    first so that `re` can skip other characters: with the lookbehind first, a chunk of ASCII took 6.3 µs instead of
    0.9."""
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


_INSIDE = _compile_inside(ascii_only=False)
_INSIDE_ASCII = _compile_inside(ascii_only=True)

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
    """The words of a chunk, which is not empty and has no white space. They join to the chunk."""
    if chunk in FIXED:
        return FIXED[chunk]
    if chunk.isascii():
        if chunk.isalpha():
            return (chunk,)
        words = _split_plain(chunk) or _split(chunk, FIXED)
    else:
        words = _split(chunk, FIXED)
    return words if _PAIRS.isdisjoint(pairwise(words)) else _rejoin_fixed(words)


def _split_plain(chunk: str) -> tuple[str, ...] | None:
    """The result of `_split`, sooner, for most chunks of ASCII; None for those that need all rules. A new chunk takes
    2.7 µs on average with it and 3.5 µs without."""
    rest = chunk.lstrip(_FIRST_ASCII)
    core = rest.rstrip(_LAST_ASCII)
    if not core or core in _CORES or core[0] in _SPECIAL_FIRST:
        return None
    tail = core[-1]
    if tail in _SPECIAL_LAST:
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
        prefix = 1 if mark in _TAKEN_FIRST else _special_prefix(chunk, start, end) if mark in _SPECIAL_FIRST else 0
        if prefix and size - prefix <= LONGEST and chunk[start + prefix : end] in fixed:
            first.append(chunk[start : start + prefix])
            start += prefix
            break
        suffix = 0
        if prefix < size:
            mark = chunk[end - 1]
            if mark in _TAKEN_LAST:
                suffix = 1
            elif mark in _SPECIAL_LAST:
                suffix = _special_suffix(chunk, start + prefix, end)
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
    """Splits what is left after both ends were taken off: fixed, an address, or cut at the marks inside it."""
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


def _special_prefix(chunk: str, start: int, end: int) -> int:
    """Length of a conditional or multi-character mark at the front of chunk[start:end], or 0."""
    mark = chunk[start]
    if mark == ".":
        at = start + 1
        while at < end and chunk[at] == ".":
            at += 1
        return at - start if at > start + 1 else 0
    if mark == "+":
        return 0 if start + 1 < end and chunk[start + 1] in _DIGITS else 1
    return next((len(sign) for sign in _DOLLARS if chunk.startswith(sign, start, end)), 0)


def _special_suffix(chunk: str, start: int, end: int) -> int:
    """The same at the back, ignoring everything before `start`."""
    mark = chunk[end - 1]
    if mark == ".":
        return _full_stops(chunk, start, end)
    if mark == "…":
        return 2 if end - start > 1 and chunk[end - 2] == "…" else 1
    if mark in "sS" and chunk.endswith(_POSSESSIVE, start, end):
        return 2
    for length in range(1, min(_LONGEST_UNIT, end - start - 1) + 1):
        if chunk[end - length - 1] in _DIGITS:
            return length if chunk[end - length : end] in _AFTER_DIGIT else 0
    return 0


def _full_stops(chunk: str, start: int, end: int) -> int:
    """A run of full stops comes off whole; a single one only after a lower-case letter, a digit, a mark or two capitals
    (J. keeps its stop)."""
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
    """Whether it is a URL, a host name, an e-mail address or a public IPv4 address."""
    if _ADDRESS.match(text):
        return True
    scheme = _SCHEME.match(text)
    if scheme and _ADDRESS.match(text, scheme.end()):
        return True
    at = text.find("@", 1)
    while at > 0:  # the part before @ may be a user and a password
        if _ADDRESS.match(text, at + 1):
            return True
        at = text.find("@", at + 1)
    return False


def _rejoin_fixed(words: tuple[str, ...]) -> tuple[str, ...]:
    """Rejoins fixed pieces that the rules cut apart, longest first: `see:)` ends in `:)`."""
    candidates = [
        (start, stop)
        for start, word in enumerate(words)
        for stop in range(start + 2, min(start + _MAX_WORDS, len(words)) + 1)
        if words[start:stop] in _CUT_APART
    ]
    if not candidates:
        return words
    covered: set[int] = set()
    chosen: dict[int, int] = {}
    for start, stop in sorted(candidates, key=lambda span: (span[0] - span[1], span[0])):
        if start not in covered and stop - 1 not in covered:
            chosen[start] = stop
        covered.update(range(start, stop))
    joined: list[str] = []
    at = 0
    while at < len(words):
        end = chosen.get(at, at + 1)
        joined.extend(FIXED["".join(words[at:end])] if at in chosen else [words[at]])
        at = end
    return tuple(joined)


# How the rules split each fixed piece, where they give several words.
_CUT_APART = frozenset(words for text in FIXED if len(words := _split(text, {})) > 1)
_PAIRS = frozenset(words[:2] for words in _CUT_APART)
_MAX_WORDS = max(map(len, _CUT_APART))
