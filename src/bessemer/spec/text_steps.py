"""StepSpec: the base of curation steps. An entry of `clean` is `- length`, or `- length: {min_chars: 100}`.

Settings of the curation steps that extract, clean and filter text: heuristics, language, toxicity.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bessemer.spec.quantity import LARGEST_COUNT, Count, Share, SpecSection, format_value, setting

Named = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class StepSpec(SpecSection):
    """The settings of one step. Defaults are the published ones. `step` is its name in a spec."""

    step: ClassVar[str] = ""

    def __init_subclass__(cls, step: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.step = step

    @model_validator(mode="before")
    @classmethod
    def _unwrap(cls, value: Any) -> Any:
        if value == cls.step:
            return {}
        if isinstance(value, dict) and list(value) == [cls.step]:
            inner = value[cls.step]
            return {} if inner is None else inner
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of both forms: the name, or the name with its settings."""
        full = handler.resolve_ref_schema(handler(core))
        with_settings = {
            "type": "object",
            "properties": {cls.step: full},
            "required": [cls.step],
            "additionalProperties": False,
        }
        return {"anyOf": [{"const": cls.step}, with_settings], "description": full.get("description", "")}

    @model_serializer(mode="wrap")
    def _wrap(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {self.step: handler(self)}


OFF = "; 0 or null: off"
STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{format_value(pattern)} is not a regular expression ({error}); escape special characters"
        ) from None
    return pattern


