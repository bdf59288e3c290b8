"""The `pii` step: finds personal data and secrets, and replaces them by placeholders. A placeholder depends on the
value and its document, or on the value and a key, never on other documents, so any number of workers writes the same
text. Values are stored nowhere else.

Keys, tokens and passwords are found here: by the marks that services give them (AKIA..., ghp_...), or by the name that
they are assigned to. A value after `api_key =` must look random: letters and digits mixed, many distinct characters of
alternating kinds.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from bessemer.data.curate.filters.pii_contacts import emails, ip_addresses, phones
from bessemer.data.curate.filters.pii_numbers import (
    DigitRun,
    PiiCandidate,
    credit_cards,
    ibans,
    number_runs,
    social_security,
)
from bessemer.data.curate.step import Drop, Outcome, PerDocumentStep
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import PiiKind, PiiSpec

_W = "[A-Za-z0-9_-]"
# Tokens by the character that ends their mark: searching for one character is ten times faster than for all marks.
_UNDERSCORE = (
    (r"gh[pousr]_", r"[A-Za-z0-9]{36,251}"),  # GitHub
    (r"github_pat_", r"[A-Za-z0-9_]{50,251}"),
    (r"[sr]k_", r"(?:live|test)_[A-Za-z0-9]{16,250}"),  # Stripe
    (r"whsec_", r"[A-Za-z0-9+/]{24,100}"),
    (r"hf_", r"[A-Za-z0-9]{30,60}"),  # Hugging Face
    (r"npm_", r"[A-Za-z0-9]{36}"),
    (r"do[por]_", r"v1_[a-f0-9]{64}"),  # DigitalOcean
    (r"shp(?:at|ss|ca|pa)_", r"[a-fA-F0-9]{32}"),  # Shopify
)
_HYPHEN = (
    (r"gl(?:pat|ptt|cbt)-", rf"{_W}{{20,300}}"),  # GitLab
    (r"gl(?:dt|rt)-", rf"{_W}{{20,300}}"),
    (r"xox[abeoprs]-", r"[A-Za-z0-9-]{10,250}"),  # Slack
    (r"xapp-", r"[0-9]-[A-Za-z0-9-]{10,250}"),
    (r"GOCSPX-", rf"{_W}{{20,40}}"),  # Google
    (r"sk-", rf"(?=[A-Za-z_-]{{0,300}}[0-9]){_W}{{20,300}}"),  # OpenAI, Anthropic and similar
    (r"pypi-", rf"AgE{_W}{{50,400}}"),
    (r"AGE-", r"SECRET-KEY-1[A-Z0-9]{50,70}"),
)
_LITERAL = (
    ("AKIA", r"AKIA[A-Z2-7]{16}"),  # AWS
    ("ASIA", r"ASIA[A-Z2-7]{16}"),
    ("AIza", rf"AIza{_W}{{35}}"),  # Google
    ("ya29.", rf"ya29\.{_W}{{20,400}}"),
    ("SG.", rf"SG\.{_W}{{16,32}}\.{_W}{{16,64}}"),  # SendGrid
    ("hooks.slack.com/", r"hooks\.slack\.com/services/T[A-Z0-9]{6,14}/B[A-Z0-9]{6,14}/[A-Za-z0-9]{20,32}"),
    ("eyJ", rf"eyJ{_W}{{8,4000}}\.eyJ{_W}{{8,16000}}(?:\.{_W}{{0,2000}})?"),  # a signed token (JWT)
    ("Bearer ", r"Bearer +(?=[A-Za-z._~+/=-]{0,300}[0-9])[A-Za-z0-9._~+/=-]{20,2000}"),
    ("bearer ", r"bearer +(?=[A-Za-z._~+/=-]{0,300}[0-9])[A-Za-z0-9._~+/=-]{20,2000}"),
)
_END = r"(?![A-Za-z0-9])"


def _compile_marked(sign: str, tokens: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    shapes = "|".join(f"(?<=({mark}))(?<![A-Za-z0-9_-]{mark}){rest}{_END}" for mark, rest in tokens)
    return re.compile(f"{sign}(?:{shapes})")


_MARKED = (_compile_marked("_", _UNDERSCORE), _compile_marked("-", _HYPHEN))
_TOKENS = tuple((mark, re.compile(shape + _END)) for mark, shape in _LITERAL)

_PEM_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END (?:[A-Z0-9]{1,20} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(r"""(?:(?:\\[nr]|[\s"'+,])*+[A-Za-z0-9+/=]{16,100})*+""")
_PEM_LINE = re.compile(r"[A-Za-z0-9+/]{16,}")
_LONGEST_PEM = 16_384
_LEAST_PEM = 64  # characters of key; fewer mean that the header is only mentioned

_URL_PASSWORD = re.compile(r"://[^\s/:@'\"<>]{0,64}:([^\s/:@'\"<>]{5,100})@(?=[A-Za-z0-9\[])")
_VALUE = r"""[ \t]{0,4}["'`]?([A-Za-z0-9+/_.~!$%^&*@-]{16,200}={0,2})"""
_ASSIGNED = (re.compile("=>?" + _VALUE), re.compile(":=?" + _VALUE))
_NEXT_PARAMETER = re.compile(r"&[A-Za-z_]+=")
# Read backwards from the assignment: optional spaces, a quote or bracket, then the name.
_NAME_BACKWARDS = re.compile(r"""[ \t]{0,4}["'\])]{0,2}([A-Za-z0-9_. -]{1,50})""")
_SECRET_NAME = re.compile(
    r"secret|passw(?:or)?d|passphrase|pwd|token|credential|auth(?!or)|bearer|"
    r"(?:api|access|private|encryption|client|account|master|signing|shared|app|storage|license|session)[_. -]?key|"
    r"(?:^|[_. -])key$"
)
_PUBLIC_NAME = re.compile(
    r"public|primary|foreign|sort|cache|partition|row|object|hash|digest|fingerprint|checksum|tokeni[sz]er|token_?type|"
    r"key_?id|keyword|gnupg|gpg|pgp|file|path|url|uri|endpoint|module|class|author|version|sha\d|md5|csrf_?name|_test|pattern|format"
)
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F-]+")
_PLACEHOLDER = re.compile(
    r"x{4,}|\*{3,}|\.{3,}|your|example|placeholder|changeme|insert|dummy|sample|redacted|12345678|abcdef0", re.I
)
_LEAST_BITS, _LEAST_HEX_BITS = 3.5, 3.0  # Shannon entropy per character
_BETWEEN_WORDS = re.compile(r"%[0-9A-F]{2}|[._/-]")
_WORD = re.compile(r"[A-Z][a-z]{2,}|[a-z]{3,}")
# 1 in 100 random values of 20 letters and digits exceeds the first.
_MOST_WORDED, _LEAST_VOWELS = 0.6, 0.27
_LEAST_TURNS = 0.2  # share of positions where the kind of character changes: 0.6 if random, 0.1 in words


def api_keys(text: str, runs: list[DigitRun]) -> Iterator[PiiCandidate]:
    """Secrets, possibly overlapping: marked tokens, PEM private keys, passwords in URLs, random assigned values."""
    for pattern in _MARKED:
        for match in pattern.finditer(text):
            start = match.start(match.lastindex or 0)
            if text.startswith("sk-", start) and not _looks_random(match[0]):
                continue  # sk-ssh-ed25519-cert-v01, sk-fading-circle2
            yield PiiCandidate(start, match.end(), text[start : match.end()])
    for mark, shape in _TOKENS:
        yield from _literal(text, mark, shape)
    if "PRIVATE KEY" in text:
        yield from _pem(text)
    if "://" in text:
        yield from _url_passwords(text)
    yield from _assigned_values(text)


def _literal(text: str, mark: str, shape: re.Pattern[str]) -> Iterator[PiiCandidate]:
    at = text.find(mark)
    while at >= 0:
        end = at + len(mark)
        before = text[at - 1 : at] if at else ""
        inside = before.isascii() and (before.isalnum() or before in ("_", "-"))
        if not inside and (match := shape.match(text, at)):
            yield PiiCandidate(*match.span(), match[0])
            end = match.end()
        at = text.find(mark, end)


def _pem(text: str) -> Iterator[PiiCandidate]:
    at = 0
    while begin := _PEM_BEGIN.search(text, at):
        limit = begin.end() + _LONGEST_PEM
        close = _PEM_END.search(text, begin.end(), limit)
        # Of a truncated key, take everything that can be part of it.
        rest = close or _PEM_BODY.match(text, begin.end(), limit)
        assert rest is not None, "the pattern also matches nothing"
        body, at = text[begin.end() : rest.start() if close else rest.end()], rest.end()
        signs = sum(map(len, _PEM_LINE.findall(body)))
        if signs >= max(_LEAST_PEM, len(body) // 2):
            yield PiiCandidate(begin.start(), at, text[begin.start() : at])


def _url_passwords(text: str) -> Iterator[PiiCandidate]:
    for match in _URL_PASSWORD.finditer(text):
        word = match[1].lower()
        if word[0] in "${<*[%" or _PLACEHOLDER.search(word) or word.isalpha():
            continue  # a variable, or a word for password in any language
        yield PiiCandidate(*match.span(1), match[1])


def _assigned_values(text: str) -> Iterator[PiiCandidate]:
    for match in (match for pattern in _ASSIGNED for match in pattern.finditer(text)):
        quoted = text[match.start(1) - 1] in "\"'`"
        value = _NEXT_PARAMETER.split(match[1], 1)[0].rstrip(".")
        if not quoted and (text[match.end() : match.end() + 1] in ("(", "[") or "." in value):
            continue  # an identifier of the program
        if len(value) < 16 or value.startswith("//") or not _looks_random(value):
            continue
        name = _NAME_BACKWARDS.match(text[max(0, match.start() - 60) : match.start()][::-1])
        if name is None:
            continue
        words = name[1][::-1].strip().lower()
        if _SECRET_NAME.search(words) and not _PUBLIC_NAME.search(words) and not _PLACEHOLDER.search(value):
            yield PiiCandidate(match.start(1), match.start(1) + len(value), value)


def entropy_bits(value: str) -> float:
    """The Shannon entropy of a value, per character."""
    total = len(value)
    return -sum(count / total * math.log2(count / total) for count in Counter(value).values())


def _kind(sign: str) -> int:
    return 0 if sign.islower() else 1 if sign.isupper() else 2 if sign.isdigit() else 3


def _looks_random(value: str) -> bool:
    """Letters and digits of alternating kinds, many distinct ones, and not made of words."""
    signs = _BETWEEN_WORDS.sub("", value)
    kinds = [_kind(sign) for sign in signs]
    if 2 not in kinds or not (0 in kinds or 1 in kinds):
        return False
    turns = sum(a != b for a, b in pairwise(kinds)) / len(signs)
    least = _LEAST_HEX_BITS if _HEX.fullmatch(value) else _LEAST_BITS
    return turns >= _LEAST_TURNS and not _is_worded(value, len(signs)) and entropy_bits(value) >= least


def _is_worded(value: str, letters: int) -> bool:
    """Whether a name is made of words: mostly runs of lower-case letters, with as many vowels as words have."""
    words = "".join(_WORD.findall(value)).lower()
    vowels = sum(words.count(vowel) for vowel in "aeiou")
    return len(words) > _MOST_WORDED * letters and vowels >= _LEAST_VOWELS * len(words)


Finder = Callable[..., Iterable[PiiCandidate]]  # (text, its runs of digits)
# The first kind that claims a range gets it: a card's checksum is stronger evidence than the shape of a phone number.
_FINDERS: dict[PiiKind, Finder] = {
    "api_key": api_keys,
    "email": emails,
    "iban": ibans,
    "credit_card": credit_cards,
    "ssn": social_security,
    "ip": ip_addresses,
    "phone": phones,
}
_DIGIT_KINDS = frozenset({"credit_card", "iban", "ssn", "ip", "phone"})
_HASH_BYTES = 5  # a million values share a placeholder with probability 0.4


class PiiMatch(NamedTuple):
    """text[start:end] is of this kind; `value` is its canonical form."""

    start: int
    end: int
    kind: PiiKind
    value: str


def find_pii(text: str, kinds: Sequence[PiiKind], private_ips: bool = False) -> list[PiiMatch]:
    """The personal data of these kinds, in order and without overlaps. Linear in the text."""
    runs = list(number_runs(text)) if _DIGIT_KINDS.intersection(kinds) else []
    hits: list[PiiMatch] = []
    for kind, find in _FINDERS.items():
        if kind in kinds:
            private = {"private": True} if kind == "ip" and private_ips else {}
            new = [PiiMatch(start, end, kind, value) for start, end, value in find(text, runs, **private)]
            hits = _add_matches(hits, new) if new else hits
    return hits


def _add_matches(claimed: list[PiiMatch], new: list[PiiMatch]) -> list[PiiMatch]:
    """Both in order, without matches of `new` that overlap `claimed` or each other; the longer of two wins."""
    starts = [hit.start for hit in claimed]
    accepted, last_end = [], 0
    for hit in sorted(new, key=lambda hit: (hit.start, -hit.end)):
        place = bisect_left(starts, hit.start)
        before_it = place and claimed[place - 1].end > hit.start
        after_it = place < len(claimed) and claimed[place].start < hit.end
        if not (before_it or after_it or hit.start < last_end):
            accepted.append(hit)
            last_end = hit.end
    return sorted([*claimed, *accepted])


class Pii(PerDocumentStep):
    """Redacts personal data, or drops the documents that hold it. Labels `pii_<kind>` count the matches."""

    version = 2  # since 2: IBANs in small letters, IPv4 addresses inside IPv6

    def __init__(self, spec: PiiSpec, seed: int) -> None:
        self.spec = spec
        self._key = _read_key(spec.key_env) if spec.placeholders == "hashed" and spec.action == "redact" else b""
        # The key determines the placeholders, so its hash, which does not reveal it, belongs to the cache key.
        self.identity = self._hash("") if self._key else ""

    def outcome(self, document: Document) -> Outcome:
        hits = find_pii(document.text, self.spec.kinds, self.spec.private_ips)
        if not hits:
            return None
        for kind in self.spec.kinds:
            if count := sum(hit.kind == kind for hit in hits):
                document.labels[f"pii_{kind}"] = count
        if self.spec.action == "drop":
            return Drop("personal data", len(hits))
        if self.spec.drop_above is not None and len(hits) > self.spec.drop_above:
            return Drop("too much personal data", len(hits))
        return self._redacted(document.text, hits)

    def _redacted(self, text: str, hits: Sequence[PiiMatch]) -> str:
        numbers: dict[str, dict[str, int]] = {}
        pieces: list[str] = []
        at = 0
        for hit in hits:
            name = hit.kind.upper()
            if self.spec.placeholders == "numbered":
                kind_numbers = numbers.setdefault(hit.kind, {})
                name += f"_{kind_numbers.setdefault(hit.value, len(kind_numbers) + 1)}"
            elif self.spec.placeholders == "hashed":
                name += f"_{self._hash(hit.value)}"
            pieces += [text[at : hit.start], self.spec.form.replace("{}", name)]
            at = hit.end
        return "".join([*pieces, text[at:]])

    def _hash(self, value: str) -> str:
        return hashlib.blake2b(value.encode(), key=self._key, digest_size=_HASH_BYTES).hexdigest()


def _read_key(variable: str) -> bytes:
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(
            f"pii: placeholders: hashed needs a key in the environment variable {variable}, which is not set; "
            f"set it to any secret text and keep it, or write placeholders: numbered"
        )
    return hashlib.blake2b(key.encode()).digest()
