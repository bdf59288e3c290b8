"""What kind of text a source holds, and how much of each kind a general model is trained on: `mix: auto` in numbers.

Published are the shares of the groups: Llama 3 (2024, section 3.1.2) reports roughly 50 % general knowledge, 25 %
mathematics and reasoning, 17 % code and 8 % multilingual. It does not say how a group divides, so the shares inside a
group are our choice. They lean on LLaMA (2023, table 1), where of the general text 88 % is web (CommonCrawl 67 and
C4 15), 5 % books, 5 % Wikipedia and 2 % StackExchange, and on what is scarce: a small source that is repeated hits its
epoch cap long before a large share could hurt. No mixture is right for all, and who knows theirs writes weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bessemer.spec.data import Domain, SourceSpec

LLAMA_3 = "Llama 3 2024, data mix; shares inside a group are our choice"


@dataclass(frozen=True)
class Group:
    """Domains that stand in for each other: the group's share goes to those of them that are there."""

    name: str
    share: float  # published
    inside: dict[Domain, float]  # ours


# `other` is dealt with as web, its tokens together with the web's: text that nothing marks is mostly plain prose.
GROUPS = (
    Group("general knowledge", 0.50, {"web": 0.80, "books": 0.08, "reference": 0.06, "dialogue": 0.03, "news": 0.03}),
    Group("mathematics and reasoning", 0.25, {"math": 0.60, "science": 0.40}),
    Group("code", 0.17, {"code": 1.0}),
    Group("multilingual", 0.08, {"multilingual": 1.0}),
)


def target_shares(present: Collection[Domain]) -> dict[Domain, float]:
    """The share of each domain that is there; they add up to 1. `other` is not told apart from `web`."""
    wanted = {pooled(domain) for domain in present}
    groups = [
        (group.share, {domain: inside for domain, inside in group.inside.items() if domain in wanted})
        for group in GROUPS
    ]
    total = sum(share for share, here in groups if here)
    return {
        domain: share / total * inside / sum(here.values()) for share, here in groups for domain, inside in here.items()
    }


def pooled(domain: Domain) -> Domain:
    """The domain whose share a source draws on."""
    return "web" if domain == "other" else domain


# Names that a corpus is known by, or plain words for what it holds. The longest one found in a name decides, so
# `openwebmath` is mathematics and not web, and `stackexchange` is dialogue and not code.
_WORDS: dict[Domain, str] = {
    "web": "web commoncrawl crawl c4 fineweb refinedweb dclm redpajama slimpajama openwebtext webtext clueweb txt360",
    "code": "code coding source src github gitlab git stack starcoder starcoderdata codeparrot stackedu commits "
    "notebooks jupyter python java javascript typescript rust golang kotlin swift cpp",
    "math": "math maths mathematics openwebmath finemath infimath megamath proofpile algebraic algebra arithmetic "
    "theorems lean gsm8k numina",
    "science": "science scientific arxiv pubmed pmc pes2o s2orc papers medicine medical biology chemistry physics "
    "patents uspto semanticscholar biorxiv medrxiv",
    "books": "book books gutenberg bookcorpus novels fiction textbooks cosmopedia",
    "reference": "wiki wikipedia wikibooks wikisource wiktionary encyclopedia encyclopaedia reference dictionary "
    "docs documentation manuals",
    "dialogue": "dialogue dialog dialogues chat chats conversation conversations messages forum forums reddit "
    "stackexchange stackoverflow hackernews irc subtitles opensubtitles sharegpt ultrachat oasst openassistant qa",
    "news": "news ccnews realnews newspapers newswire gigaword journalism",
    "multilingual": "multilingual languages fineweb2 mc4 cc100 oscar culturax hplt madlad europarl german french "
    "spanish italian portuguese dutch polish russian ukrainian turkish arabic hebrew persian hindi bengali chinese "
    "japanese korean vietnamese thai indonesian swedish czech greek romanian hungarian finnish danish norwegian",
}
_DOMAIN_OF_WORD: dict[str, Domain] = {word: domain for domain, words in _WORDS.items() for word in words.split()}
_LONGEST_JOIN = 3  # words of a name that are tried together: open-web-math, stack_exchange, cc news


def domain_of(name: str, source: SourceSpec, formats: Collection[str] = ()) -> tuple[Domain, str]:
    """(domain, why) of a source: what the spec says, else its name, its paths, its format; `other` if none tells.

    `formats` are those of its files, where they have been listed; they matter when the spec says `format: auto`.
    """
    if source.domain is not None:
        return source.domain, "written in the spec"
    if found := _find(_pieces(name)):
        return found[0], f"its name has {found[1]!r}"
    if source.messages_field is not None:
        return "dialogue", f"its documents are conversations ({source.messages_field})"
    for path in source.path:
        if found := _find(_pieces(path)):
            return found[0], f"its path has {found[1]!r}"
    kinds = {*formats} or {source.format}
    if kinds == {"source"}:
        return "code", "its files are source code"
    if kinds & {"warc", "html"}:
        return "web", "its files are web pages"
    return "other", "neither name, path nor format tells what it holds: set domain; counted with the web"


def _pieces(text: str) -> list[str]:
    """The words of a name or path: cut at punctuation and between a small and a capital letter."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return re.findall(r"[a-z]+[0-9]*[a-z]*|[0-9]+", spaced.lower())


def _find(pieces: list[str]) -> tuple[Domain, str] | None:
    """The longest known word; the later of two of one length, as the last part of a path says most."""
    best: tuple[Domain, str] | None = None
    for word in _joined(pieces):
        domain = _DOMAIN_OF_WORD.get(word)
        if domain is not None and (best is None or len(word) >= len(best[1])):
            best = domain, word
    return best


def _joined(pieces: list[str]) -> Iterable[str]:
    for start in range(len(pieces)):
        for stop in range(start + 1, min(start + _LONGEST_JOIN, len(pieces)) + 1):
            yield "".join(pieces[start:stop])
