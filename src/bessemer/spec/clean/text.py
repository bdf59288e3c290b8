"""Settings of the steps for cleaning and heuristic filters."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bessemer.spec.clean.step import StepSpec

OFF = "; 0 or null switches it off"
STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{pattern!r} is not a regular expression ({error}); escape special characters"
        ) from error
    return pattern


def _number_keys(value: Any) -> Any:
    """JSON and overrides have text for keys."""
    if not isinstance(value, dict):
        return value
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: inner for key, inner in value.items()
    }


Pattern = Annotated[str, AfterValidator(_compiles)]
Share = Annotated[float, Field(ge=0, le=1)]
RunLength = Annotated[int, Field(ge=1, le=1000)]
RunShares = Annotated[dict[RunLength, Share], BeforeValidator(_number_keys)]


class UnicodeSpec(StepSpec):
    """Text in one normal form, without control characters and without text that was decoded wrongly (Ã© for é)."""

    step: ClassVar[str] = "unicode"
    form: Literal["NFC", "NFKC", "none"] = Field("NFC", description="normal form", examples=["NFKC"])
    mojibake: bool = Field(
        True, description="repair text that was decoded wrongly (with ftfy)", examples=[False]
    )
    controls: bool = Field(
        True, description="remove control characters that are no white space", examples=[False]
    )


class WhitespaceSpec(StepSpec):
    """Line ends become newlines, spaces at line ends go, and long runs of empty lines shrink."""

    step: ClassVar[str] = "whitespace"
    most_empty_lines: int = Field(2, ge=0, description="empty lines kept in a row", examples=[2])
    most_spaces: int | None = Field(
        None, ge=1, description="spaces kept in a row inside a line; indentation stays", examples=[1]
    )
    plain_spaces: bool = Field(
        False, description="turn other spaces (no-break, thin, wide) into plain ones", examples=[True]
    )


class BoilerplateSpec(StepSpec):
    """Short lines that belong to a page, not to its text: cookie notices, share buttons, copyright lines, menus."""

    step: ClassVar[str] = "boilerplate"
    phrases: list[str] = Field(
        [],
        description="more phrases, in any case, that make a short line go",
        examples=[["read our newsletter"]],
    )
    patterns: list[Pattern] = Field(
        [],
        description="more regular expressions: a line goes if one is found in it",
        examples=[[r"^Page \d+ of \d+$"]],
    )
    builtin: bool = Field(True, description="use the built-in phrases as well", examples=[False])
    max_words: int = Field(
        20, ge=1, description="lines with more words stay, whatever they say", examples=[12]
    )
    menu_lines: int = Field(
        3, ge=0, description="lines in a row that are entries of a menu before they go" + OFF, examples=[5]
    )


class LengthSpec(StepSpec):
    """Documents that are too short or too long go. Words are what stands between spaces."""

    step: ClassVar[str] = "length"
    min_chars: int = Field(1, ge=0, description="fewest characters", examples=[100])
    max_chars: int | None = Field(None, ge=1, description="most characters", examples=[1000000])
    min_words: int = Field(0, ge=0, description="fewest words", examples=[20])
    max_words: int | None = Field(None, ge=1, description="most words", examples=[100000])
    min_bytes: int = Field(0, ge=0, description="fewest bytes of UTF-8", examples=[200])
    max_bytes: int | None = Field(None, ge=1, description="most bytes of UTF-8", examples=[10000000])
    min_lines: int = Field(0, ge=0, description="fewest lines that are not empty", examples=[2])
    max_lines: int | None = Field(None, ge=1, description="most lines that are not empty", examples=[50000])


def _share(of: str, example: float) -> Any:
    return Field(None, ge=0, le=1, description=of, examples=[example])


class ShareSpec(StepSpec):
    """Bounds on shares, all off by default. Of characters: among those that are not white space."""

    min_symbols: float | None = _share("least share of symbols such as + $ ▶ among characters", 0.01)
    max_symbols: float | None = _share("greatest share of symbols among characters", 0.1)
    min_digits: float | None = _share("least share of digits among characters", 0.01)
    max_digits: float | None = _share("greatest share of digits among characters", 0.2)
    min_upper_case: float | None = _share("least share of capitals among letters", 0.005)
    max_upper_case: float | None = _share("greatest share of capitals among letters", 0.5)
    min_punctuation: float | None = _share("least share of punctuation among characters", 0.005)
    max_punctuation: float | None = _share("greatest share of punctuation among characters", 0.25)
    min_urls: float | None = _share("least share of characters that are in URLs", 0.01)
    max_urls: float | None = _share("greatest share of characters that are in URLs", 0.2)
    min_alphabetic_words: float | None = _share("least share of words with a letter", 0.8)
    max_alphabetic_words: float | None = _share("greatest share of words with a letter", 0.99)
    min_stop_words: float | None = _share("least share of words that are stop words", 0.06)
    max_stop_words: float | None = _share("greatest share of words that are stop words", 0.6)
    stop_words: list[str] = Field(
        STOP_WORDS,
        min_length=1,
        description="the stop words, in lower case",
        examples=[["der", "die", "und"]],
    )


class RatiosSpec(ShareSpec):
    """Documents with too much or too little of a kind of character or word go."""

    step: ClassVar[str] = "ratios"
    min_stop_word_count: int | None = Field(
        None, ge=1, description="fewest words that are stop words, repeats counted", examples=[2]
    )


class LinesSpec(ShareSpec):
    """Lines with too much or too little of a kind of character or word go, then documents with too little left."""

    step: ClassVar[str] = "lines"
    min_chars: int | None = Field(None, ge=1, description="fewest characters of a line", examples=[3])
    max_chars: int | None = Field(None, ge=1, description="most characters of a line", examples=[10000])
    min_words: int | None = Field(
        None, ge=1, description="fewest words of a line, as between spaces", examples=[2]
    )
    min_kept: float = Field(
        0.0,
        ge=0,
        le=1,
        description="least share of a document's characters that must be left",
        examples=[0.5],
    )


class GopherQualitySpec(StepSpec):
    """The rules for quality of Gopher (Rae et al. 2021, table A1)."""

    step: ClassVar[str] = "gopher_quality"
    min_words: int | None = Field(
        50, ge=0, description="fewest words, those of punctuation alone not counted" + OFF, examples=[50]
    )
    max_words: int | None = Field(100_000, ge=0, description="most words" + OFF, examples=[100000])
    min_word_length: float | None = Field(3, ge=0, description="least mean word length" + OFF, examples=[3])
    max_word_length: float | None = Field(
        10, ge=0, description="greatest mean word length" + OFF, examples=[10]
    )
    max_hashes: float | None = Field(0.1, ge=0, description="most # for each word" + OFF, examples=[0.1])
    max_ellipses: float | None = Field(
        0.1, ge=0, description="most ellipses for each word" + OFF, examples=[0.1]
    )
    max_bullet_lines: float | None = Field(
        0.9, ge=0, le=1, description="greatest share of lines that start with a bullet" + OFF, examples=[0.9]
    )
    max_ellipsis_lines: float | None = Field(
        0.3, ge=0, le=1, description="greatest share of lines that end with an ellipsis" + OFF, examples=[0.3]
    )
    min_alphabetic_words: float | None = Field(
        0.8, ge=0, le=1, description="least share of words with a letter" + OFF, examples=[0.8]
    )
    min_stop_words: int | None = Field(2, ge=0, description="fewest different stop words" + OFF, examples=[2])
    stop_words: list[str] = Field(
        STOP_WORDS, description="the stop words, case counts", examples=[["the", "be", "to", "of"]]
    )


class GopherRepetitionSpec(StepSpec):
    """The rules against repetition of Gopher (Rae et al. 2021, table A1); shares are of the document's characters."""

    step: ClassVar[str] = "gopher_repetition"
    max_repeated_lines: float | None = Field(
        0.3, ge=0, le=1, description="greatest share of lines that were there before" + OFF, examples=[0.3]
    )
    max_repeated_line_chars: float | None = Field(
        0.2, ge=0, le=1, description="greatest share of characters in repeated lines" + OFF, examples=[0.2]
    )
    max_repeated_paragraphs: float | None = Field(
        0.3,
        ge=0,
        le=1,
        description="greatest share of paragraphs that were there before" + OFF,
        examples=[0.3],
    )
    max_repeated_paragraph_chars: float | None = Field(
        0.2,
        ge=0,
        le=1,
        description="greatest share of characters in repeated paragraphs" + OFF,
        examples=[0.2],
    )
    max_top_ngrams: RunShares = Field(
        {2: 0.2, 3: 0.18, 4: 0.16},
        description="for runs of n words, greatest share of characters in the most frequent one" + OFF,
        examples=[{2: 0.2, 3: 0.18, 4: 0.16}],
    )
    max_repeated_ngrams: RunShares = Field(
        {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1},
        description="for runs of n words, greatest share of characters in runs that came before" + OFF,
        examples=[{5: 0.15, 10: 0.1}],
    )


