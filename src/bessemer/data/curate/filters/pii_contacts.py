"""Finds contact data: e-mail addresses, IP addresses and telephone numbers.

Text that only looks like an e-mail address stays: `user@host:path` of scp and git, accounts after `ssh`, systemd units,
names of algorithms, icon@2x.png. IP addresses are distinguished from versions, section numbers, times and C++ names;
the tables of IP ranges are ours, because Python's `is_global` differs between versions. Digits with gaps are mostly
dates, prices, serials or tables, so a telephone number needs an international code and length, a national shape that
few other numbers have, or a word before it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from itertools import pairwise

from bessemer.data.curate.filters.pii_numbers import (
    DASH,
    OTHER_NUMBER,
    DigitRun,
    PiiCandidate,
    in_name,
    is_alone,
    is_joined,
    last_cue,
    words_before,
)

# Latin, Greek and Cyrillic letters; scripts without spaces would include the words around the address.
_LETTERS = r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u052f"
_LABEL = rf"[{_LETTERS}0-9](?:[{_LETTERS}0-9-]{{0,61}}[{_LETTERS}0-9])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.){{1,8}}(?:[{_LETTERS}]{{2,24}}|xn--[A-Za-z0-9-]{{2,59}})(?![{_LETTERS}0-9_])")
_IN_BRACKETS = re.compile(r"\[[0-9]{1,3}(?:\.[0-9]{1,3}){3}\]")
_LOCAL_SIGNS = re.compile(rf"[{_LETTERS}0-9._%+'&~=#-]*")
_LOCAL = re.compile(rf"[{_LETTERS}0-9_](?:[{_LETTERS}0-9._%+'&~=#-]{{0,62}}[{_LETTERS}0-9_+=~-])?\Z")
_LONGEST_LOCAL = 64
_ENCODED = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_ASSIGNED = re.compile(r".*[=#&]")
# `name [at] host [dot] org`; the brackets distinguish it from a sentence.
_SPELLED_AT = (
    re.compile(r"\](?:(?<=(\[at\]))|(?<=(\[ at \]))|(?<=(\[AT\]))|(?<=(\[@\]))|(?<=(\[ät\])))"),
    re.compile(r"\)(?:(?<=(\(at\)))|(?<=(\( at \)))|(?<=(\(AT\)))|(?<=(\(@\)))|(?<=(\(ät\))))"),
)
_SPELLED_DOT = re.compile(r" ?[\[(] ?(?:dot|DOT|punkt|\.) ?[\])] ?")
_SPELLED_HOST = re.compile(rf" ?({_LABEL}(?:(?:\.|{_SPELLED_DOT.pattern}){_LABEL}){{1,6}})")
# `ssh -p 22 name@host`, `scp a.txt name@host`, `git+ssh://name@host`: an account, not a mailbox.
_SSH_BEFORE = re.compile(
    r"(?:\b(?:ssh|scp|sftp|rsync|mosh|ssh-copy-id)[ \t]+(?:(?:-\S+|\S*[/.]\S*|[0-9]+)[ \t]+){0,6}"
    r"|\b(?:ssh|git|svn|rsync|s?ftp)(?:\+\w+)?://)\Z"
)
# scheme://user:password@host is a secret and not a mailbox.
_PASSWORD_BEFORE = re.compile(r"://[^\s/:@]*:\Z")
_PATH_AFTER = re.compile(r":(?:[~/.]|[0-9]{1,5}/|[\w.~-]+/|[\w-]+\.git\b)")
# Extensions of files and systemd units that are no top-level domain (.py, .sh and .rs are countries).
_FILE_ENDINGS = (
    "png jpg jpeg gif svg webp bmp ico tif tiff css js jsx ts tsx scss less html htm xml json yaml yml toml txt pdf "
    "csv rb pkl npz pth whl tgz java cpp hpp class jar exe dll conf cfg ini log bak tmp patch diff "
    "service socket target timer mount automount slice scope swap"
)
_NOT_DOMAINS = frozenset(_FILE_ENDINGS.split())
# Names of algorithms: aes256-gcm@openssh.com
_NOT_MAILBOXES = frozenset({"openssh.com", "libssh.org", "lysator.liu.se"})


def emails(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """E-mail addresses, also with national letters and spelled out with brackets. Values are in lower case."""
    at = text.find("@")
    while at >= 0:
        candidate = _email_around(text, at)
        if candidate:
            yield candidate
        at = text.find("@", candidate.end if candidate else at + 1)
    for pattern in _SPELLED_AT:
        for match in pattern.finditer(text):
            if candidate := _spelled_email(text, match.start(match.lastindex or 0), match.end()):
                yield candidate


def _local_start(text: str, end: int) -> int:
    """Where the part before the @ at `end` begins; `end` where there is none or it is too long."""
    signs = _LOCAL_SIGNS.match(text[max(0, end - _LONGEST_LOCAL - 1) : end][::-1])
    assert signs is not None, "the pattern also matches nothing"
    start = end - signs.end()
    if end - start > _LONGEST_LOCAL:
        return end
    if assigned := _ASSIGNED.match(text, start, end):  # ?to=name@host, #name@host
        start = assigned.end()
    if encoded := _ENCODED.match(text, start, end):
        start = encoded.end()
    while start < end and text[start] in ".'%+~-":
        start += 1
    if start and text[start - 1] == "\\" and text[start : start + 1] in ("n", "t", "r"):
        start += 1  # "\nname@host" in a string of source code
    return start


def _email_around(text: str, at: int) -> PiiCandidate | None:
    start = _local_start(text, at)
    if start == at or text[start - 1 : start] in ("$", "{") or not _LOCAL.match(text, start, at):
        return None  # nothing, or a variable
    domain = _DOMAIN.match(text, at + 1) or _IN_BRACKETS.match(text, at + 1)
    if domain is None:
        return None
    host = domain[0].lower()
    if host.rpartition(".")[2] in _NOT_DOMAINS or host in _NOT_MAILBOXES:
        return None
    end = domain.end()
    if start >= 3 and text.startswith("://", start - 3) and not text.startswith("mailto", max(0, start - 9)):
        return None  # https://name@host
    if _PATH_AFTER.match(text, end) or _SSH_BEFORE.search(text[max(0, start - 80) : start]):
        return None
    if text[start - 1 : start] == ":" and _PASSWORD_BEFORE.search(text[max(0, start - 100) : start]):
        return None
    return PiiCandidate(start, end, text[start:end].lower())


def _spelled_email(text: str, opened: int, closed: int) -> PiiCandidate | None:
    """The address around text[opened:closed], which is [at]."""
    end = opened - (text[opened - 1 : opened] == " ")
    start = _local_start(text, end)
    host_match = _SPELLED_HOST.match(text, closed)
    if host_match is None or start == end or not _LOCAL.match(text, start, end):
        return None
    host = _SPELLED_DOT.sub(".", host_match[1])
    candidate = PiiCandidate(start, host_match.end(), f"{text[start:end]}@{host}".lower())
    return candidate if _DOMAIN.fullmatch(host) else None


_IPV4 = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9])")
_IP_CUE = re.compile(
    r"(?<![a-z])(?P<net>ips?|ipv[46]|address|addresses|addr|hosts?|hostname|servers?|clients?|dns|ping|traceroute|nameservers?|gateway|"
    r"inet|remote|src(?!/)|dst|source|destination|router|proxy|network|connect(?:ed|ion|ing)?|adresse|dirección)\b|"
    r"(?P<sign>://|@|\[)\Z|"
    r"(?P<other>\b(?:version|versions|ver|v|release|released|section|sec|chapter|figure|fig|table|build|firmware|driver|"
    r"clause|article|annex|appendix|oid|\w*identifier|paragraph|para|rev|revision|abschnitt|kapitel|updated?|upgraded?|downgraded?|bump(?:ed)?|"
    r"patch|library|package|theorem|lemma|definition|example|exercise|requires?|python|java|kernel|since)\b|§|>=|<=|==|~)"
)
_PORT_OR_MASK = re.compile(r":[0-9]{1,5}(?![0-9])|/[0-9]{1,2}(?![0-9./])|\s+port\s+[0-9]")
_TIME_BEFORE = re.compile(r"[0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?\]?[ \t]+\Z")  # a line of a log
# Addresses not reachable on the internet: private, local, documentation, multicast, reserved.
_PRIVATE_NETS = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_NETS = [ipaddress.IPv4Network(net) for net in _PRIVATE_NETS.split()]
_PRIVATE_V4 = [(int(net.network_address), int(net.broadcast_address)) for net in _NETS]
_GLOBAL_V6 = (0x2000 << 112, (0x4000 << 112) - 1)  # only 2000::/3 is allocated
_DOCUMENTATION_V6 = (0x20010DB8 << 96, (0x20010DB9 << 96) - 1)
_V4_INSIDE = (0xFFFF, 0x64FF9B << 64)  # ::ffff:a.b.c.d, and 64:ff9b::a.b.c.d of NAT64; 6to4 and Teredo are global
_V6_MIDDLE = re.compile(r":[0-9A-Fa-f]{0,4}:")
_V6_SIGNS = frozenset("0123456789abcdefABCDEF:.")
_LONGEST_V6 = 45


def ip_addresses(text: str, runs: list[DigitRun], private: bool = False) -> Iterator[PiiCandidate]:
    """IPv4 and IPv6 addresses; private, local and documentation ranges only with `private`. Four small numbers count as
    a version or section unless a word, port, mask or time indicates an address."""
    for run in runs:
        if text.count(".", run.start, run.end) < 3:
            continue
        for match in _IPV4.finditer(text, run.start, run.end):
            if _is_ipv4(text, *match.span(), private):
                yield PiiCandidate(*match.span(), match[0])
    yield from _ipv6(text, private)


def _is_ipv4(text: str, start: int, end: int, private: bool) -> bool:
    parts = text[start:end].split(".")
    if any(int(part) > 255 or (len(part) > 1 and part[0] == "0") for part in parts):
        return False
    number = int(ipaddress.IPv4Address(text[start:end]))
    if not private and any(low <= number <= high for low, high in _PRIVATE_V4):
        return False
    if not is_alone(text, start, end):
        return False
    if start > 1 and text[start - 1] in "-+" and not text[start - 2].isspace():
        return False  # name-1.2.3.4.tar.gz, 1.2.3.4-beta
    if text[end : end + 1] in ("-", "+") and in_name(text[end + 1 : end + 2] or " "):
        return False
    cue = last_cue(words_before(text, start).rpartition("\n")[2], _IP_CUE)
    if cue == "other":
        return False
    if cue == "sign" and text[start - 1] == "[" and text[end : end + 1] != "]":
        cue = ""
    if cue or _PORT_OR_MASK.match(text, end) or not _is_numbering(*map(int, parts)):
        return True
    return bool(_TIME_BEFORE.search(text[max(0, start - 20) : start]))


def _is_numbering(first: int, *others: int) -> bool:
    """Whether four numbers are as small as in versions and sections; 12 of 1,000 random addresses are."""
    largest = max(first, *others)
    return largest < 64 or (largest < 100 and first < 32)


def _ipv6(text: str, private: bool) -> Iterator[PiiCandidate]:
    at = 0
    while middle := _V6_MIDDLE.search(text, at):
        start, end = middle.span()
        low, high = max(at, start - _LONGEST_V6), end + _LONGEST_V6
        while start > low and text[start - 1] in _V6_SIGNS:
            start -= 1
        while end < min(len(text), high) and text[end] in _V6_SIGNS:
            end += 1
        at = end
        while end > start and (text[end - 1] == "." or (text[end - 1] == ":" and text[end - 2] != ":")):
            end -= 1  # punctuation of the sentence
        if address := _is_ipv6(text, start, end, private):
            yield PiiCandidate(start, end, address)


def _is_ipv6(text: str, start: int, end: int, private: bool) -> str | None:
    address_text = text[start:end]
    if not 3 <= len(address_text) <= _LONGEST_V6 or not any(sign.isdigit() for sign in address_text):
        return None
    if start and (in_name(text[start - 1]) or text[start - 1] in ":."):
        return None
    if end < len(text) and (in_name(text[end]) or text[end] == ":"):
        return None
    try:
        address = ipaddress.IPv6Address(address_text)
    except ValueError:
        return None
    if (
        sum(map(bool, address_text.split(":"))) < 2
        and text[end : end + 1] != "/"
        and address_text != "::1"
        and "." not in address_text
    ):
        return None  # a year and colons
    number = int(address)
    if number >> 32 in _V4_INSIDE or (number >> 32 == 0 and "." in address_text):
        public = not any(low <= number & 0xFFFFFFFF <= high for low, high in _PRIVATE_V4)
        return str(address) if private or public else None
    documentation = _DOCUMENTATION_V6[0] <= number <= _DOCUMENTATION_V6[1]
    public = _GLOBAL_V6[0] <= number <= _GLOBAL_V6[1] and not documentation
    return str(address) if private or public else None


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
_SAME_LIST = re.compile(r"[ \t)]*(?:,|;|/|\||or|and|und|et|o|y|&)\s*[(+]?")  # between two numbers of a list
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

# Minimum and maximum digits after the country code, where the country's plan is narrow; 6 to 12 elsewhere.
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
# National shapes that need no word before them.
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


def phones(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """Telephone numbers, each once, in order."""
    last = PiiCandidate(-9, -9, "")
    for run in runs:
        if run.end - run.start <= 10 and _DATE_OR_DECIMAL.fullmatch(text, run.start, run.end):
            continue  # true of most runs, and saves the other tests
        beside = run.start - last.end < 8 and _SAME_LIST.fullmatch(text, last.end, run.start)
        for candidate in _phones_in_run(text, run, len(last.value) if beside else 0):
            yield candidate
            last = candidate


def _phones_in_run(text: str, run: DigitRun, listed_digits: int) -> Iterator[PiiCandidate]:
    """The numbers of one run. `listed`: the digits of a number just before it in a list, as in `555-0142, 5550143`."""
    cue = last_cue(words_before(text, run.start), _CUE)
    has_cue = cue in ("phone", "cjk")
    shapes = _SHAPES if run.end - run.start >= _SHORTEST_SHAPE else ()
    spans = [match.span() for shape in shapes for match in shape.finditer(text, max(0, run.start - 1), run.end)]
    national = [
        _make_candidate(text, start, end)
        for start, end in sorted(spans)
        if _is_plausible(text, start, end, cue if start <= run.start else "")
    ]
    introduced = _international_number(text, *run, has_cue)
    begins_national = national and national[0].start <= run.start
    if introduced is None and (has_cue or listed_digits or cue == "call") and not begins_national:
        introduced = _introduced_number(text, *run, bare_digits=7 if has_cue or listed_digits else 10)
        if introduced and not has_cue and cue != "call" and len(introduced.value) != listed_digits:
            introduced = None
    at = 0
    for candidate in [introduced, *national] if introduced else national:
        if candidate.start >= at:
            yield candidate
            at = candidate.end


def _make_candidate(text: str, start: int, end: int) -> PiiCandidate:
    if text[start] == "(" and text.find(")", start, end) < 0:
        start += 1  # opens a remark, not an area code
    return PiiCandidate(start, end, "".join(_GROUP.findall(text, start, end)))


def _international_number(text: str, start: int, end: int, has_cue: bool) -> PiiCandidate | None:
    """+49 30 123456, +44 (0)20 7946 0958, 0049 30 123456: the longest end at which the country's length fits."""
    prefix = _PLUS.search(text[max(0, start - 3) : start])
    skip = 0
    if prefix:
        begin = start - len(prefix[0])
        if begin and (in_name(text[begin - 1]) or text[begin - 1] in "+)^"):
            return None
        if " " in prefix[0] and not has_cue:
            return None  # a sum
    elif _DOUBLE_ZERO.match(text, start) and not (start and text[start - 1] in ":.-/"):
        begin, skip = start, 2
    else:
        return None
    digits, gaps, end_of_group = "", 0, start + skip
    ends: list[PiiCandidate] = []
    for group in _GROUP.finditer(text, start + skip, end):
        between = text[end_of_group : group.start()]
        if "  " in between or ("(" in between and ends):
            break
        gaps += bool(between)
        end_of_group = group.end()
        if group[0] == "0" and between.endswith("(") and text[end_of_group : end_of_group + 1] == ")":
            continue  # the trunk zero of +44 (0)20
        if not digits and not _begins_with_code(group[0], code_only=skip > 0 and not has_cue):
            return None
        digits += group[0]
        if len(digits) > 15:
            break
        if between == "." and len(group[0]) == 1:
            continue  # a decimal
        enough = 8 if gaps or has_cue else 10
        if _length_fits(digits, bool(skip)) and len(digits) >= enough and (not skip or gaps or has_cue):
            ends.append(PiiCandidate(begin, end_of_group, digits))
    alone = (candidate for candidate in reversed(ends) if is_alone(text, start, candidate.end))
    return next((candidate for candidate in alone if not is_joined(text, begin, candidate.end)), None)


