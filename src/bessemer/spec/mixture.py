"""Data mixtures: target shares by domain for `mix: auto`, and the quantisation of weights to counts per block.

Llama 3 (2024, section 3.1.2) reports about 50 % general knowledge, 25 % mathematics and reasoning, 17 % code and 8 %
multilingual text. It does not state the shares inside a group; those here are our choice, based on LLaMA (2023, table
1: of the general text 88 % web, 5 % books, 5 % Wikipedia, 2 % StackExchange) and on scarcity: a small source that is
repeated reaches its epoch cap long before a large share could hurt. If you know a better mixture, write weights.

The user writes weights; the stream follows counts per block. The planner quantises once and prints the realised shares;
`bessemer.data.stream.order` deals sequences from the counts, in integer arithmetic only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.spec.data import Domain, SourceSpec

LLAMA_3 = "Llama 3 2024, data mix; shares inside a group are our choice"


@dataclass(frozen=True)
class DomainGroup:
    """Interchangeable domains: the share of the group goes to those that are present."""

    name: str
    share: float  # published
    inside: dict[Domain, float]  # ours


# `other` counts as web: unlabelled text is mostly plain prose.
GROUPS = (
    DomainGroup(
        "general knowledge", 0.50, {"web": 0.80, "books": 0.08, "reference": 0.06, "dialogue": 0.03, "news": 0.03}
    ),
    DomainGroup("mathematics and reasoning", 0.25, {"math": 0.60, "science": 0.40}),
    DomainGroup("code", 0.17, {"code": 1.0}),
    DomainGroup("multilingual", 0.08, {"multilingual": 1.0}),
)


def target_shares(present: Collection[Domain]) -> dict[Domain, float]:
    """The share of each present domain; they sum to 1. `other` counts as `web`."""
    domains = {pool_domain(domain) for domain in present}
    groups = [
        (group.share, {domain: inside for domain, inside in group.inside.items() if domain in domains})
        for group in GROUPS
    ]
    total = sum(share for share, members in groups if members)
    return {
        domain: share / total * inside / sum(members.values())
        for share, members in groups
        for domain, inside in members.items()
    }


def pool_domain(domain: Domain) -> Domain:
    """The domain whose share a source uses: `other` counts as `web`."""
    return "web" if domain == "other" else domain


# Names of corpora, or words for their content. The longest match decides: `openwebmath` is mathematics, not web, and
# `stackexchange` is dialogue, not code.
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
_MAX_JOINED = 3  # words that are matched together: open-web-math, stack_exchange, cc news


def domain_of(name: str, source: SourceSpec, formats: Collection[str] = ()) -> tuple[Domain, str]:
    """(domain, reason) of a source, from the spec, its name, its paths or its format; else `other`.

    `formats` are the formats of its files, if they have been listed; they matter with `format: auto`.
    """
    if source.domain is not None:
        return source.domain, "written in the spec"
    if match := _match_domain(_words_of(name)):
        return match[0], f"its name contains {match[1]!r}"
    if source.is_chat:
        return "dialogue", f"its documents are conversations ({source.messages_field or 'prompt and answers'})"
    for path in source.path:
        if match := _match_domain(_words_of(path)):
            return match[0], f"its path contains {match[1]!r}"
    kinds = {*formats} or {source.format}
    if kinds == {"source"}:
        return "code", "its files are source code"
    if kinds & {"warc", "html"}:
        return "web", "its files are web pages"
    return "other", "neither name, path nor format shows its domain: set domain; counted as web"


def _words_of(text: str) -> list[str]:
    """The words of a name or path, split at punctuation and between lower and upper case."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return re.findall(r"[a-z]+[0-9]*[a-z]*|[0-9]+", spaced.lower())


def _match_domain(words: list[str]) -> tuple[Domain, str] | None:
    """The longest known word and its domain; of equal lengths the later one, because the end of a path says most."""
    best: tuple[Domain, str] | None = None
    for word in _joined_words(words):
        domain = _DOMAIN_OF_WORD.get(word)
        if domain is not None and (best is None or len(word) >= len(best[1])):
            best = domain, word
    return best


def _joined_words(words: list[str]) -> Iterable[str]:
    for start in range(len(words)):
        for stop in range(start + 1, min(start + _MAX_JOINED, len(words)) + 1):
            yield "".join(words[start:stop])