class C4Spec(StepSpec):
    """The rules of C4 (Raffel et al. 2020), without its list of bad words. FineWeb has line_end_punctuation: false."""

    step: ClassVar[str] = "c4"
    line_end_punctuation: bool = Field(
        True,
        description="drop lines that do not end in . ? ! or a quote, or end in an ellipsis",
        examples=[False],
    )
    min_line_words: int | None = Field(3, ge=0, description="fewest words of a line" + OFF, examples=[3])
    max_word_chars: int | None = Field(
        1000, ge=0, description="longest word of a line that stays" + OFF, examples=[1000]
    )
    remove_citations: bool = Field(
        True, description="take out marks such as [3] and [edit]", examples=[False]
    )
    drop_javascript_lines: bool = Field(True, description="drop lines that name Javascript", examples=[False])
    drop_policy_lines: bool = Field(
        True, description="drop lines about cookies, privacy policies and terms of use", examples=[False]
    )
    drop_lorem_ipsum: bool = Field(True, description="drop documents with lorem ipsum", examples=[False])
    drop_curly_brackets: bool = Field(
        True, description="drop documents with a curly bracket", examples=[False]
    )
    min_sentences: int | None = Field(
        5, ge=0, description="fewest sentences in the lines that stay" + OFF, examples=[5]
    )
    min_paragraphs: int | None = Field(
        None,
        ge=0,
        description="mC4's rule: fewest long lines before any is dropped (mC4: 3)" + OFF,
        examples=[3],
    )
    min_paragraph_chars: int = Field(
        200, ge=1, description="characters of a long line in mC4's rule", examples=[200]
    )


