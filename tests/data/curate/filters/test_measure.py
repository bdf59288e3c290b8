"""Lengths and shares against bounds, at, above and below, of documents and of lines."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.curate.filters import content as measure
from bessemer.data.curate.filters.content import Length, Lines, Ratios, ShareBounds
from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.read.entry import Document
from bessemer.spec.text_steps import LengthSpec, LinesSpec, RatiosSpec


def length(text: str, **settings: Any) -> Outcome:
    return Length(LengthSpec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


def ratios(text: str, **settings: Any) -> Outcome:
    return Ratios(RatiosSpec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


def kept_lines(text: str, **settings: Any) -> Outcome:
    return Lines(LinesSpec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("", {}, Drop("fewer than 1 characters", 0)),
        ("x", {}, None),
        ("", {"min_chars": 0}, None),
        ("été", {"min_chars": 4}, Drop("fewer than 4 characters", 3)),
        ("été", {"max_chars": 3}, None),
        ("étés", {"max_chars": 3}, Drop("more than 3 characters", 4)),
        ("été", {"min_bytes": 5}, None),
        ("été", {"min_bytes": 6}, Drop("fewer than 6 bytes", 5)),
        ("été", {"max_bytes": 4}, Drop("more than 4 bytes", 5)),
        ("a b\tc\nd", {"min_words": 4}, None),
        ("a b\tc\nd", {"min_words": 5}, Drop("fewer than 5 words", 4)),
        ("a b\tc\nd", {"max_words": 3}, Drop("more than 3 words", 4)),
        ("a\n\n \nb\n", {"min_lines": 2}, None),
        ("a\n\n \nb\n", {"min_lines": 3}, Drop("fewer than 3 lines", 2)),
        ("a\n\n \nb\n", {"max_lines": 1}, Drop("more than 1 lines", 2)),
    ],
)
def test_lengths(text: str, settings: dict[str, Any], expected: Outcome) -> None:
    assert length(text, **settings) == expected


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("a + b +", {"max_symbols": 0.5}, None),
        ("a + b + +", {"max_symbols": 0.5}, Drop("share of symbols above 0.5", 0.6)),
        ("ab▶ 日本", {"max_symbols": 0.1}, Drop("share of symbols above 0.1", 0.2)),
        ("abc 1", {"max_digits": 0.25}, None),
        ("abc 12", {"max_digits": 0.25}, Drop("share of digits above 0.25", 0.4)),
        ("abcd ٣", {"min_digits": 0.3}, Drop("share of digits below 0.3", 0.2)),
        ("AbCd 1 !!", {"max_upper_case": 0.5}, None),
        ("ABCd É", {"max_upper_case": 0.5}, Drop("share of capitals above 0.5", 0.8)),
        ("123", {"max_upper_case": 0.5, "min_upper_case": 0.0}, None),
        ("ab, c.", {"max_punctuation": 0.4}, None),
        ("a, c.", {"max_punctuation": 0.4}, Drop("share of punctuation above 0.4", 0.5)),
        ("abcde", {"min_punctuation": 0.1}, Drop("share of punctuation below 0.1", 0.0)),
        ("see http://a.b/c and", {"max_urls": 0.67}, None),
        ("see HTTPS://a.b/c www.x.y", {"max_urls": 0.6}, Drop("share of characters in URLs above 0.6", 20 / 23)),
        ("a b c 1", {"min_alphabetic_words": 0.75}, None),
        ("a b c 1 2", {"min_alphabetic_words": 0.75}, Drop("share of words with a letter below 0.75", 0.6)),
        ("The cat and me", {"min_stop_words": 0.5}, None),
        ("The cat or me", {"min_stop_words": 0.5}, Drop("share of stop words below 0.5", 0.25)),
        ("Der Hund und ich", {"min_stop_words": 0.5, "stop_words": ["der", "und"]}, None),
        ("The cat, the dog", {"min_stop_word_count": 2}, None),
        ("The cat, a dog", {"min_stop_word_count": 2}, Drop("fewer than 2 stop words", 1)),
        ("", {"max_symbols": 0.1, "max_urls": 0.1, "max_stop_words": 0.1}, None),
        ("", {"min_stop_words": 0.1}, Drop("share of stop words below 0.1", 0.0)),
        ("anything #### at all", {}, None),
    ],
)
def test_shares_of_documents(text: str, settings: dict[str, Any], expected: Outcome) -> None:
    assert ratios(text, **settings) == expected


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(any_text, max_size=6), st.sampled_from([1, 3, 1 << 20]))
def test_kinds_are_counted_as_character_by_character(texts: list[str], block: int) -> None:
    """Whatever the blocks; beyond the second plane everything is a letter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_BLOCK_CHARS", block)
        counts = measure._kind_counts(texts)
    for text, found in zip(texts, counts, strict=True):
        near = [mark for mark in text if ord(mark) < 0x20000]
        categories = [unicodedata.category(mark) for mark in near if not mark.isspace()]
        assert found[measure._SPACE] == sum(mark.isspace() for mark in near)
        assert found[measure._DIGIT] == categories.count("Nd")
        assert found[measure._UPPER] == categories.count("Lu") + categories.count("Lt")
        assert found[measure._PUNCTUATION] == sum(category[0] == "P" for category in categories)
        assert found[measure._SYMBOL] == sum(category[0] == "S" for category in categories)
        assert found.sum() == len(text)


