"""Settings of the steps that sort documents by language and by offensive words."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from bessemer.spec.clean.step import StepSpec
from bessemer.spec.quantity import Count, Share


class LanguageSpec(StepSpec):
    """Labels each document with its `language` and `language_score`, and keeps the languages that are wanted.

    The model is fastText's lid.176 in its small form, which knows 176 languages and comes with the `data` extra.
    """

    step: ClassVar[str] = "language"
    keep: list[str] = Field(
        [], description="codes of the languages to keep; empty: label and keep all", examples=[["en", "de"]]
    )
    min_confidence: Share = Field(
        0.65,
        description="lowest score of the language; with `keep`, less sure documents go too",
        examples=[0.65],
    )
    min_chars: int = Field(
        0, ge=0, description="shorter documents are not judged but treated as `short` says", examples=[20]
    )
    short: Literal["keep", "drop"] = Field(
        "keep", description="what happens to documents below min_chars", examples=["drop"]
    )
    sample_chars: Count = Field(
        3000,
        description="longer documents are judged by as much text from their beginning, middle and end",
        examples=[3000],
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="another fastText model, such as lid.176.bin or GlotLID",
        examples=["lid.176.bin"],
    )


class ToxicitySpec(StepSpec):
    """Documents, or lines of them, with words of a list go; or documents that a classifier finds toxic.

    No list is shipped. The C4 corpus used the List of Dirty, Naughty, Obscene and Otherwise Bad Words, one file for
    each of 28 languages: https://github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words
    """

    step: ClassVar[str] = "toxicity"
    lexicons: dict[str, str] = Field(
        {},
        description="a file of words and phrases, one a line, for each language; under `any`, for all documents",
        examples=[{"en": "badwords/en"}],
    )
    default_language: str = Field(
        "en", min_length=1, description="language of documents that no step labelled", examples=["en"]
    )
    allow: list[str] = Field(
        ["sm", "グロ", "女の子", "性"],
        description="entries of the lists that do not count (by default those that C4 left out)",
        examples=[["sex education"]],
    )
    action: Literal["drop", "lines"] = Field(
        "drop", description="drop: the document goes; lines: only the lines with hits go", examples=["lines"]
    )
    min_hits: int = Field(1, ge=1, description="fewest hits that count against a document", examples=[3])
    min_share: Share = Field(
        0.0, description="smallest share of hits among its words that counts against it", examples=["1%"]
    )
    keep_fraction: Share = Field(
        0.0,
        description="share of such documents kept all the same, chosen by a hash of the text",
        examples=["10%"],
    )
    classifier: str | None = Field(
        None,
        min_length=1,
        description="a classifier trained from folders of texts, one of them named toxic",
        examples=["toxic.safetensors"],
    )
    max_score: Share = Field(
        0.5, description="highest probability of the class toxic that is kept", examples=[0.5]
    )

    @model_validator(mode="after")
    def _some(self) -> ToxicitySpec:
        if not self.lexicons and self.classifier is None:
            raise ValueError("give lexicons, such as {en: badwords/en}, or a classifier")
        return self


STEPS: tuple[type[StepSpec], ...] = (LanguageSpec, ToxicitySpec)
