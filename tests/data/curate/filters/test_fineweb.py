"""FineWeb's own rules, at their limits."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.data.curate.filters.heuristics import FineWeb
from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.read.entry import Document
from bessemer.spec.text_steps import FineWebSpec

OFF: dict[str, Any] = {
    "min_ended_lines": None,
    "max_short_lines": 0,
    "max_repeated_line_chars": None,
    "max_newlines": 0,
}


def fineweb(text: str, **settings: Any) -> Outcome:
    return FineWeb(FineWebSpec(**settings), seed=0).apply([Document(text, "file", 1)])[0]


def lines(ended: int, others: int, length: int = 40) -> str:
    """So many lines with and without an end mark, all different."""
    found = [f"{i:x<{length - 1}}." for i in range(ended)] + [f"{i:y<{length}}" for i in range(others)]
    return "\n".join(found)


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (lines(3, 22), {"min_ended_lines": 0.12}, None),
        (lines(3, 23), {"min_ended_lines": 0.12}, "lines that end in punctuation below 0.12"),
        (lines(0, 5), {"min_ended_lines": 0.12}, "lines that end in punctuation below 0.12"),
        (lines(0, 5), {"min_ended_lines": 0.12, "allow_no_ended_lines": True}, None),
        ("Ends so。\nor so؟", {"min_ended_lines": 1.0}, None),
        ('Not "so"', {"min_ended_lines": 0.1}, "lines that end in punctuation below 0.1"),
        ("But so;", {"min_ended_lines": 0.1, "line_ends": ";"}, None),
        ("With a space. ", {"min_ended_lines": 0.1}, "lines that end in punctuation below 0.1"),
        (lines(2, 0, 30) + "\n" + "x" * 31, {"max_short_lines": 0.67}, None),
        (lines(3, 0, 30) + "\n" + "x" * 31, {"max_short_lines": 0.67}, "lines of at most 30 characters above 0.67"),
        (lines(3, 0, 31), {"max_short_lines": 0.67}, None),
        (lines(3, 0, 9), {"max_short_lines": 0.67, "short_line_chars": 9}, "lines of at most 9 characters above 0.67"),
        ("x" * 99 + "\n" + "y\ny", {"max_repeated_line_chars": 0.01}, None),  # 1 of 101 characters
        ("x" * 97 + "\n" + "y\ny", {"max_repeated_line_chars": 0.01}, "characters in repeated lines above 0.01"),
        ("a b c d e f g h\ni j k\n\n", {"max_newlines": 0.3}, None),  # 3 newlines, 11 words
        ("a b c d e f g\nh i\n\n", {"max_newlines": 0.3}, "newlines for each word above 0.3"),
        ("a,b,c,d,e f\n\n\n", {"max_newlines": 0.3}, None),  # 2 pieces, 10 words
        ("a b\n\n\n", {"max_newlines": None}, None),
    ],
)  # fmt: skip
def test_limits(text: str, settings: dict[str, Any], expected: str | None) -> None:
    outcome = fineweb(text, **(OFF | settings))
    assert (outcome.reason if isinstance(outcome, Drop) else None) == expected


@pytest.mark.parametrize("text", ["", "\n", " \n\t"])
def test_empty_documents_go(text: str) -> None:
    assert fineweb(text) == Drop("empty")


def test_rules_are_asked_in_order() -> None:
    assert fineweb("a\na\na") == Drop("lines that end in punctuation below 0.12", 0.0)
    assert fineweb("a.\na.\na.") == Drop("lines of at most 30 characters above 0.67", 1.0)
    assert fineweb("\n".join(["x" * 40 + "."] * 2)) == Drop("characters in repeated lines above 0.01", 0.5)
    assert fineweb("x" * 40 + ".\n") == Drop("newlines for each word above 0.3", 0.5)
    assert fineweb(f"{'x' * 40} y z, w.\n") is None
