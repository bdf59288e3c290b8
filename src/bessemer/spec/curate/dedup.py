"""Settings of the steps for deduplication and decontamination.

Settings of the steps for personal data, block lists and opt-outs.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from bessemer.spec.curate.step import StepSpec, setting
from bessemer.spec.curate.text import Pattern
from bessemer.spec.quantity import Paths, Share, ShortSection, shown

Keep = Literal["first", "longest"]
Unit = Literal["word", "char"]
MINHASH_PRESETS: dict[str, tuple[Unit, int, int, int]] = {  # unit, ngram, bands, rows
    "fineweb": ("word", 5, 14, 8),
    "curator": ("char", 24, 20, 13),
}
TRACKING = ["utm_*", "fbclid", "gclid", "dclid", "msclkid", "yclid", "igshid", "mc_cid", "mc_eid", "_ga"]


def _keep() -> Any:
    return setting("first", "of duplicates, the first or the longest stays", "longest")


def _left() -> Any:
    return setting(100, "a document goes when cutting leaves it fewer characters", 200, ge=0)


class DedupUrlSpec(StepSpec, step="dedup_url"):
    """Of documents from one address, one stays. Documents without a URL stay."""

    keep: Keep = _keep()
    tracking: list[str] = setting(
        TRACKING, "query parameters that are no part of the address; * at the end is any ending", ["utm_*", "fbclid"]
    )
    ignore_query: bool = setting(False, "the whole query is no part of it", True)


class DedupExactSpec(StepSpec, step="dedup_exact"):
    """Of documents with the same text, one stays."""

    keep: Keep = _keep()
    ignore_case: bool = setting(False, "upper and lower case are the same", True)
    ignore_whitespace: bool = setting(True, "any white space is one space; none at the ends", True)
    ignore_punctuation: bool = setting(False, "punctuation and symbols do not count", True)


class DedupMinhashSpec(StepSpec, step="dedup_minhash"):
    """Of near-duplicates, one stays: MinHash signatures, and buckets that similar documents share (LSH).

    Two documents whose n-grams overlap by s (Jaccard) are found with probability 1 - (1 - s^rows)^bands.
    """

    preset: Literal["fineweb", "curator", "none"] = setting(
        "fineweb", "fineweb: 5 words, 14 x 8; curator: 24 characters, 20 x 13; none: all given here", "curator"
    )
    unit: Unit | None = setting(None, "n-grams of words or of characters", "word")
    ngram: int | None = setting(None, "units in an n-gram", 5, ge=1, le=256)
    bands: int | None = setting(None, "buckets for each document", 14, ge=1, le=512)
    rows: int | None = setting(None, "hashes that make a bucket", 8, ge=1, le=512)
    seed: int = setting(1, "of the hash functions", 1, ge=0, lt=2**32)
    verify: float | None = setting(
        None, "least overlap, estimated from all hashes, for a bucket's documents to be duplicates", 0.7, gt=0, le=1
    )
    keep: Keep = _keep()

    @model_validator(mode="after")
    def _complete(self) -> DedupMinhashSpec:
        missing = [key for key in ("unit", "ngram", "bands", "rows") if getattr(self, key) is None]
        if self.preset == "none" and missing:
            raise ValueError(f"preset none needs {', '.join(missing)} as well")
        return self

    @property
    def numbers(self) -> tuple[Unit, int, int, int]:
        """Unit, ngram, bands and rows: what is written here, and the preset for the rest."""
        unit, ngram, bands, rows = MINHASH_PRESETS.get(self.preset, ("word", 0, 0, 0))
        return self.unit or unit, self.ngram or ngram, self.bands or bands, self.rows or rows


class DedupSimhashSpec(StepSpec, step="dedup_simhash"):
    """Of documents whose 64-bit SimHash differs in few bits, one stays."""

    unit: Unit = setting("word", "n-grams of words or of characters", "word")
    ngram: int = setting(3, "units in an n-gram; each counts as often as it occurs", 3, ge=1, le=256)
    distance: int = setting(3, "bits that may differ; all pairs within it are found", 3, ge=0, le=7)
    keep: Keep = _keep()


class DedupParagraphsSpec(StepSpec, step="dedup_paragraphs"):
    """Paragraphs that stood in the corpus before are cut out."""

    unit: Literal["paragraph", "line"] = setting("paragraph", "paragraph (parted by empty lines) or line", "line")
    min_chars: int = setting(50, "shorter ones are left alone", 50, ge=1)
    min_count: int = setting(2, "how often one must occur to be cut", 3, ge=2)
    ignore_case: bool = setting(True, "upper and lower case are the same", True)
    ignore_whitespace: bool = setting(True, "any white space is one space; none at the ends", True)
    ignore_punctuation: bool = setting(False, "punctuation and symbols do not count", True)
    min_left_chars: int = _left()


class DedupSubstringsSpec(StepSpec, step="dedup_substrings"):
    """Passages that stood in the corpus before, byte for byte, are cut out, wherever they begin.

    The published threshold is 50 tokens; with some 4 bytes a token, 200 bytes.
    """

    min_bytes: int = setting(200, "bytes of UTF-8 that make a repeat", 200, ge=2, le=16384)
    min_left_chars: int = _left()


class EvaluationSetSpec(ShortSection):
    """An evaluation set: JSONL (an item a line) or text files (an item a line). `PATH` is short for `{path: PATH}`."""

    path: Paths = setting(..., "files, folders or globs", "evals/arc/*.jsonl")
    fields: list[str] = setting(
        [], "JSON fields that make an item, in order; all strings in it if not given", ["question", "answer"]
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, (str, list)) else value


class DecontaminateSpec(StepSpec, step="decontaminate"):
    """Documents that hold text of an evaluation set go, or lose it, or are only reported."""

    sets: dict[str, EvaluationSetSpec] = setting(
        ..., "evaluation sets by name", {"arc": "evals/arc.jsonl"}, min_length=1
    )
    ngram: int = setting(13, "words that must match: 13 as for GPT-3, 12 as for FineWeb", 12, ge=2, le=64)
    action: Literal["drop", "cut", "report"] = setting(
        "drop", "drop the document, cut what matches, or only report", "cut"
    )
    max_matches: int = setting(0, "matching n-grams that a document may have", 2, ge=0)
    max_share: Share = setting(0.0, "share of a document's words that may match, too", "1%")
    max_items: int | None = setting(
        None, "n-grams in more evaluation items than this are boilerplate and do not count", 10, ge=1
    )
    margin_chars: int = setting(0, "what else is cut on both sides; 200 for GPT-3", 200, ge=0)
    min_left_chars: int = _left()


PiiKind = Literal["email", "phone", "ssn", "credit_card", "iban", "ip", "api_key"]
ALL_KINDS: tuple[PiiKind, ...] = ("email", "phone", "ssn", "credit_card", "iban", "ip", "api_key")
# Crawlers that gather text to train models on, as they call themselves in robots.txt.
TRAINING_AGENTS = (
    "GPTBot", "CCBot", "Google-Extended", "ClaudeBot", "anthropic-ai", "Applebot-Extended", "Bytespider",
    "meta-externalagent", "FacebookBot", "cohere-training-data-crawler", "cohere-ai", "AI2Bot", "Diffbot",
    "omgili", "PanguBot", "img2dataset",
)  # fmt: skip


class PiiSpec(StepSpec, step="pii"):
    """Personal data and secrets are replaced by placeholders, or the documents that hold them go.

    Labels such as `pii_email` count what was found; the values themselves are written nowhere.
    """

    kinds: list[PiiKind] = setting(
        list(ALL_KINDS), "what to look for: " + ", ".join(ALL_KINDS), ["email", "ip"], min_length=1
    )
    action: Literal["redact", "drop"] = setting(
        "redact", "redact: placeholders take their place; drop: the document goes", "redact"
    )
    drop_above: int | None = setting(None, "with redact: a document with more finds than this goes", 100, ge=0)
    placeholders: Literal["plain", "numbered", "hashed"] = setting(
        "plain",
        "plain: <EMAIL>; numbered: <EMAIL_1> by first occurrence in the document; hashed: "
        "<EMAIL_3f9c2a71d0>, one for each value of the whole corpus",
        "numbered",
    )
    form: str = setting("<{}>", "how a placeholder is written; {} is its name", "[{}]")
    key_env: str = setting(
        "BESSEMER_PII_KEY",
        "environment variable with the key of hashed placeholders",
        "BESSEMER_PII_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    private_ips: bool = setting(False, "also private, local and documentation addresses (192.168.0.1, ::1)", False)

    @field_validator("form")
    @classmethod
    def _one_name(cls, value: str) -> str:
        if value.count("{}") != 1 or value.strip() == "{}":
            raise ValueError(f"expected signs around one {{}}, such as <{{}}>, got {shown(value)}")
        return value

    @field_validator("kinds")
    @classmethod
    def _once(cls, value: list[PiiKind]) -> list[PiiKind]:
        if len(set(value)) != len(value):
            raise ValueError("every kind once")
        return value


class BlockUrlsSpec(StepSpec, step="block_urls"):
    """Documents from listed addresses go. Documents without a URL stay."""

    domains: list[str] = setting([], "domains; their subdomains too", ["spam.example", "ads.example.org"])
    urls: list[str] = setting([], "addresses; everything below them too", ["example.com/~spammer"])
    lists: Paths = setting(
        [],
        "files with a domain or an address a line (plain or hosts format, may be .gz), or folders of them "
        "named domains, urls and expressions, as in the UT1 collection",
        "blacklists/adult",
    )
    patterns: list[Pattern] = setting(
        [], "regular expressions, searched in the whole address", [r"/tag/\w+/page/\d{3}"]
    )
    words: list[str] = setting([], "words of an address, one of which is enough", ["casino", "torrent"])
    soft_words: list[str] = setting([], "words of which several have to occur", ["cheap", "pills"])
    soft_hits: int = setting(2, "how many different soft words", 2, ge=1)
    word_lists: Paths = setting([], "files with more `words`, one a line", "words.txt")
    soft_word_lists: Paths = setting([], "files with more `soft_words`, one a line", "soft_words.txt")
    allow: list[str] = setting([], "domains or addresses that are kept whatever else says", ["docs.example.com"])

    @model_validator(mode="after")
    def _some(self) -> BlockUrlsSpec:
        given = (self.domains, self.urls, self.lists, self.patterns, self.words, self.soft_words)
        if not any((*given, self.word_lists, self.soft_word_lists)):
            raise ValueError("nothing to block; give domains, urls, lists, patterns or words")
        return self


class OptOutSpec(StepSpec, step="opt_out"):
    """Documents whose owners do not want them trained on go."""

    domains: list[str] = setting([], "domains that opted out; their subdomains too", ["example.com"])
    lists: Paths = setting([], "files of such domains or addresses, as in block_urls", "optout.txt")
    robots: Paths = setting(
        [], "folders with HOST/robots.txt and HOST/ai.txt, or HOST.robots.txt and HOST.ai.txt", "robots/"
    )
    agents: list[str] = setting(
        list(TRAINING_AGENTS),
        "crawlers of robots.txt; one that may not fetch the page is enough",
        ["GPTBot", "CCBot", "Google-Extended"],
        min_length=1,
    )
    all_agents: bool = setting(
        False, "also take the rules for * where an agent has none of its own, as a crawler would", False
    )
    signals: bool = setting(True, "heed Content-Signal: ai-train=no and Content-Usage: train-ai=n of robots.txt", True)
    hashes: Paths = setting([], "files with the SHA-256 of texts that opted out, in hex, one a line", "hashes.txt")
    ids: Paths = setting([], "files with the ids of documents that opted out, one a line", "ids.txt")

    @model_validator(mode="after")
    def _some(self) -> OptOutSpec:
        if not any((self.domains, self.lists, self.robots, self.hashes, self.ids)):
            raise ValueError("nobody opted out; give domains, lists, robots, hashes or ids")
        return self
