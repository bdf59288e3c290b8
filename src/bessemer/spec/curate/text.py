"""Settings of the steps that take text out of pages, clean it, and filter it by heuristics.

Settings of the steps that sort documents by language and by offensive words.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bessemer.spec.curate.step import LARGEST_COUNT, Fraction, Named, StepSpec, setting
from bessemer.spec.quantity import Count, Share, shown

OFF = "; 0 or null switches it off"
STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{shown(pattern)} is no regular expression ({error}); escape signs") from None
    return pattern


def _number_keys(value: Any) -> Any:
    """JSON and overrides have text for keys."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: inner for key, inner in value.items()}


Pattern = Annotated[str, AfterValidator(_compiles)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Field(ge=0, le=LARGEST_COUNT)]
RunLength = Annotated[int, Field(ge=1, le=1000)]
RunShares = Annotated[dict[RunLength, Fraction], BeforeValidator(_number_keys)]


class ExtractSpec(StepSpec, step="extract"):
    """HTML pages become their main text, without menus, comments and footers; other documents stay as they are."""

    favour: Literal["precision", "recall", "balanced"] = setting(
        "precision",
        "precision: less text, but surely the main one (as FineWeb); recall: more of it; or balanced",
        "precision",
    )
    include_tables: bool = setting(True, "keep the text of tables", True)
    min_chars: int = setting(1, "fewest characters of main text; pages with less go", 100, ge=1)
    max_page_chars: int = setting(
        2_000_000, "longest page in characters of HTML; longer ones go, since they can take minutes", 2_000_000, ge=1
    )


class UnicodeSpec(StepSpec, step="unicode"):
    """Text in one normal form, without control characters and without text that was decoded wrongly (Ã© for é)."""

    form: Literal["NFC", "NFKC", "none"] = setting("NFC", "normal form", "NFKC")
    mojibake: bool = setting(True, "repair text that was decoded wrongly (with ftfy)", False)
    controls: bool = setting(True, "remove control characters that are no white space", False)


class WhitespaceSpec(StepSpec, step="whitespace"):
    """Line ends become newlines, spaces at line ends go, and long runs of empty lines shrink."""

    most_empty_lines: int = setting(2, "empty lines kept in a row", 2, ge=0)
    most_spaces: int | None = setting(None, "spaces kept in a row inside a line; indentation stays", 1, ge=1)
    plain_spaces: bool = setting(False, "turn other spaces (no-break, thin, wide) into plain ones", True)


class BoilerplateSpec(StepSpec, step="boilerplate"):
    """Short lines that belong to a page, not to its text: cookie notices, share buttons, copyright lines, menus."""

    phrases: list[str] = setting([], "more phrases, in any case, that make a short line go", ["read our newsletter"])
    patterns: list[Pattern] = setting(
        [], "more regular expressions: a line goes if one is found in it", [r"^Page \d+ of \d+$"]
    )
    builtin: bool = setting(True, "use the built-in phrases as well", False)
    max_words: int = setting(20, "lines with more words stay, whatever they say", 12, ge=1)
    menu_lines: int = setting(3, "lines in a row that are entries of a menu before they go" + OFF, 5, ge=0)


class LengthSpec(StepSpec, step="length"):
    """Documents that are too short or too long go. Words are what stands between spaces."""

    min_chars: int = setting(1, "fewest characters", 100, ge=0)
    max_chars: int | None = setting(None, "most characters", 1000000, ge=1)
    min_words: int = setting(0, "fewest words", 20, ge=0)
    max_words: int | None = setting(None, "most words", 100000, ge=1)
    min_bytes: int = setting(0, "fewest bytes of UTF-8", 200, ge=0)
    max_bytes: int | None = setting(None, "most bytes of UTF-8", 10000000, ge=1)
    min_lines: int = setting(0, "fewest lines that are not empty", 2, ge=0)
    max_lines: int | None = setting(None, "most lines that are not empty", 50000, ge=1)


class ShareSpec(StepSpec):
    """Bounds on shares, all off by default. Of characters: among those that are not white space."""

    min_symbols: Fraction | None = setting(None, "least share of symbols such as + $ ▶ among characters", 0.01)
    max_symbols: Fraction | None = setting(None, "greatest share of symbols among characters", 0.1)
    min_digits: Fraction | None = setting(None, "least share of digits among characters", 0.01)
    max_digits: Fraction | None = setting(None, "greatest share of digits among characters", 0.2)
    min_upper_case: Fraction | None = setting(None, "least share of capitals among letters", 0.005)
    max_upper_case: Fraction | None = setting(None, "greatest share of capitals among letters", 0.5)
    min_punctuation: Fraction | None = setting(None, "least share of punctuation among characters", 0.005)
    max_punctuation: Fraction | None = setting(None, "greatest share of punctuation among characters", 0.25)
    min_urls: Fraction | None = setting(None, "least share of characters that are in URLs", 0.01)
    max_urls: Fraction | None = setting(None, "greatest share of characters that are in URLs", 0.2)
    min_alphabetic_words: Fraction | None = setting(None, "least share of words with a letter", 0.8)
    max_alphabetic_words: Fraction | None = setting(None, "greatest share of words with a letter", 0.99)
    min_stop_words: Fraction | None = setting(None, "least share of words that are stop words", 0.06)
    max_stop_words: Fraction | None = setting(None, "greatest share of words that are stop words", 0.6)
    stop_words: list[str] = setting(STOP_WORDS, "the stop words, in lower case", ["der", "die", "und"], min_length=1)


