"""Settings of the steps that sort documents by language and by offensive words."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from bessemer.spec.clean.step import Named, StepSpec, setting
from bessemer.spec.quantity import Count, Share


class LanguageSpec(StepSpec, step="language"):
    """Labels each document with its `language` and `language_score`, and keeps the languages that are wanted.

    The model is fastText's lid.176 in its small form, which knows 176 languages and comes with the `data` extra.
    """

    keep: list[str] = setting([], "codes of the languages to keep; empty: label and keep all", ["en", "de"])
    min_confidence: Share = setting(0.65, "lowest score of the language; with `keep`, less sure documents go too", 0.65)
    min_chars: int = setting(0, "shorter documents are not judged but treated as `short` says", 20, ge=0)
    short: Literal["keep", "drop"] = setting("keep", "what happens to documents below min_chars", "drop")
    sample_chars: Count = setting(
        3000, "longer documents are judged by as much text from their beginning, middle and end", 3000
    )
    model: Named | None = setting(None, "another fastText model, such as lid.176.bin or GlotLID", "lid.176.bin")


class ToxicitySpec(StepSpec, step="toxicity"):
    """Documents, or lines of them, with words of a list go; or documents that a classifier finds toxic.

    No list is shipped. The C4 corpus used the List of Dirty, Naughty, Obscene and Otherwise Bad Words, one file for
    each of 28 languages: https://github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words
    """

    lexicons: dict[str, str] = setting(
        {},
        "a file of words and phrases, one a line, for each language; under `any`, for all documents",
        {"en": "badwords/en"},
    )
    default_language: Named = setting("en", "language of documents that no step labelled", "en")
    allow: list[str] = setting(
        ["sm", "グロ", "女の子", "性"],
        "entries of the lists that do not count (by default those that C4 left out)",
        ["sex education"],
    )
    action: Literal["drop", "lines"] = setting(
        "drop", "drop: the document goes; lines: only the lines with hits go", "lines"
    )
    min_hits: int = setting(1, "fewest hits that count against a document", 3, ge=1)
    min_share: Share = setting(0.0, "smallest share of hits among its words that counts against it", "1%")
    keep_fraction: Share = setting(
        0.0, "share of such documents kept all the same, chosen by a hash of the text", "10%"
    )
    classifier: Named | None = setting(
        None, "a classifier trained from folders of texts, one of them named toxic", "toxic.safetensors"
    )
    max_score: Share = setting(0.5, "highest probability of the class toxic that is kept", 0.5)

    @model_validator(mode="after")
    def _some(self) -> ToxicitySpec:
        if not self.lexicons and self.classifier is None:
            raise ValueError("give lexicons, such as {en: badwords/en}, or a classifier")
        return self