def _begins_with_code(group: str, code_only: bool) -> bool:
    """A country code is never split: +1 402 has one, 008 278 has none. `whole`: the group must be the code alone."""
    codes = [group[:width] for width in (1, 2, 3) if len(group) >= width]
    return any(code in _NATIONAL_DIGITS or code in _OTHER_CODES for code in ([group] if code_only else codes))


def _length_fits(digits: str, after_zeros: bool) -> bool:
    """Whether the country has numbers of this length. After 00, a zero behind the code is padding, not a trunk
    prefix."""
    for width in (1, 2, 3):
        code, national = digits[:width], digits[width:]
        if code in _NATIONAL_DIGITS or code in _OTHER_CODES:
            low, high = _NATIONAL_DIGITS.get(code, (6, 12))
            padded = national.startswith("0") and (after_zeros or code == "1") and code != "39"
            return low <= len(national) <= high and not padded and not (code == "1" and national[0] == "1")
    return False


def _is_plausible(text: str, start: int, end: int, cue: str) -> bool:
    """Whether a national shape is a number: the right number of digits, alone, and not introduced as something else."""
    number = text[start:end]
    digits = "".join(_GROUP.findall(number))
    if not 9 <= len(digits) <= 12 or len(set(digits)) < 3 or cue in ("other", "sign"):
        return False
    if _DATE.match(text, start) or _QUAD.match(text, start) or _NOT_PHONE.match(number):
        return False
    if not is_alone(text, start, end) or is_joined(text, start, end) or _counts_up(number):
        return False
    if cue == "" and len(digits) < 10 and number.count(" ") > 1:
        return False  # 041 117 132
    return not (cue == "" and _in_a_row(text, start, end))


def _counts_up(number: str) -> bool:
    """Whether the groups are 01 02 03 04 05, as in examples of bytes."""
    groups = [int(group) for group in _GROUP.findall(number)]
    return len(groups) > 3 and all(b - a == 1 for a, b in pairwise(groups))


def _in_a_row(text: str, start: int, end: int) -> bool:
    """Whether the number has only spaces and other numbers beside it, as in a table."""
    if any(sign in "()/-" for sign in text[start:end]):
        return False
    before = text[max(0, start - 2) : start].rstrip(" \t")
    after = text[end : end + 3].lstrip(" \t")
    return before[-1:].isdigit() or after[:1].isdigit()


def _introduced_number(text: str, start: int, end: int, bare_digits: int) -> PiiCandidate | None:
    """A number of 7 to 15 digits, in any groups, that a word introduces."""
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
    return None if _DECIMAL.fullmatch(text, begin, best) else _make_candidate(text, begin, best)