class RatiosSpec(ShareSpec, step="ratios"):
    """Documents with too much or too little of a kind of character or word go."""

    min_stop_word_count: int | None = setting(None, "fewest words that are stop words, repeats counted", 2, ge=1)


class LinesSpec(ShareSpec, step="lines"):
    """Lines with too much or too little of a kind of character or word go, then documents with too little left."""

    min_chars: int | None = setting(None, "fewest characters of a line", 3, ge=1)
    max_chars: int | None = setting(None, "most characters of a line", 10000, ge=1)
    min_words: int | None = setting(None, "fewest words of a line, as between spaces", 2, ge=1)
    min_kept: float = setting(0.0, "least share of a document's characters that must be left", 0.5, ge=0, le=1)


def _rule(default: float, about: str) -> Any:
    """A published threshold."""
    return setting(default, about + OFF, default)


class GopherQualitySpec(StepSpec, step="gopher_quality"):
    """The rules for quality of Gopher (Rae et al. 2021, table A1)."""

    min_words: NonNegative | None = _rule(50, "fewest words, those of punctuation alone not counted")
    max_words: NonNegative | None = _rule(100_000, "most words")
    min_word_length: Number | None = _rule(3, "least mean word length")
    max_word_length: Number | None = _rule(10, "greatest mean word length")
    max_hashes: Number | None = _rule(0.1, "most # for each word")
    max_ellipses: Number | None = _rule(0.1, "most ellipses for each word")
    max_bullet_lines: Fraction | None = _rule(0.9, "greatest share of lines that start with a bullet")
    max_ellipsis_lines: Fraction | None = _rule(0.3, "greatest share of lines that end with an ellipsis")
    min_alphabetic_words: Fraction | None = _rule(0.8, "least share of words with a letter")
    min_stop_words: NonNegative | None = _rule(2, "fewest different stop words")
    stop_words: list[str] = setting(STOP_WORDS, "the stop words, case counts", ["the", "be", "to", "of"])


class GopherRepetitionSpec(StepSpec, step="gopher_repetition"):
    """The rules against repetition of Gopher (Rae et al. 2021, table A1); shares are of the document's characters."""

    max_repeated_lines: Fraction | None = _rule(0.3, "greatest share of lines that were there before")
    max_repeated_line_chars: Fraction | None = _rule(0.2, "greatest share of characters in repeated lines")
    max_repeated_paragraphs: Fraction | None = _rule(0.3, "greatest share of paragraphs that were there before")
    max_repeated_paragraph_chars: Fraction | None = _rule(0.2, "greatest share of characters in repeated paragraphs")
    max_top_ngrams: RunShares = setting(
        {2: 0.2, 3: 0.18, 4: 0.16},
        "for runs of n words, greatest share of characters in the most frequent one" + OFF,
        {2: 0.2, 3: 0.18, 4: 0.16},
    )
    max_repeated_ngrams: RunShares = setting(
        {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1},
        "for runs of n words, greatest share of characters in runs that came before" + OFF,
        {5: 0.15, 10: 0.1},
    )


class C4Spec(StepSpec, step="c4"):
    """The rules of C4 (Raffel et al. 2020), without its list of bad words. FineWeb has line_end_punctuation: false."""

    line_end_punctuation: bool = setting(
        True, "drop lines that do not end in . ? ! or a quote, or end in an ellipsis", False
    )
    min_line_words: NonNegative | None = _rule(3, "fewest words of a line")
    max_word_chars: NonNegative | None = _rule(1000, "longest word of a line that stays")
    remove_citations: bool = setting(True, "take out marks such as [3] and [edit]", False)
    drop_javascript_lines: bool = setting(True, "drop lines that name Javascript", False)
    drop_policy_lines: bool = setting(True, "drop lines about cookies, privacy policies and terms of use", False)
    drop_lorem_ipsum: bool = setting(True, "drop documents with lorem ipsum", False)
    drop_curly_brackets: bool = setting(True, "drop documents with a curly bracket", False)
    min_sentences: NonNegative | None = _rule(5, "fewest sentences in the lines that stay")
    min_paragraphs: int | None = setting(
        None, "mC4's rule: fewest long lines before any is dropped (mC4: 3)" + OFF, 3, ge=0
    )
    min_paragraph_chars: int = setting(200, "characters of a long line in mC4's rule", 200, ge=1)


class FineWebSpec(StepSpec, step="fineweb"):
    """The rules that FineWeb adds to Gopher's and C4's (Penedo et al. 2024)."""

    min_ended_lines: Fraction | None = _rule(0.12, "least share of lines that end in punctuation")
    allow_no_ended_lines: bool = setting(False, "keep documents of which no line at all ends in punctuation", True)
    line_ends: Named | None = setting(None, "the punctuation meant, if not that of all scripts", ".!?")
    max_short_lines: Fraction | None = _rule(0.67, "greatest share of short lines")
    short_line_chars: int = setting(30, "a line is short up to so many characters", 30, ge=0)
    max_repeated_line_chars: Fraction | None = _rule(0.01, "greatest share of characters in repeated lines")
    max_newlines: Number | None = _rule(0.3, "most newlines for each word")


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
