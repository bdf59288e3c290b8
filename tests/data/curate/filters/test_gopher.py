"""Gopher's rules: each limit at, above and below; repetition as the sequential definition has it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.curate.filters import heuristics as repetition_module
from bessemer.data.curate.filters.heuristics import (
    GopherQuality,
    GopherRepetition,
    Runs,
    count_repeated,
    split_lines,
    split_paragraphs,
)
from bessemer.data.curate.filters.word_splitter import split
from bessemer.data.curate.filters.words import Words
from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.read.entry import Document
from bessemer.spec.text_steps import GopherQualitySpec, GopherRepetitionSpec


def quality(text: str, **settings: Any) -> Outcome:
    return GopherQuality(GopherQualitySpec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


def repetition(text: str, **settings: Any) -> Outcome:
    return GopherRepetition(GopherRepetitionSpec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


def reason(outcome: Outcome) -> str | None:
    assert outcome is None or isinstance(outcome, Drop)
    return outcome.reason if outcome else None


OFF: dict[str, Any] = dict.fromkeys(GopherQualitySpec.model_fields) | {"stop_words": ["the", "be"]}
GOOD = "the cows have come to this field and they rest with each other there " * 4  # 56 words


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("word " * 49, {"min_words": 50}, "fewer than 50 words"),
        ("word " * 50, {"min_words": 50}, None),
        ("word , " * 49, {"min_words": 50}, "fewer than 50 words"),  # punctuation is no word here
        ("word " * 50, {"min_words": 0}, None),
        ("word " * 11, {"max_words": 10}, "more than 10 words"),
        ("word " * 10 + ". " * 9, {"max_words": 10}, None),
        ("ab abc", {"min_word_length": 3}, "mean word length below 3"),
        ("ab abcd", {"min_word_length": 3}, None),
        ("abcd abcde", {"max_word_length": 4}, "mean word length above 4"),
        ("abcd , abcd .", {"max_word_length": 4}, None),
        ("# a b c d e f g h", {"max_hashes": 0.1}, "more than 0.1 # for each word"),
        ("# a b c d e f g h i", {"max_hashes": 0.1}, None),
        ("# a", {"max_hashes": None}, None),
        ("... a b c d e f g h", {"max_ellipses": 0.1}, "more than 0.1 ellipses for each word"),
        ("… a b c d e f g h", {"max_ellipses": 0.1}, "more than 0.1 ellipses for each word"),
        ("... a b c d e f g h i", {"max_ellipses": 0.1}, None),
        ("- a\n • b\nc", {"max_bullet_lines": 0.6}, "lines that start with a bullet above 0.6"),
        ("- a\n b-c-\nc", {"max_bullet_lines": 0.6}, None),
        ("- a\r\n• b\rc", {"max_bullet_lines": 0.6}, "lines that start with a bullet above 0.6"),
        ("-", {"max_bullet_lines": 0.9}, "lines that start with a bullet above 0.9"),
        ("a... \nb…\nc", {"max_ellipsis_lines": 0.6}, "lines that end with an ellipsis above 0.6"),
        ("a... \nb…c\nc", {"max_ellipsis_lines": 0.6}, None),
        ("a b c 1", {"min_alphabetic_words": 0.8}, "words with a letter below 0.8"),
        ("a b c d 1", {"min_alphabetic_words": 0.8}, None),
        ("a b x1 2y !", {"min_alphabetic_words": 0.8}, None),
        ("the end the", {"min_stop_words": 2}, "fewer than 2 different stop words"),
        ("the end to be", {"min_stop_words": 2}, None),
        ("(the be)", {"min_stop_words": 2}, None),  # found among the words, not only between spaces
        ("The end to be", {"min_stop_words": 2}, "fewer than 2 different stop words"),
        ("the ", {"min_stop_words": 0}, None),
    ],
)
def test_quality_limits(text: str, settings: dict[str, Any], expected: str | None) -> None:
    assert reason(quality(text, **(OFF | settings))) == expected


def test_quality_reports_the_first_rule_broken_and_the_value() -> None:
    assert quality(GOOD) is None
    assert quality("1 2 #") == Drop("fewer than 50 words", 2)
    assert quality("ab " * 100) == Drop("mean word length below 3", 2.0)
    assert quality("1234 " * 100) == Drop("words with a letter below 0.8", 0.0)


@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "#"])
def test_documents_without_words_raise_nothing(text: str) -> None:
    assert reason(quality(text)) == "fewer than 50 words"
    assert isinstance(quality(text, min_words=0), Drop)
    assert reason(repetition(text)) in (None, "repeated lines above 0.3", "characters in the top 2-gram above 0.2")


# Repetition


def naive_repetition(text: str, top: dict[int, float], again: dict[int, float]) -> str | None:
    """The definition, one step at a time."""
    found = [word for chunk in text.split() for word in split(chunk)]
    for n, most in top.items():
        if naive_top_chars(found, n) / len(text) > most:
            return f"characters in the top {n}-gram above {most:g}"
    for n, most in again.items():
        if naive_repeated_chars(found, n) / len(text) > most:
            return f"characters in repeated {n}-grams above {most:g}"
    return None


def naive_top_chars(words: list[str], n: int) -> int:
    runs = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not runs:
        return 0
    first = max(dict.fromkeys(runs), key=runs.count)  # of several, the one that comes first
    return len(first) * runs.count(first)


def naive_repeated_chars(words: list[str], n: int) -> int:
    seen, chars, i = set(), 0, 0
    while i < len(words) - n + 1:
        run = "".join(words[i : i + n])
        if run in seen:
            chars += len(run)
            i += n
        else:
            seen.add(run)
            i += 1
    return chars


NGRAMS_ONLY: dict[str, Any] = {
    "max_repeated_lines": 0,
    "max_repeated_line_chars": 0,
    "max_repeated_paragraphs": None,
    "max_repeated_paragraph_chars": None,
}
few_words = st.lists(st.sampled_from(["a", "b", "ab", "bc", "c", "abc", "the", "ox,", "don't"]), max_size=60)
limits = st.dictionaries(st.integers(1, 11), st.sampled_from([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7]), max_size=4)


@given(few_words.map(" ".join), limits, limits)
def test_ngrams_are_judged_as_by_the_sequential_definition(
    text: str, top: dict[int, float], again: dict[int, float]
) -> None:
    top, again = dict(sorted(top.items())), dict(sorted(again.items()))
    expected = naive_repetition(text, top, again) if text else None
    assert reason(repetition(text, max_top_ngrams=top, max_repeated_ngrams=again, **NGRAMS_ONLY)) == expected


@given(few_words.map(" ".join))
def test_characters_in_runs_are_counted_exactly(text: str) -> None:
    found = [word for chunk in text.split() for word in split(chunk)]
    spans = Words().spans(text)
    ns = [1, 2, 3, 5, 8]
    counted = list(Runs(spans, gap=0).repeated_chars(ns))
    assert counted == [naive_repeated_chars(found, n) for n in ns]
    runs = Runs(spans, gap=1)
    assert [runs.top_share(n, 1, most=0.0) for n in ns] == [naive_top_chars(found, n) for n in ns]


def test_long_texts_are_counted_one_n_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Words().spans("a b a b a c a b c a b " * 20)
    together = list(Runs(spans, gap=0).repeated_chars([2, 3, 7]))
    monkeypatch.setattr(repetition_module, "_LONG_WORDS", 10)
    assert list(Runs(spans, gap=0).repeated_chars([2, 3, 7])) == together


def test_a_character_zero_is_a_character() -> None:
    spans = Words().spans("b a\0 b a")
    assert list(Runs(spans, gap=0).repeated_chars([2])) == [0]


def test_repeated_runs_are_compared_as_joined_text() -> None:
    text = "a bc x y z ab c x y z"  # the same ten characters, cut elsewhere
    assert naive_repetition(text, {}, {5: 0.1}) == "characters in repeated 5-grams above 0.1"
    settings = {"max_top_ngrams": {}, "max_repeated_ngrams": {5: 0.1}}
    assert reason(repetition(text, **NGRAMS_ONLY, **settings)) == "characters in repeated 5-grams above 0.1"
    # The most frequent run is one of words: a bc and ab c are two.
    text = "a bc x ab c y a bc z ab c"
    assert repetition(text, **NGRAMS_ONLY, max_top_ngrams={2: 8 / 25}, max_repeated_ngrams={}) is None
    assert isinstance(repetition(text, **NGRAMS_ONLY, max_top_ngrams={2: 7 / 25}, max_repeated_ngrams={}), Drop)


def test_of_runs_that_are_as_frequent_the_first_counts() -> None:
    text = "aa bb cccccccc dddddddd " * 2
    assert top_share(text, 2) == 2 * len("aa bb") / len(text)
    swapped = "cccccccc dddddddd aa bb " * 2
    assert top_share(swapped, 2) == 2 * 17 / len(swapped)


def top_share(text: str, n: int) -> float:
    spans = Words().spans(text)
    return Runs(spans, gap=1).top_share(n, len(text), most=0.0)


def test_one_run_in_a_tiny_text_is_a_top_run() -> None:
    assert reason(repetition("two words")) == "characters in the top 2-gram above 0.2"


@given(st.text(st.sampled_from("ab\n "), min_size=1, max_size=30))
def test_paragraphs_and_lines_are_cut_as_by_the_published_patterns(text: str) -> None:
    assert split_paragraphs(text) == re.split(r"\n{2,}", text.strip())
    assert sorted(split_lines(text)) == sorted(re.split("\n+", text))


@given(st.lists(st.sampled_from(["", "a", "bb", "ccc"])))
def test_repeated_blocks_are_counted(blocks: list[str]) -> None:
    again = [block for i, block in enumerate(blocks) if block in blocks[:i]]
    assert count_repeated(blocks) == (len(again), sum(map(len, again)))


def numbered(n: int) -> list[str]:
    return [f"line number {i} is here" for i in range(n)]


BLOCKS_ONLY: dict[str, Any] = {"max_top_ngrams": {}, "max_repeated_ngrams": {}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n".join([*numbered(7), "a", "a", "a", "a"]), None),  # 3 of 11 lines
        ("\n".join([*numbered(6), "a", "a", "a", "a"]), None),  # 3 of 10: not above 0.3
        ("\n".join([*numbered(5), "a", "a", "a", "a"]), "repeated lines above 0.3"),
        ("\n".join([*numbered(3), "x" * 60, "x" * 60]), "characters in repeated lines above 0.2"),
        ("\n".join([*numbered(9), "x" * 60, "x" * 60]), None),
        ("\n\n".join([*numbered(2), "a b", "a b", "a b"]), "repeated paragraphs above 0.3"),
        ("\n\n".join([*numbered(3), "x\n" * 30, "x\n" * 30]), "characters in repeated paragraphs above 0.2"),
    ],
)
def test_repeated_lines_and_paragraphs(text: str, expected: str | None) -> None:
    assert reason(repetition(text, **BLOCKS_ONLY)) == expected


def test_a_limit_of_zero_or_none_is_off() -> None:
    text = "again and again\n" * 50
    assert isinstance(repetition(text), Drop)
    assert repetition(text, **NGRAMS_ONLY, **BLOCKS_ONLY) is None
    assert repetition(text, **NGRAMS_ONLY, max_top_ngrams={2: 0}, max_repeated_ngrams={5: 0.0}) is None


def test_outcomes_do_not_depend_on_the_batch() -> None:
    documents = [Document(text, "file", i) for i, text in enumerate([GOOD, "ab " * 100, "1 2 3", GOOD * 3])]
    for step in (GopherQuality(GopherQualitySpec(), seed=0), GopherRepetition(GopherRepetitionSpec(), seed=0)):
        together = step.apply(documents)
        assert [step.apply([document])[0] for document in reversed(documents)][::-1] == together


def test_a_megabyte_of_one_word_is_judged_in_linear_time() -> None:
    for text in ("word " * 200_000, "\n" * 1_000_000, "a\n\n" * 300_000, ". " * 500_000):
        assert isinstance(repetition(text), Drop)
        assert isinstance(quality(text), Drop)
    assert repetition("a" * 1_000_000) is None
    assert reason(quality("a" * 1_000_000, min_words=1)) == "mean word length above 10"