def _to_int_keys(value: Any) -> Any:
    """Keys of JSON and of overrides are strings."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: inner for key, inner in value.items()}


Pattern = Annotated[str, AfterValidator(_check_pattern)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Field(ge=0, le=LARGEST_COUNT)]
RunLength = Annotated[int, Field(ge=1, le=1000)]
RunShares = Annotated[dict[RunLength, Fraction], BeforeValidator(_to_int_keys)]


class ExtractSpec(StepSpec, step="extract"):
    """Extracts the main text of HTML pages, without menus, comments and footers. Other documents are unchanged."""

    favour: Literal["precision", "recall", "balanced"] = setting(
        "precision",
        "precision: only text that is surely the main text (as FineWeb); recall: more text; balanced",
        "precision",
    )
    include_tables: bool = setting(True, "keep the text of tables", True)
    min_chars: int = setting(1, "minimum characters of main text", 100, ge=1)
    max_page_chars: int = setting(
        2_000_000,
        "maximum characters of HTML; longer pages are dropped, because they can take minutes",
        2_000_000,
        ge=1,
    )


class UnicodeSpec(StepSpec, step="unicode"):
    """Normalizes Unicode, removes control characters and repairs wrongly decoded text (Ã© for é)."""

    form: Literal["NFC", "NFKC", "none"] = setting("NFC", "Unicode normal form", "NFKC")
    mojibake: bool = setting(True, "repair wrongly decoded text (with ftfy)", False)
    controls: bool = setting(True, "remove control characters other than white space", False)


class WhitespaceSpec(StepSpec, step="whitespace"):
    """Normalizes line ends, strips spaces at line ends, and shortens runs of empty lines."""

    most_empty_lines: int = setting(2, "maximum consecutive empty lines", 2, ge=0)
    most_spaces: int | None = setting(None, "maximum consecutive spaces inside a line; indentation is kept", 1, ge=1)
    plain_spaces: bool = setting(False, "replace other spaces (no-break, thin, wide) by plain ones", True)


class BoilerplateSpec(StepSpec, step="boilerplate"):
    """Removes short boilerplate lines: cookie notices, share buttons, copyright lines, menus."""

    phrases: list[str] = setting([], "more boilerplate phrases for short lines, ignoring case", ["read our newsletter"])
    patterns: list[Pattern] = setting([], "more regular expressions of boilerplate lines", [r"^Page \d+ of \d+$"])
    builtin: bool = setting(True, "also use the built-in phrases", False)
    max_words: int = setting(20, "lines with more words are kept", 12, ge=1)
    menu_lines: int = setting(3, "consecutive menu entries that are removed" + OFF, 5, ge=0)


class LengthSpec(StepSpec, step="length"):
    """Drops documents that are too short or too long. Words are separated by white space."""

    min_chars: int = setting(1, "minimum characters", 100, ge=0)
    max_chars: int | None = setting(None, "maximum characters", 1000000, ge=1)
    min_words: int = setting(0, "minimum words", 20, ge=0)
    max_words: int | None = setting(None, "maximum words", 100000, ge=1)
    min_bytes: int = setting(0, "minimum bytes of UTF-8", 200, ge=0)
    max_bytes: int | None = setting(None, "maximum bytes of UTF-8", 10000000, ge=1)
    min_lines: int = setting(0, "minimum non-empty lines", 2, ge=0)
    max_lines: int | None = setting(None, "maximum non-empty lines", 50000, ge=1)


class ShareSpec(StepSpec):
    """Bounds on shares, all off by default. Characters are those other than white space."""

    min_symbols: Fraction | None = setting(None, "minimum share of symbols such as + $ ▶ among characters", 0.01)
    max_symbols: Fraction | None = setting(None, "maximum share of symbols among characters", 0.1)
    min_digits: Fraction | None = setting(None, "minimum share of digits among characters", 0.01)
    max_digits: Fraction | None = setting(None, "maximum share of digits among characters", 0.2)
    min_upper_case: Fraction | None = setting(None, "minimum share of capitals among letters", 0.005)
    max_upper_case: Fraction | None = setting(None, "maximum share of capitals among letters", 0.5)
    min_punctuation: Fraction | None = setting(None, "minimum share of punctuation among characters", 0.005)
    max_punctuation: Fraction | None = setting(None, "maximum share of punctuation among characters", 0.25)
    min_urls: Fraction | None = setting(None, "minimum share of characters inside URLs", 0.01)
    max_urls: Fraction | None = setting(None, "maximum share of characters inside URLs", 0.2)
    min_alphabetic_words: Fraction | None = setting(None, "minimum share of words with a letter", 0.8)
    max_alphabetic_words: Fraction | None = setting(None, "maximum share of words with a letter", 0.99)
    min_stop_words: Fraction | None = setting(None, "minimum share of words that are stop words", 0.06)
    max_stop_words: Fraction | None = setting(None, "maximum share of words that are stop words", 0.6)
    stop_words: list[str] = setting(STOP_WORDS, "the stop words, in lower case", ["der", "die", "und"], min_length=1)


class RatiosSpec(ShareSpec, step="ratios"):
    """Drops documents with too many or too few characters or words of a kind."""

    min_stop_word_count: int | None = setting(None, "minimum number of stop words, counting repeats", 2, ge=1)


class LinesSpec(ShareSpec, step="lines"):
    """Drops lines with too many or too few characters or words of a kind, then documents with too little left."""

    min_chars: int | None = setting(None, "minimum characters of a line", 3, ge=1)
    max_chars: int | None = setting(None, "maximum characters of a line", 10000, ge=1)
    min_words: int | None = setting(None, "minimum words of a line", 2, ge=1)
    min_kept: float = setting(0.0, "minimum share of characters left in a document", 0.5, ge=0, le=1)


def _rule(default: float, description: str) -> Any:
    """A published threshold."""
    return setting(default, description + OFF, default)


class GopherQualitySpec(StepSpec, step="gopher_quality"):
    """The quality rules of Gopher (Rae et al. 2021, table A1)."""

    min_words: NonNegative | None = _rule(50, "minimum words, not counting pure punctuation")
    max_words: NonNegative | None = _rule(100_000, "maximum words")
    min_word_length: Number | None = _rule(3, "minimum mean word length")
    max_word_length: Number | None = _rule(10, "maximum mean word length")
    max_hashes: Number | None = _rule(0.1, "maximum # per word")
    max_ellipses: Number | None = _rule(0.1, "maximum ellipses per word")
    max_bullet_lines: Fraction | None = _rule(0.9, "maximum share of lines that start with a bullet")
    max_ellipsis_lines: Fraction | None = _rule(0.3, "maximum share of lines that end with an ellipsis")
    min_alphabetic_words: Fraction | None = _rule(0.8, "minimum share of words with a letter")
    min_stop_words: NonNegative | None = _rule(2, "minimum different stop words")
    stop_words: list[str] = setting(STOP_WORDS, "the stop words, case-sensitive", ["the", "be", "to", "of"])


class GopherRepetitionSpec(StepSpec, step="gopher_repetition"):
    """The repetition rules of Gopher (Rae et al. 2021, table A1). Shares are of the document's characters."""

    max_repeated_lines: Fraction | None = _rule(0.3, "maximum share of repeated lines")
    max_repeated_line_chars: Fraction | None = _rule(0.2, "maximum share of characters in repeated lines")
    max_repeated_paragraphs: Fraction | None = _rule(0.3, "maximum share of repeated paragraphs")
    max_repeated_paragraph_chars: Fraction | None = _rule(0.2, "maximum share of characters in repeated paragraphs")
    max_top_ngrams: RunShares = setting(
        {2: 0.2, 3: 0.18, 4: 0.16},
        "for n-grams of words, maximum share of characters in the most frequent one" + OFF,
        {2: 0.2, 3: 0.18, 4: 0.16},
    )
    max_repeated_ngrams: RunShares = setting(
        {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1},
        "for n-grams of words, maximum share of characters in repeated ones" + OFF,
        {5: 0.15, 10: 0.1},
    )


