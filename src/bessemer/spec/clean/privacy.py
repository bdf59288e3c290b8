"""Settings of the steps for personal data, block lists and opt-outs."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from bessemer.spec.clean.step import StepSpec
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


class PiiSpec(StepSpec):
    """Personal data and secrets are replaced by placeholders, or the documents that hold them go.

    Labels such as `pii_email` count what was found; the values themselves are written nowhere.
    """

    step: ClassVar[str] = "pii"
    kinds: list[PiiKind] = Field(
        list(ALL_KINDS),
        min_length=1,
        description="what to look for: " + ", ".join(ALL_KINDS),
        examples=[["email", "ip"]],
    )
    action: Literal["redact", "drop"] = Field(
        "redact",
        description="redact: placeholders take their place; drop: the document goes",
        examples=["redact"],
    )
    drop_above: int | None = Field(
        None, ge=0, description="with redact: a document with more finds than this goes", examples=[100]
    )
    placeholders: Literal["plain", "numbered", "hashed"] = Field(
        "plain",
        description="plain: <EMAIL>; numbered: <EMAIL_1> by first occurrence in the document; hashed: "
        "<EMAIL_3f9c2a71d0>, one for each value of the whole corpus",
        examples=["numbered"],
    )
    form: str = Field("<{}>", description="how a placeholder is written; {} is its name", examples=["[{}]"])
    key_env: str = Field(
        "BESSEMER_PII_KEY",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="environment variable with the key of hashed placeholders",
        examples=["BESSEMER_PII_KEY"],
    )
    private_ips: bool = Field(
        False,
        description="also private, local and documentation addresses (192.168.0.1, ::1)",
        examples=[False],
    )

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


class BlockUrlsSpec(StepSpec):
    """Documents from listed addresses go. Documents without a URL stay."""

    step: ClassVar[str] = "block_urls"
    domains: list[str] = Field(
        [], description="domains; their subdomains too", examples=[["spam.example", "ads.example.org"]]
    )
    urls: list[str] = Field(
        [], description="addresses; everything below them too", examples=[["example.com/~spammer"]]
    )
    lists: Paths = Field(
        [],
        description="files with a domain or an address a line (plain or hosts format, may be .gz), or folders of them "
        "named domains, urls and expressions, as in the UT1 collection",
        examples=["blacklists/adult"],
    )
    patterns: list[str] = Field(
        [],
        description="regular expressions, searched in the whole address",
        examples=[[r"/tag/\w+/page/\d{3}"]],
    )
    words: list[str] = Field(
        [], description="words of an address, one of which is enough", examples=[["casino", "torrent"]]
    )
    soft_words: list[str] = Field(
        [], description="words of which several have to occur", examples=[["cheap", "pills"]]
    )
    soft_hits: int = Field(2, ge=1, description="how many different soft words", examples=[2])
    word_lists: Paths = Field([], description="files with more `words`, one a line", examples=["words.txt"])
    soft_word_lists: Paths = Field(
        [], description="files with more `soft_words`, one a line", examples=["soft_words.txt"]
    )
    allow: list[str] = Field(
        [],
        description="domains or addresses that are kept whatever else says",
        examples=[["docs.example.com"]],
    )

    @field_validator("patterns")
    @classmethod
    def _compiles(cls, value: list[str]) -> list[str]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{shown(pattern)} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _some(self) -> BlockUrlsSpec:
        given = (self.domains, self.urls, self.lists, self.patterns, self.words, self.soft_words)
        if not any((*given, self.word_lists, self.soft_word_lists)):
            raise ValueError("nothing to block; give domains, urls, lists, patterns or words")
        return self


class OptOutSpec(StepSpec):
    """Documents whose owners do not want them trained on go."""

    step: ClassVar[str] = "opt_out"
    domains: list[str] = Field(
        [], description="domains that opted out; their subdomains too", examples=[["example.com"]]
    )
    lists: Paths = Field(
        [], description="files of such domains or addresses, as in block_urls", examples=["optout.txt"]
    )
    robots: Paths = Field(
        [],
        description="folders with HOST/robots.txt and HOST/ai.txt, or HOST.robots.txt and HOST.ai.txt",
        examples=["robots/"],
    )
    agents: list[str] = Field(
        list(TRAINING_AGENTS),
        min_length=1,
        description="crawlers of robots.txt; one that may not fetch the page is enough",
        examples=[["GPTBot", "CCBot", "Google-Extended"]],
    )
    all_agents: bool = Field(
        False,
        description="also take the rules for * where an agent has none of its own, as a crawler would",
        examples=[False],
    )
    signals: bool = Field(
        True,
        description="heed Content-Signal: ai-train=no and Content-Usage: train-ai=n of robots.txt",
        examples=[True],
    )
    hashes: Paths = Field(
        [],
        description="files with the SHA-256 of texts that opted out, in hex, one a line",
        examples=["hashes.txt"],
    )
    ids: Paths = Field(
        [], description="files with the ids of documents that opted out, one a line", examples=["ids.txt"]
    )

    @model_validator(mode="after")
    def _some(self) -> OptOutSpec:
        if not any((self.domains, self.lists, self.robots, self.hashes, self.ids)):
            raise ValueError("nobody opted out; give domains, lists, robots, hashes or ids")
        return self


STEPS: tuple[type[StepSpec], ...] = (PiiSpec, BlockUrlsSpec, OptOutSpec)
