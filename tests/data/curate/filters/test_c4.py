"""C4's rules: which lines go, which documents, and in what order the rules look."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.data.curate.filters.heuristics import C4
from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.read.entry import Document
from bessemer.spec.text_steps import C4Spec

FIVE = "One is here. Two is here. Three is here. Four is here. Five is here."


def c4(text: str, **settings: Any) -> Outcome:
    return C4(C4Spec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


@pytest.mark.parametrize(
    ("line", "settings", "kept"),
    [
        ("This line has an end.", {}, True),
        ("Does this line have one?", {}, True),
        ("It does!", {"min_line_words": 2}, True),
        ('He said "it does"', {}, True),
        ("He said 'it does'", {}, True),
        ("This line has none", {}, False),
        ("This line has none", {"line_end_punctuation": False}, True),
        ("This line trails off...", {}, False),
        ("This line trails off…", {}, False),
        ("Two words.", {}, False),
        ("Two words.", {"min_line_words": 0}, True),
        ("And three words.", {}, True),
        ("Please enable JavaScript here.", {}, False),
        ("Please enable JavaScript here.", {"drop_javascript_lines": False}, True),
        ("Please enable Java[1]Script here.", {}, False),  # once the citation is out
        ("See our Privacy Policy here.", {}, False),
        ("See our Privacy Policy here.", {"drop_policy_lines": False}, True),
        ("This site uses cookies, sorry.", {}, False),
        ("A word " + "x" * 1000 + " too.", {}, True),
        ("A word " + "x" * 1001 + " too.", {}, False),
        ("A word " + "x" * 1001 + " too.", {"max_word_chars": None}, True),
    ],
)
def test_lines(line: str, settings: dict[str, Any], kept: bool) -> None:
    outcome = c4(f"{FIVE}\n{line}", **settings)
    assert outcome == (None if kept else FIVE)


def test_citations_go_after_words_are_counted() -> None:
    assert c4(f"{FIVE}\nOne [1] more.[citation needed]") == f"{FIVE}\nOne  more."
    assert c4(f"{FIVE}\nOne more.[edit]", min_line_words=2) == f"{FIVE}\nOne more."
    assert c4(f"{FIVE}\nIs kept [x][12a].") is None
    assert c4(f"{FIVE}\nOne [1] more.", remove_citations=False) is None


def test_white_space_around_lines_and_empty_lines_go() -> None:
    assert c4(f"\n  {FIVE} \r\n\n Another line here. \n") == f"{FIVE}\nAnother line here."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{FIVE}\nLorem IPSUM dolor sit amet.", "contains lorem ipsum"),
        (f"{FIVE}\nLorem ipsum dolor sit amet", None),  # the line went before
        (f"{FIVE}\nA function f() {{ is here.", "contains a curly bracket"),
        (f"{FIVE}\nA function f() {{ is here", None),
        (f"{FIVE}\nThis javascript {{ goes first.", None),
        (f"{FIVE}\nWe use cookies and {{ here.", "contains a curly bracket"),
        ("One two three. " * 4, "fewer than 5 sentences"),
        ("One two three. " * 5, None),
        ("One two three.\n" * 4, "fewer than 5 sentences"),
        ("One two three.\n" * 5, None),
        ("One two three.\n" * 3 + "Four is. Five is.", None),
        ("", "fewer than 5 sentences"),
    ],
)
def test_documents(text: str, expected: str | None) -> None:
    outcome = c4(text)
    assert (outcome.reason if isinstance(outcome, Drop) else None) == expected


def test_settings_switch_document_rules_off() -> None:
    text = "Lorem ipsum { dolor."
    assert c4(text, drop_lorem_ipsum=False, drop_curly_brackets=False, min_sentences=0) is None
    assert c4("no end", min_sentences=None) == Drop("no line left")


def test_the_paragraph_rule_of_mc4() -> None:
    settings: dict[str, Any] = {"min_paragraphs": 3, "min_sentences": 0, "line_end_punctuation": False}
    line = "word " * 40  # 200 characters
    assert c4("\n".join([line] * 3), **settings) == "\n".join([line.strip()] * 3)
    reason = "fewer than 3 lines of 200 characters"
    assert c4("\n".join([line, line, line[:-1]]), **settings) == Drop(reason, 2)
    assert c4("\n".join([line, line]), **settings) == Drop(reason, 2)
    assert isinstance(c4("\n".join([line] * 3), **(settings | {"min_paragraphs": 4})), Drop)


def test_the_count_of_sentences_is_reported() -> None:
    assert c4("One two three. Four five six.") == Drop("fewer than 5 sentences", 2)


@pytest.mark.slow
def test_the_sentences_of_a_megabyte_are_counted() -> None:
    """Inputs on which a backtracking pattern would take quadratic time; lines without prose are dropped first."""
    counts = {"[": 0, "[1": 0, "it. ": 250_000, "a. ": 1, ". ": 1, "a.\n": 0}  # `a.` is one word, an initial
    for piece, count in counts.items():
        assert c4(piece * (1_000_000 // len(piece)), min_sentences=10**7) == Drop(
            "fewer than 10000000 sentences", count
        )