MAX_BLOCK = 65_536
TOLERANCE = Fraction(1, 100)


@dataclass(frozen=True)
class Mixture:
    """In each block of `block` sequences, source `names[k]` has exactly `counts[k]`."""

    names: tuple[str, ...]
    counts: tuple[int, ...]
    block: int

    def __post_init__(self) -> None:
        if len(self.names) != len(self.counts) or len(set(self.names)) != len(self.names):
            raise ValueError(f"a mixture needs one count per distinct name: {self.names}, {self.counts}")
        if min(self.counts, default=0) < 1 or sum(self.counts) != self.block or self.block > MAX_BLOCK:
            raise ValueError(f"counts {self.counts} must be 1 or more and add up to the block, {self.block}")

    @property
    def shares(self) -> dict[str, float]:
        """The realised share of each source, exact over a block."""
        return {name: count / self.block for name, count in zip(self.names, self.counts, strict=True)}


def quantise(weights: Mapping[str, float]) -> Mixture:
    """The smallest power-of-two block in which every share is within 1 % (relative) of its weight's.

    Weights need not add up to 1. A source too small for the largest block still gets one sequence in it. The
    counts do not depend on the order of the weights, so reordering a spec never changes the stream.
    """
    exact = _exact(weights)
    total = sum(exact.values(), Fraction())
    block = 1
    while block < len(exact):
        block *= 2
    counts = _apportion(exact, block)
    while block < MAX_BLOCK and not _close(exact, total, counts, block):
        block *= 2
        counts = _apportion(exact, block)
    return Mixture(tuple(exact), tuple(counts[name] for name in exact), block)


def apportion(counts: Mapping[str, int], total: int, limits: Mapping[str, int]) -> dict[str, int]:
    """Divide `total` sequences in proportion to `counts` by largest remainder, none above its limit; without zeros.

    What a limited source cannot take goes to the others; the sum is smaller only if all are limited.
    """
    dealt = dict.fromkeys(counts, 0)
    free = {name: count for name, count in counts.items() if limits.get(name, 1) > 0}
    left = total
    while left and free:
        free_total = sum(free.values())
        quotas = {name: Fraction(left * count, free_total) for name, count in free.items()}
        full = {name for name in free if name in limits and dealt[name] + quotas[name] >= limits[name]}
        if full:  # these get their limit, and the rest is divided again
            for name in full:
                left -= limits[name] - dealt[name]
                dealt[name] = limits[name]
                del free[name]
            continue
        for name, quota in quotas.items():
            dealt[name] += math.floor(quota)
        by_remainder = sorted(free, key=lambda name: (math.floor(quotas[name]) - quotas[name], name))
        for name in by_remainder[: left - sum(math.floor(quota) for quota in quotas.values())]:
            dealt[name] += 1  # within the limit, which is an integer above the quota
        left = 0
    return {name: count for name, count in dealt.items() if count}


def _exact(weights: Mapping[str, float]) -> dict[str, Fraction]:
    if not weights:
        raise UserError("the mixture has no sources: add a source with a positive weight")
    if len(weights) > MAX_BLOCK:
        raise UserError(f"the mixture has {len(weights):,} sources: merge them to at most {MAX_BLOCK:,}")
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight <= 0:
            raise UserError(f"mixture weight of {name!r} is {weight}: write a positive number or remove it")
    return {name: Fraction(weight) for name, weight in weights.items()}


def _apportion(exact: dict[str, Fraction], block: int) -> dict[str, int]:
    """Largest remainder with at least one each; raising the smallest to one scales the others down."""
    counts: dict[str, int] = {}
    rest = dict(exact)
    while rest:
        unit = (block - len(counts)) / sum(rest.values())
        small = [name for name, weight in rest.items() if weight * unit < 1]
        if not small:
            break
        for name in small:
            counts[name] = 1
            del rest[name]
    quotas = {name: weight * unit for name, weight in rest.items()}
    counts |= {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(rest, key=lambda name: (math.floor(quotas[name]) - quotas[name], name))
    for name in by_remainder[: block - sum(counts.values())]:
        counts[name] += 1
    return counts


def _close(exact: dict[str, Fraction], total: Fraction, counts: dict[str, int], block: int) -> bool:
    return all(
        abs(Fraction(counts[name], block) - weight / total) <= TOLERANCE * weight / total
        for name, weight in exact.items()
    )