class C4Spec(StepSpec, step="c4"):
    """The rules of C4 (Raffel et al. 2020), without its list of bad words. FineWeb uses line_end_punctuation: false."""

    line_end_punctuation: bool = setting(True, "drop lines that end in an ellipsis, or not in . ? ! or a quote", False)
    min_line_words: NonNegative | None = _rule(3, "minimum words of a line")
    max_word_chars: NonNegative | None = _rule(1000, "maximum word length; lines with longer words are dropped")
    remove_citations: bool = setting(True, "remove marks such as [3] and [edit]", False)
    drop_javascript_lines: bool = setting(True, "drop lines that mention Javascript", False)
    drop_policy_lines: bool = setting(True, "drop lines about cookies, privacy policies and terms of use", False)
    drop_lorem_ipsum: bool = setting(True, "drop documents with lorem ipsum", False)
    drop_curly_brackets: bool = setting(True, "drop documents with a curly bracket", False)
    min_sentences: NonNegative | None = _rule(5, "minimum sentences in the remaining lines")
    min_paragraphs: int | None = setting(None, "mC4's rule: minimum number of long lines (mC4: 3)" + OFF, 3, ge=0)
    min_paragraph_chars: int = setting(200, "minimum characters of a long line in mC4's rule", 200, ge=1)


class FineWebSpec(StepSpec, step="fineweb"):
    """The rules that FineWeb adds to Gopher's and C4's (Penedo et al. 2024)."""

    min_ended_lines: Fraction | None = _rule(0.12, "minimum share of lines that end in punctuation")
    allow_no_ended_lines: bool = setting(False, "keep documents in which no line ends in punctuation", True)
    line_ends: Named | None = setting(None, "the punctuation that ends a line (default: that of all scripts)", ".!?")
    max_short_lines: Fraction | None = _rule(0.67, "maximum share of short lines")
    short_line_chars: int = setting(30, "maximum characters of a short line", 30, ge=0)
    max_repeated_line_chars: Fraction | None = _rule(0.01, "maximum share of characters in repeated lines")
    max_newlines: Number | None = _rule(0.3, "maximum newlines per word")


class LanguageSpec(StepSpec, step="language"):
    """Labels each document with its `language` and `language_score`, and can keep only some languages.

    The model is the small form of fastText's lid.176 (176 languages), which comes with the `data` extra.
    """

    keep: list[str] = setting([], "language codes to keep; empty: label only", ["en", "de"])
    min_confidence: Share = setting(0.65, "minimum score of the language; with `keep`, others are dropped", 0.65)
    min_chars: int = setting(0, "shorter documents are not classified; `short` decides", 20, ge=0)
    short: Literal["keep", "drop"] = setting("keep", "what to do with documents below min_chars", "drop")
    sample_chars: Count = setting(
        3000, "characters to classify, from beginning, middle and end of longer documents", 3000
    )
    model: Named | None = setting(None, "another fastText model, such as lid.176.bin or GlotLID", "lid.176.bin")


class ToxicitySpec(StepSpec, step="toxicity"):
    """Drops documents or lines with words of a list, or documents that a classifier finds toxic.

    No list is included. The C4 corpus used the List of Dirty, Naughty, Obscene and Otherwise Bad Words, one file for
    each of 28 languages: https://github.com/LDNOOBW/List-of-Dirty-Naughty-Obscene-and-Otherwise-Bad-Words
    """

    lexicons: dict[str, str] = setting(
        {},
        "files of words and phrases, one per line, by language; `any` applies to all documents",
        {"en": "badwords/en"},
    )
    default_language: Named = setting("en", "language of documents without a language label", "en")
    allow: list[str] = setting(
        ["sm", "グロ", "女の子", "性"], "list entries to ignore (default: as C4)", ["sex education"]
    )
    action: Literal["drop", "lines"] = setting("drop", "drop the document, or only the lines with hits", "lines")
    min_hits: int = setting(1, "minimum hits", 3, ge=1)
    min_share: Share = setting(0.0, "minimum share of hits among the words", "1%")
    keep_fraction: Share = setting(0.0, "share of such documents to keep anyway, chosen by a hash of the text", "10%")
    classifier: Named | None = setting(None, "a trained classifier with a class named toxic", "toxic.safetensors")
    max_score: Share = setting(0.5, "maximum probability of the class toxic", 0.5)

    @model_validator(mode="after")
    def _some(self) -> ToxicitySpec:
        if not self.lexicons and self.classifier is None:
            raise ValueError("set lexicons, such as {en: badwords/en}, or classifier")
        return self
