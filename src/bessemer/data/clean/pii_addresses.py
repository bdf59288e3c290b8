"""Addresses: of email, found from their @, and of IP, told from versions, section numbers, times and names of C++. What
only looks like an email address stays: `user@host:path` of scp and git, accounts after `ssh`, systemd units, names of
algorithms, icon@2x.png. The tables of IP ranges are ours: what Python calls global differs between its versions."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from bessemer.data.clean.pii_numbers import Found, Run, in_name, is_alone, last_cue, words_before

# Latin, Greek and Cyrillic letters; scripts without spaces would swallow the words around the address.
_LETTERS = r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u052f"
_LABEL = rf"[{_LETTERS}0-9](?:[{_LETTERS}0-9-]{{0,61}}[{_LETTERS}0-9])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.){{1,8}}(?:[{_LETTERS}]{{2,24}}|xn--[A-Za-z0-9-]{{2,59}})(?![{_LETTERS}0-9_])")
_IN_BRACKETS = re.compile(r"\[[0-9]{1,3}(?:\.[0-9]{1,3}){3}\]")
_LOCAL_SIGNS = re.compile(rf"[{_LETTERS}0-9._%+'&~=#-]*")
_LOCAL = re.compile(rf"[{_LETTERS}0-9_](?:[{_LETTERS}0-9._%+'&~=#-]{{0,62}}[{_LETTERS}0-9_+=~-])?\Z")
_LONGEST_LOCAL = 64
_ENCODED = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_ASSIGNED = re.compile(r".*[=#&]")
# `name [at] host [dot] org`; the brackets are what tells it from a sentence, and what it is found by.
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
# Endings of files and of systemd's units that no top-level domain has (.py, .sh and .rs are countries).
_FILE_ENDINGS = (
    "png jpg jpeg gif svg webp bmp ico tif tiff css js jsx ts tsx scss less html htm xml json yaml yml toml txt pdf "
    "csv rb pkl npz pth whl tgz java cpp hpp class jar exe dll conf cfg ini log bak tmp patch diff "
    "service socket target timer mount automount slice scope swap"
)
_NOT_DOMAINS = frozenset(_FILE_ENDINGS.split())
# Names of algorithms: aes256-gcm@openssh.com
_NOT_MAILBOXES = frozenset({"openssh.com", "libssh.org", "lysator.liu.se"})


def emails(text: str, runs: list[Run]) -> Iterator[Found]:
    """Addresses as they are written, with national letters, and spelled out with brackets. Case does not count."""
    at = text.find("@")
    while at >= 0:
        found = _around(text, at)
        if found:
            yield found
        at = text.find("@", found.end if found else at + 1)
    for pattern in _SPELLED_AT:
        for match in pattern.finditer(text):
            if found := _spelled(text, match.start(match.lastindex or 0), match.end()):
                yield found


def _local_start(text: str, end: int) -> int:
    """Where the part before the @ at `end` begins; `end` where there is none or it is too long to be one."""
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


def _around(text: str, at: int) -> Found | None:
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
    return Found(start, end, text[start:end].lower())


def _spelled(text: str, opened: int, closed: int) -> Found | None:
    """The address around text[opened:closed], which is [at]."""
    end = opened - (text[opened - 1 : opened] == " ")
    start = _local_start(text, end)
    written = _SPELLED_HOST.match(text, closed)
    if written is None or start == end or not _LOCAL.match(text, start, end):
        return None
    host = _SPELLED_DOT.sub(".", written[1])
    found = Found(start, written.end(), f"{text[start:end]}@{host}".lower())
    return found if _DOMAIN.fullmatch(host) else None


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
_NETS = [ipaddress.IPv4Network(net) for net in _PRIVATE_NETS.split()]
_PRIVATE_V4 = [(int(net.network_address), int(net.broadcast_address)) for net in _NETS]
_GLOBAL_V6 = (0x2000 << 112, (0x4000 << 112) - 1)  # 2000::/3 is all that is handed out
_DOCUMENTATION_V6 = (0x20010DB8 << 96, (0x20010DB9 << 96) - 1)
_V4_INSIDE = (0xFFFF, 0x64FF9B << 64)  # ::ffff:a.b.c.d, and 64:ff9b::a.b.c.d of NAT64; 6to4 and Teredo are global
_V6_MIDDLE = re.compile(r":[0-9A-Fa-f]{0,4}:")
_V6_SIGNS = frozenset("0123456789abcdefABCDEF:.")
_LONGEST_V6 = 45


def ip_addresses(text: str, runs: list[Run], private: bool = False) -> Iterator[Found]:
    """IPv4 and IPv6 addresses; private, local and documentation ranges only when `private`. Four small numbers are a
    version or a section unless a word, a port, a mask or a time speaks for an address."""
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
    if start and (in_name(text[start - 1]) or text[start - 1] in ":."):
        return None
    if end < len(text) and (in_name(text[end]) or text[end] == ":"):
        return None
    try:
        address = ipaddress.IPv6Address(written)
    except ValueError:
        return None
    if (
        sum(map(bool, written.split(":"))) < 2
        and text[end : end + 1] != "/"
        and written != "::1"
        and "." not in written
    ):
        return None  # a year and colons
    number = int(address)
    if number >> 32 in _V4_INSIDE or (number >> 32 == 0 and "." in written):
        public = not any(low <= number & 0xFFFFFFFF <= high for low, high in _PRIVATE_V4)
        return str(address) if private or public else None
    documentation = _DOCUMENTATION_V6[0] <= number <= _DOCUMENTATION_V6[1]
    public = _GLOBAL_V6[0] <= number <= _GLOBAL_V6[1] and not documentation
    return str(address) if private or public else None
