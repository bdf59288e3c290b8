"""Email addresses: found from their @, so that a text without one costs a search for one sign.

What only looks like an address stays: `user@host:path` of scp and git remotes, accounts after `ssh`, systemd units,
names of cryptographic algorithms, image files such as icon@2x.png.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bessemer.data.clean.pii_scan import Found, Run

# Latin, Greek and Cyrillic letters; scripts without spaces would swallow the words around the address.
_LETTERS = r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u052f"
_LABEL = rf"[{_LETTERS}0-9](?:[{_LETTERS}0-9-]{{0,61}}[{_LETTERS}0-9])?"
_DOMAIN = re.compile(
    rf"(?:{_LABEL}\.){{1,8}}(?:[{_LETTERS}]{{2,24}}|xn--[A-Za-z0-9-]{{2,59}})(?![{_LETTERS}0-9_])"
)
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
_PATH_AFTER = re.compile(r":(?:[~/.]|[0-9]{1,5}/|[\w.~-]+/|[\w-]+\.git\b)")
# Endings of files and of systemd's units that no top-level domain has (.py, .sh and .rs are countries).
_FILE_ENDINGS = (
    "png jpg jpeg gif svg webp bmp ico tif tiff css js jsx ts tsx scss less html htm xml json yaml yml toml txt pdf "
    "csv rb pkl npz pth whl tgz java cpp hpp class jar exe dll conf cfg ini log bak tmp patch diff "
    "service socket target timer mount automount slice scope swap"
)
_NOT_DOMAINS = frozenset(_FILE_ENDINGS.split())
_NOT_MAILBOXES = frozenset(
    {"openssh.com", "libssh.org", "lysator.liu.se"}
)  # names of algorithms: aes256-gcm@openssh.com


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
    if _has_password(text, start):
        return None
    return Found(start, end, text[start:end].lower())


def _has_password(text: str, start: int) -> bool:
    """Whether this is the end of scheme://user:password@host, which is a secret and not a mailbox."""
    before = text[max(0, start - 100) : start]
    return before.endswith(":") and re.search(r"://[^\s/:@]*:\Z", before) is not None


def _spelled(text: str, opened: int, closed: int) -> Found | None:
    """The address around text[opened:closed], which is [at]."""
    end = opened - (text[opened - 1 : opened] == " ")
    start = _local_start(text, end)
    written = _SPELLED_HOST.match(text, closed)
    if written is None or start == end or not _LOCAL.match(text, start, end):
        return None
    host = _SPELLED_DOT.sub(".", written[1])
    return (
        Found(start, written.end(), f"{text[start:end]}@{host}".lower()) if _DOMAIN.fullmatch(host) else None
    )
