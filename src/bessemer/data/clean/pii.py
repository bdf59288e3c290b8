"""The `pii` step: finds personal data and secrets, and puts placeholders in their place. A placeholder depends on the
value and its document alone, or on the value and a key: never on what was seen before, so any number of workers
writes the same text. Values go nowhere but into the text that they came from."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bessemer.data.clean.each_document import EachDocument
from bessemer.data.clean.pii_addresses import emails, ip_addresses
from bessemer.data.clean.pii_numbers import Found, credit_cards, ibans, number_runs, social_security
from bessemer.data.clean.pii_phone import phones
from bessemer.data.clean.pii_secrets import api_keys
from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.errors import UserError
from bessemer.spec.clean.privacy import PiiKind, PiiSpec

Finder = Callable[..., Iterable[Found]]  # of the text and its runs of digits
# Where two kinds claim the same signs the first one has them: the check of a card says more than the shape of a phone.
_FINDERS: dict[PiiKind, Finder] = {
    "api_key": api_keys,
    "email": emails,
    "iban": ibans,
    "credit_card": credit_cards,
    "ssn": social_security,
    "ip": ip_addresses,
    "phone": phones,
}
_OF_DIGITS = frozenset({"credit_card", "iban", "ssn", "ip", "phone"})
_HASH_BYTES = 5  # a million values share a placeholder with probability 0.4


class Hit(NamedTuple):
    """text[start:end] is of this kind; `value` is one writing of it."""

    start: int
    end: int
    kind: PiiKind
    value: str


def find_pii(text: str, kinds: Sequence[PiiKind], private_ips: bool = False) -> list[Hit]:
    """What the text holds of these kinds, in order and without overlaps. Linear in the text."""
    runs = list(number_runs(text)) if _OF_DIGITS.intersection(kinds) else []
    hits: list[Hit] = []
    for kind, find in _FINDERS.items():
        if kind in kinds:
            private = {"private": True} if kind == "ip" and private_ips else {}
            new = [Hit(one.start, one.end, kind, one.value) for one in find(text, runs, **private)]
            hits = _joined(hits, new) if new else hits
    return hits


def _joined(claimed: list[Hit], new: list[Hit]) -> list[Hit]:
    """Both in order, without those of `new` that overlap what is claimed or one another; of two, the longer."""
    starts = [hit.start for hit in claimed]
    taken, last_end = [], 0
    for hit in sorted(new, key=lambda hit: (hit.start, -hit.end)):
        place = bisect_left(starts, hit.start)
        before_it = place and claimed[place - 1].end > hit.start
        after_it = place < len(claimed) and claimed[place].start < hit.end
        if not (before_it or after_it or hit.start < last_end):
            taken.append(hit)
            last_end = hit.end
    return sorted([*claimed, *taken])


class Pii(EachDocument):
    """Redacts personal data, or drops the documents that hold it. Labels `pii_<kind>` count what was found."""

    version = 2  # since 2: IBANs in small letters, IPv4 addresses inside IPv6

    def __init__(self, spec: PiiSpec, seed: int) -> None:
        self.spec = spec
        self._key = _key(spec.key_env) if spec.placeholders == "hashed" and spec.action == "redact" else b""
        # Another key gives other placeholders, so it belongs to the cache's key; it cannot be found from this.
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

    def _redacted(self, text: str, hits: Sequence[Hit]) -> str:
        numbers: dict[str, dict[str, int]] = {}
        pieces: list[str] = []
        at = 0
        for hit in hits:
            name = hit.kind.upper()
            if self.spec.placeholders == "numbered":
                known = numbers.setdefault(hit.kind, {})
                name += f"_{known.setdefault(hit.value, len(known) + 1)}"
            elif self.spec.placeholders == "hashed":
                name += f"_{self._hash(hit.value)}"
            pieces += [text[at : hit.start], self.spec.form.replace("{}", name)]
            at = hit.end
        return "".join([*pieces, text[at:]])

    def _hash(self, value: str) -> str:
        return hashlib.blake2b(value.encode(), key=self._key, digest_size=_HASH_BYTES).hexdigest()


def _key(variable: str) -> bytes:
    key = os.environ.get(variable, "")
    if not key:
        raise UserError(
            f"pii: placeholders: hashed needs a key in the environment variable {variable}, which is not set; "
            f"set it to any secret text and keep it, or write placeholders: numbered"
        )
    return hashlib.blake2b(key.encode()).digest()
