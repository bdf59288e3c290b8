"""IP addresses: IPv4 and IPv6, told from versions, section numbers, times and names of C++.

The tables of address ranges are ours: what Python calls a global address differs between its versions.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from bessemer.data.clean.pii_scan import Found, Run, is_name_sign, last_cue, stands_alone, words_before

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
# Addresses that no one on the internet is reached at: private, local, documentation, multicast, reserved.
_PRIVATE_NETS = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_PRIVATE_V4 = tuple(
    (int(net.network_address), int(net.broadcast_address))
    for net in map(ipaddress.IPv4Network, _PRIVATE_NETS.split())
)
_GLOBAL_V6 = (0x2000 << 112, (0x4000 << 112) - 1)  # 2000::/3 is all that is handed out
_DOCUMENTATION_V6 = (0x20010DB8 << 96, (0x20010DB9 << 96) - 1)
_V6_MIDDLE = re.compile(r":[0-9A-Fa-f]{0,4}:")
_V6_SIGNS = frozenset("0123456789abcdefABCDEF:.")
_LONGEST_V6 = 45


def ip_addresses(text: str, runs: list[Run], private: bool) -> Iterator[Found]:
    """IPv4 and IPv6 addresses; private, local and documentation ranges only when `private`.

    Four small numbers are a version or a section unless a word, a port, a mask or a time speaks for an address.
    """
    for run in runs:
        if text.count(".", run.start, run.end) < 3:
            continue
        for match in _IPV4.finditer(text, run.start, run.end):
            if _is_ipv4(text, *match.span(), private):
                yield Found(*match.span(), match[0])
    yield from _ipv6(text, private)


def _is_ipv4(text: str, start: int, end: int, private: bool) -> bool:
    parts = text[start:end].split(".")
    if any(int(part) > 255 or (len(part) > 1 and part[0] == "0") for part in parts):
        return False
    number = int(ipaddress.IPv4Address(text[start:end]))
    if not private and any(low <= number <= high for low, high in _PRIVATE_V4):
        return False
    if not stands_alone(text, start, end) or (
        start > 1 and text[start - 1] in "-+" and not text[start - 2].isspace()
    ):
        return False  # name-1.2.3.4.tar.gz, 1.2.3.4-beta
    if text[end : end + 1] in ("-", "+") and is_name_sign(text[end + 1 : end + 2] or " "):
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
    """Whether four numbers are as small as those of versions and sections: 12 of 1,000 random addresses are."""
    largest = max(first, *others)
    return largest < 64 or (largest < 100 and first < 32)


def _ipv6(text: str, private: bool) -> Iterator[Found]:
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
            end -= 1  # the full stop or colon of the sentence
        if address := _is_ipv6(text, start, end, private):
            yield Found(start, end, address)


def _is_ipv6(text: str, start: int, end: int, private: bool) -> str | None:
    written = text[start:end]
    if not 3 <= len(written) <= _LONGEST_V6 or not any(sign.isdigit() for sign in written):
        return None
    if start and (is_name_sign(text[start - 1]) or text[start - 1] in ":."):
        return None
    if end < len(text) and (is_name_sign(text[end]) or text[end] == ":"):
        return None
    try:
        address = ipaddress.IPv6Address(written)
    except ValueError:
        return None
    if sum(map(bool, written.split(":"))) < 2 and text[end : end + 1] != "/" and written != "::1":
        return None  # a year and colons
    number = int(address)
    if _DOCUMENTATION_V6[0] <= number <= _DOCUMENTATION_V6[1]:
        return str(address) if private else None
    if not private and not _GLOBAL_V6[0] <= number <= _GLOBAL_V6[1]:
        return None
    return str(address)
