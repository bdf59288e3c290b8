"""Settings of the steps for personal data, block lists and opt-outs."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from bessemer.spec.clean.step import StepSpec, setting
from bessemer.spec.clean.text import Pattern
from bessemer.spec.part import Paths
from bessemer.spec.quantity import shown

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