class FineWebSpec(StepSpec):
    """The rules that FineWeb adds to Gopher's and C4's (Penedo et al. 2024)."""

    step: ClassVar[str] = "fineweb"
    min_ended_lines: float | None = Field(
        0.12, ge=0, le=1, description="least share of lines that end in punctuation" + OFF, examples=[0.12]
    )
    allow_no_ended_lines: bool = Field(
        False, description="keep documents of which no line at all ends in punctuation", examples=[True]
    )
    line_ends: str | None = Field(
        None, min_length=1, description="the punctuation meant, if not that of all scripts", examples=[".!?"]
    )
    max_short_lines: float | None = Field(
        0.67, ge=0, le=1, description="greatest share of short lines" + OFF, examples=[0.67]
    )
    short_line_chars: int = Field(
        30, ge=0, description="a line is short up to so many characters", examples=[30]
    )
    max_repeated_line_chars: float | None = Field(
        0.01, ge=0, le=1, description="greatest share of characters in repeated lines" + OFF, examples=[0.01]
    )
    max_newlines: float | None = Field(
        0.3, ge=0, description="most newlines for each word" + OFF, examples=[0.3]
    )


STEPS: tuple[type[StepSpec], ...] = (
    UnicodeSpec,
    WhitespaceSpec,
    BoilerplateSpec,
    LengthSpec,
    RatiosSpec,
    LinesSpec,
    GopherQualitySpec,
    GopherRepetitionSpec,
    C4Spec,
    FineWebSpec,
)
