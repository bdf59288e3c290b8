"""Settings of the curation steps for deduplication, decontamination, personal data, block lists and opt-outs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from bessemer.spec.quantity import Paths, Share, ShortSection, format_value, setting
from bessemer.spec.text_steps import Pattern, StepSpec

Keep = Literal["first", "longest"]
Unit = Literal["word", "char"]
MINHASH_PRESETS: dict[str, tuple[Unit, int, int, int]] = {  # unit, ngram, bands, rows
    "fineweb": ("word", 5, 14, 8),
    "curator": ("char", 24, 20, 13),
}
TRACKING = ["utm_*", "fbclid", "gclid", "dclid", "msclkid", "yclid", "igshid", "mc_cid", "mc_eid", "_ga"]


def _keep() -> Any:
    return setting("first", "which duplicate to keep: the first or the longest", "longest")


def _left() -> Any:
    return setting(100, "drop documents with fewer characters left after cutting", 200, ge=0)


class DedupUrlSpec(StepSpec, step="dedup_url"):
    """Keeps one of several documents with the same URL. Documents without a URL are kept."""

    keep: Keep = _keep()
    tracking: list[str] = setting(TRACKING, "query parameters to ignore; * matches any ending", ["utm_*", "fbclid"])
    ignore_query: bool = setting(False, "ignore the whole query", True)


class DedupExactSpec(StepSpec, step="dedup_exact"):
    """Keeps one of several documents with the same text."""

    keep: Keep = _keep()
    ignore_case: bool = setting(False, "ignore case", True)
    ignore_whitespace: bool = setting(True, "collapse white space and strip it at the ends", True)
    ignore_punctuation: bool = setting(False, "ignore punctuation and symbols", True)


class DedupMinhashSpec(StepSpec, step="dedup_minhash"):
    """Keeps one of several near-duplicates, found by MinHash signatures and locality-sensitive hashing.

    Two documents with Jaccard similarity s of their n-grams are found with probability 1 - (1 - s^rows)^bands.
    """

    preset: Literal["fineweb", "curator", "none"] = setting(
        "fineweb", "fineweb: 5 words, 14 x 8; curator: 24 characters, 20 x 13; none: set all keys", "curator"
    )
    unit: Unit | None = setting(None, "n-grams of words or of characters", "word")
    ngram: int | None = setting(None, "units in an n-gram", 5, ge=1, le=256)
    bands: int | None = setting(None, "buckets per document", 14, ge=1, le=512)
    rows: int | None = setting(None, "hashes per bucket", 8, ge=1, le=512)
    seed: int = setting(1, "seed of the hash functions", 1, ge=0, lt=2**32)
    verify: float | None = setting(None, "minimum estimated similarity of documents in one bucket", 0.7, gt=0, le=1)
    keep: Keep = _keep()

    @model_validator(mode="after")
    def _complete(self) -> DedupMinhashSpec:
        missing = [key for key in ("unit", "ngram", "bands", "rows") if getattr(self, key) is None]
        if self.preset == "none" and missing:
            raise ValueError(f"preset: none also needs {', '.join(missing)}")
        return self

    @property
    def numbers(self) -> tuple[Unit, int, int, int]:
        """Unit, ngram, bands and rows: the keys that are set, else those of the preset."""
        unit, ngram, bands, rows = MINHASH_PRESETS.get(self.preset, ("word", 0, 0, 0))
        return self.unit or unit, self.ngram or ngram, self.bands or bands, self.rows or rows


class DedupSimhashSpec(StepSpec, step="dedup_simhash"):
    """Keeps one of several documents whose 64-bit SimHashes differ in few bits."""

    unit: Unit = setting("word", "n-grams of words or of characters", "word")
    ngram: int = setting(3, "units in an n-gram, weighted by frequency", 3, ge=1, le=256)
    distance: int = setting(3, "maximum differing bits; all such pairs are found", 3, ge=0, le=7)
    keep: Keep = _keep()


class DedupParagraphsSpec(StepSpec, step="dedup_paragraphs"):
    """Removes paragraphs that occurred earlier in the corpus."""

    unit: Literal["paragraph", "line"] = setting("paragraph", "paragraph (separated by empty lines) or line", "line")
    min_chars: int = setting(50, "shorter ones are kept", 50, ge=1)
    min_count: int = setting(2, "minimum occurrences before removal", 3, ge=2)
    ignore_case: bool = setting(True, "ignore case", True)
    ignore_whitespace: bool = setting(True, "collapse white space and strip it at the ends", True)
    ignore_punctuation: bool = setting(False, "ignore punctuation and symbols", True)
    min_left_chars: int = _left()


class DedupSubstringsSpec(StepSpec, step="dedup_substrings"):
    """Removes passages that occurred earlier in the corpus, byte for byte, at any position.

    The published threshold is 50 tokens, about 200 bytes.
    """

    min_bytes: int = setting(200, "minimum length of a repeat in bytes of UTF-8", 200, ge=2, le=16384)
    min_left_chars: int = _left()


class EvaluationSetSpec(ShortSection, short="path"):
    """An evaluation set: JSONL or text files, one item per line. `PATH` is short for `{path: PATH}`."""

    path: Paths = setting(..., "files, folders or globs", "evals/arc/*.jsonl")
    fields: list[str] = setting([], "JSON fields of an item, in order (default: all strings)", ["question", "answer"])


class DecontaminateSpec(StepSpec, step="decontaminate"):
    """Drops, cuts or reports documents that contain text of an evaluation set."""

    sets: dict[str, EvaluationSetSpec] = setting(..., "evaluation sets", {"arc": "evals/arc.jsonl"}, min_length=1)
    ngram: int = setting(13, "words that must match: 13 as in GPT-3, 12 as in FineWeb", 12, ge=2, le=64)
    action: Literal["drop", "cut", "report"] = setting("drop", "drop the document, cut the match, or report it", "cut")
    max_matches: int = setting(0, "allowed matching n-grams per document", 2, ge=0)
    max_share: Share = setting(0.0, "and allowed share of matching words", "1%")
    max_items: int | None = setting(None, "ignore n-grams in more evaluation items than this (boilerplate)", 10, ge=1)
    margin_chars: int = setting(0, "characters also cut on both sides; 200 in GPT-3", 200, ge=0)
    min_left_chars: int = _left()


PiiKind = Literal["email", "phone", "ssn", "credit_card", "iban", "ip", "api_key"]
PII_KINDS: tuple[PiiKind, ...] = ("email", "phone", "ssn", "credit_card", "iban", "ip", "api_key")
# Crawlers for training data, by their names in robots.txt.
TRAINING_AGENTS = (
    "GPTBot", "CCBot", "Google-Extended", "ClaudeBot", "anthropic-ai", "Applebot-Extended", "Bytespider",
    "meta-externalagent", "FacebookBot", "cohere-training-data-crawler", "cohere-ai", "AI2Bot", "Diffbot",
    "omgili", "PanguBot", "img2dataset",
)  # fmt: skip


class PiiSpec(StepSpec, step="pii"):
    """Replaces personal data and secrets by placeholders, or drops the documents that contain them.

    Labels such as `pii_email` count the findings. The values are written nowhere.
    """

    kinds: list[PiiKind] = setting(list(PII_KINDS), "kinds: " + ", ".join(PII_KINDS), ["email", "ip"], min_length=1)
    action: Literal["redact", "drop"] = setting("redact", "replace by placeholders, or drop the document", "redact")
    drop_above: int | None = setting(None, "with redact: drop documents with more findings", 100, ge=0)
    placeholders: Literal["plain", "numbered", "hashed"] = setting(
        "plain",
        "plain: <EMAIL>; numbered: <EMAIL_1>, in order of occurrence; hashed: "
        "<EMAIL_3f9c2a71d0>, the same for equal values in the corpus",
        "numbered",
    )
    form: str = setting("<{}>", "format of a placeholder; {} is its name", "[{}]")
    key_env: str = setting(
        "BESSEMER_PII_KEY",
        "environment variable that holds the key of hashed placeholders",
        "BESSEMER_PII_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    private_ips: bool = setting(False, "also redact private, local and documentation addresses (192.168.0.1)", False)

    @field_validator("form")
    @classmethod
    def _one_name(cls, value: str) -> str:
        if value.count("{}") != 1 or value.strip() == "{}":
            raise ValueError(f"expected characters around one {{}}, such as <{{}}>, got {format_value(value)}")
        return value

    @field_validator("kinds")
    @classmethod
    def _once(cls, value: list[PiiKind]) -> list[PiiKind]:
        if len(set(value)) != len(value):
            raise ValueError("a kind is listed twice: list each kind once")
        return value


class BlockUrlsSpec(StepSpec, step="block_urls"):
    """Drops documents from listed URLs. Documents without a URL are kept."""

    domains: list[str] = setting([], "domains, including subdomains", ["spam.example", "ads.example.org"])
    urls: list[str] = setting([], "URL prefixes", ["example.com/~spammer"])
    lists: Paths = setting(
        [],
        "files with a domain or an address a line (plain or hosts format, may be .gz), or folders of them "
        "named domains, urls and expressions, as in the UT1 collection",
        "blacklists/adult",
    )
    patterns: list[Pattern] = setting([], "regular expressions, searched in the URL", [r"/tag/\w+/page/\d{3}"])
    words: list[str] = setting([], "words of a URL; one match is enough", ["casino", "torrent"])
    soft_words: list[str] = setting([], "words of which several must occur", ["cheap", "pills"])
    soft_hits: int = setting(2, "minimum number of different soft words", 2, ge=1)
    word_lists: Paths = setting([], "files with more `words`, one per line", "words.txt")
    soft_word_lists: Paths = setting([], "files with more `soft_words`, one per line", "soft_words.txt")
    allow: list[str] = setting([], "domains or URLs that are always kept", ["docs.example.com"])

    @model_validator(mode="after")
    def _some(self) -> BlockUrlsSpec:
        given = (self.domains, self.urls, self.lists, self.patterns, self.words, self.soft_words)
        if not any((*given, self.word_lists, self.soft_word_lists)):
            raise ValueError("nothing to block: set domains, urls, lists, patterns or words")
        return self


class OptOutSpec(StepSpec, step="opt_out"):
    """Drops documents whose owners opted out of training."""

    domains: list[str] = setting([], "domains that opted out, including subdomains", ["example.com"])
    lists: Paths = setting([], "files of such domains or URLs, as in block_urls", "optout.txt")
    robots: Paths = setting(
        [], "folders with HOST/robots.txt and HOST/ai.txt, or HOST.robots.txt and HOST.ai.txt", "robots/"
    )
    agents: list[str] = setting(
        list(TRAINING_AGENTS),
        "crawlers in robots.txt; a page that one of them may not fetch is dropped",
        ["GPTBot", "CCBot", "Google-Extended"],
        min_length=1,
    )
    all_agents: bool = setting(
        False, "also apply the rules for * to agents without their own, as a crawler would", False
    )
    signals: bool = setting(
        True, "respect Content-Signal: ai-train=no and Content-Usage: train-ai=n in robots.txt", True
    )
    hashes: Paths = setting([], "files with SHA-256 hashes of texts that opted out, in hex, one per line", "hashes.txt")
    ids: Paths = setting([], "files with ids of documents that opted out, one per line", "ids.txt")

    @model_validator(mode="after")
    def _some(self) -> OptOutSpec:
        if not any((self.domains, self.lists, self.robots, self.hashes, self.ids)):
            raise ValueError("no opt-outs: set domains, lists, robots, hashes or ids")
        return self
