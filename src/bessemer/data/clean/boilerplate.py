"""Lines that belong to a web page's frame and not to its text: notices, buttons, copyright lines, menus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bessemer.data.document import Document
from bessemer.data.step import Drop, Outcome
from bessemer.spec.clean.text import BoilerplateSpec

# Phrases, in lower case, that a short line of a page's frame contains.
PHRASES = (
    "accept all cookies",
    "accept cookies",
    "we use cookies",
    "this site uses cookies",
    "this website uses cookies",
    "cookie policy",
    "cookie settings",
    "privacy policy",
    "terms of use",
    "terms of service",
    "terms and conditions",
    "all rights reserved",
    "share on facebook",
    "share on twitter",
    "share on linkedin",
    "share on whatsapp",
    "share this article",
    "share this page",
    "share this post",
    "tweet this",
    "pin it on pinterest",
    "follow us on",
    "like us on",
    "sign up for our newsletter",
    "subscribe to our newsletter",
    "subscribe to our mailing list",
    "enter your email address",
    "click here to",
    "skip to main content",
    "skip to content",
    "skip to navigation",
    "jump to navigation",
    "toggle navigation",
    "back to top",
    "read more »",
    "leave a comment",
    "leave a reply",
    "log in to comment",
    "powered by wordpress",
    "please enable javascript",
    "javascript is disabled",
    "your browser does not support",
    "add to cart",
    "forgot your password",
)
# Entries of a site's menu, as a line of their own or between bars.
_MENU = """
home | about | about us | contact | contact us | blog | news | events | shop | store | cart | checkout | search
| menu | close | login | log in | logout | log out | sign in | sign up | sign out | register | join | subscribe
| my account | account | profile | help | support | faq | faqs | careers | jobs | press | media | gallery
| downloads | products | services | solutions | pricing | resources | documentation | team | our team | partners
| sitemap | site map | privacy | terms | legal | imprint | cookies | archive | archives | categories | tags | links
| forum | forums | community | share | tweet | email | print | previous | next | facebook | twitter | instagram
| linkedin | youtube | pinterest | rss | donate | newsletter | advertise | feedback | accessibility | read more
| learn more | more
"""
MENU = frozenset(entry.strip() for entry in _MENU.split("|"))
_BARS = re.compile(r"\s*[|•·›»]\s*")
_BULLETS = " \t•*-–·|›»>"


class Boilerplate:
    """Drops lines; a document of nothing else goes."""

    version = 1

    def __init__(self, spec: BoilerplateSpec, seed: int) -> None:
        self._spec = spec
        self._phrases = [*(PHRASES if spec.builtin else ()), *(phrase.lower() for phrase in spec.phrases)]
        self._patterns = [re.compile(pattern) for pattern in spec.patterns]

    def apply(self, documents: Sequence[Document]) -> list[Outcome]:
        return [self._outcome(document.text) for document in documents]

    def _outcome(self, text: str) -> Outcome:
        lower = text.lower()
        phrases = [phrase for phrase in self._phrases if phrase in lower]
        lines = text.split("\n")
        menu = set(_menu_lines(lines, self._spec.menu_lines)) if self._spec.menu_lines else set()
        if not phrases and not menu and not self._patterns:
            return None
        kept = [line for i, line in enumerate(lines) if i not in menu and not self._is_frame(line, phrases)]
        if len(kept) == len(lines):
            return None
        cleaned = "\n".join(kept)
        return cleaned if cleaned and not cleaned.isspace() else Drop("nothing but boilerplate")

    def _is_frame(self, line: str, phrases: Sequence[str]) -> bool:
        if any(pattern.search(line) for pattern in self._patterns):
            return True
        lower = line.lower()
        return any(phrase in lower for phrase in phrases) and len(line.split()) <= self._spec.max_words


def _menu_lines(lines: Sequence[str], least: int) -> Iterator[int]:
    """Lines that are a menu between bars, and runs of at least `least` lines that are an entry each; empty lines do
    not break a run."""
    run: list[int] = []
    for i, line in enumerate(lines):
        if len(line) > 300:  # no entry and no menu, and not worth lower-casing
            entry = "-"
        else:
            entry = line.strip(_BULLETS).lower()
            entries = _BARS.split(entry)
            if len(entries) > 2 and 2 * sum(part in MENU for part in entries) >= len(entries):
                yield i
                continue
        if entry in MENU:
            run.append(i)
        elif entry:
            if len(run) >= least:
                yield from run
            run = []
    if len(run) >= least:
        yield from run