def test_documents_are_measured_together_as_apart() -> None:
    texts = ["one 1", "", "TWO 22", "three!"]
    step = ShareBounds(RatiosSpec(max_digits=0.3, max_upper_case=0.5, max_punctuation=0.1, max_stop_words=0.5))
    assert step.find_violations(texts) == [step.find_violations([text])[0] for text in texts]
    assert [found and found[0] for found in step.find_violations(texts)] == [
        None, None, "share of digits above 0.3", "share of punctuation above 0.1",
    ]  # fmt: skip


def test_lines_go_and_empty_ones_stay() -> None:
    text = "A line of text.\n\n1234567890\nABC DEF\nanother line\nx\n"
    assert kept_lines(text) is None
    assert kept_lines(text, max_digits=0.5) == "A line of text.\n\nABC DEF\nanother line\nx\n"
    assert kept_lines(text, max_upper_case=0.5) == "A line of text.\n\n1234567890\nanother line\nx\n"
    assert kept_lines(text, min_chars=7, max_chars=14) == "\n1234567890\nABC DEF\nanother line\n"
    assert kept_lines(text, min_words=2) == "A line of text.\n\nABC DEF\nanother line\n"
    assert kept_lines(text, min_stop_words=0.2) == "A line of text.\n\n"
    assert kept_lines(text, min_alphabetic_words=0.5, max_urls=0.1) == "A line of text.\n\nABC DEF\nanother line\nx\n"


def test_a_document_of_which_too_little_is_left_goes() -> None:
    text = "12345\nabcde"
    assert kept_lines(text, max_digits=0.5, min_kept=0.5) == "abcde"
    assert kept_lines(text, max_digits=0.5, min_kept=0.51) == Drop("less than 0.51 left", 0.5)
    assert kept_lines("12345\n678", max_digits=0.5) == Drop("no line left", 0.0)
    assert kept_lines("", max_digits=0.5, min_kept=0.5) is None


def test_a_megabyte_of_one_character_is_measured() -> None:
    """Inputs on which a backtracking pattern would take quadratic time."""
    settings: dict[str, Any] = {"max_urls": 0.1, "max_digits": 0.1, "min_stop_words": 0.1}
    urls, stop_words = Drop("share of characters in URLs above 0.1", 1.0), Drop("share of stop words below 0.1", 0.0)
    for text in ("http://" * 30_000, "www." * 50_000):
        assert ratios(text, **settings) == urls
    for text in ("w" * 1_000_000, "\n" * 200_000, "😀" * 200_000):
        assert ratios(text, **settings) == stop_words
        expected = Drop("fewer than 1 lines", 0) if text.isspace() else None
        assert length(text, min_words=1, min_lines=1, min_bytes=1) == expected
    assert kept_lines("the\nw\n" * 10_000, **settings) == "the\n" * 10_000
