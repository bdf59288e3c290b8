"""Repairs change what is broken, and nothing else, hostile text included."""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bessemer.data.curate.filters import repair
from bessemer.data.curate.filters.repair import Boilerplate, Unicode, Whitespace, normalise
from bessemer.data.curate.step import Drop, LocalStep, Outcome
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.text_steps import BoilerplateSpec, UnicodeSpec, WhitespaceSpec

any_text = st.text(st.characters(exclude_categories=["Cs"]))


def run(step: LocalStep, text: str) -> Outcome:
    return step.apply([Document(text, "file", 1)])[0]


def clean(step: LocalStep, text: str) -> str:
    """The text after the step."""
    outcome = run(step, text)
    assert not isinstance(outcome, Drop)
    return text if outcome is None else outcome


def unicode(**settings: Any) -> Unicode:
    return Unicode(UnicodeSpec(**settings), seed=0)


def whitespace(**settings: Any) -> Whitespace:
    return Whitespace(WhitespaceSpec(**settings), seed=0)


def boilerplate(**settings: Any) -> Boilerplate:
    return Boilerplate(BoilerplateSpec(**settings), seed=0)


# Unicode


def test_normal_forms() -> None:
    assert clean(unicode(mojibake=False), "cafe\u0301 ﬁne") == "café ﬁne"
    assert clean(unicode(mojibake=False, form="NFKC"), "cafe\u0301 ﬁne") == "café fine"
    assert run(unicode(mojibake=False, form="none"), "cafe\u0301 ﬁne") is None
    assert run(unicode(mojibake=False), "plain") is None


def test_control_characters_go_and_white_space_stays() -> None:
    text = "a\x00b\x1bc\ufeffd\x7fe\x9ff\ufffeg\tx\ny\rz\x0c\x85\u200dw\U0001ffff"
    assert clean(unicode(mojibake=False), text) == "abcdefg\tx\ny\rz\x0c\x85\u200dw"
    assert run(unicode(mojibake=False, controls=False), text) is None
    assert run(unicode(mojibake=False), "\x00\x01") == Drop("no text")


def test_mojibake_is_repaired_where_it_shows() -> None:
    pytest.importorskip("ftfy")
    text = "The cafÃ© is open.\nâ€œYesâ€\u009d, she said.\nNaïve façade, 100 % Größe."
    assert clean(unicode(), text) == "The café is open.\n“Yes”, she said.\nNaïve façade, 100 % Größe."
    assert run(unicode(), "Naïve façade — 日本語 “fine” Größe") is None
    assert run(unicode(mojibake=False), text.replace("\u009d", "")) is None


def test_lines_are_repaired_one_by_one() -> None:
    pytest.importorskip("ftfy")
    good = "Übergrößenträger 日本語"  # would not survive a repair of the whole text
    assert clean(unicode(), f"{good}\ncafÃ©\n{good}") == f"{good}\ncafé\n{good}"


def test_without_ftfy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(UserError, match=r"pip install 'bessemer\[data\]'"):
        unicode()
    unicode(mojibake=False)


@given(any_text)
def test_the_normal_form_is_unicodes(text: str) -> None:
    assert normalise(text, "NFC") == unicodedata.normalize("NFC", text)
    assert normalise(text, "NFKC") == unicodedata.normalize("NFKC", text)


@given(any_text)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    for step in (unicode(mojibake=False), whitespace(), whitespace(most_spaces=1, plain_spaces=True)):
        once = run(step, text)
        if isinstance(once, str):
            assert run(step, once) is None


@pytest.mark.parametrize("text", ["\u0301\u0323", "\u0f73", "a\u0301\u0323", "Ã", "Ã©", "â€œ", "é ", "\x00\x85"])
def test_hostile_unicode_is_normalised_once_in_short_runs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normalisation sorts each run of marks in quadratic time: every character is passed once, in short runs."""
    pytest.importorskip("ftfy")
    step, normalize, parts = unicode(form="NFKC"), unicodedata.normalize, []
    repair._combining_marks()

    def counted(form: str, part: str) -> str:
        parts.append(part)
        return normalize(form, part)

    monkeypatch.setattr(repair.unicodedata, "normalize", counted)
    run(step, text * (200_000 // len(text)))
    monkeypatch.undo()
    assert 0 < sum(map(len, parts)) <= 200_000
    marks = f"[{repair._combining_marks()}]{{{repair._MAX_MARKS + 1}}}"
    assert not any(re.search(marks, part) for part in parts)


def test_up_to_thirty_marks_are_normalised_together() -> None:
    text = "a" + "\u0301\u0323" * 15
    assert normalise(text, "NFC") == unicodedata.normalize("NFC", text)
    longer = "a" + "\u0301\u0323" * 40 + " and e\u0301"
    assert normalise(longer, "NFC").endswith(" and é")
    assert sorted(unicodedata.normalize("NFD", normalise(longer, "NFC"))) == sorted(longer)


# White space


def test_line_ends_trailing_spaces_and_empty_lines() -> None:
    text = "\n\n  indented\r\nb  \rc\t\x0cd\u2028e\n\n\n\n\n\nf \n \n\n"
    assert clean(whitespace(), text) == "  indented\nb\nc\nd\ne\n\n\nf"
    assert clean(whitespace(most_empty_lines=0), text) == "  indented\nb\nc\nd\ne\nf"
    assert run(whitespace(), "as\n\n\nit  is") is None
    assert run(whitespace(), " \n\t\n") == Drop("no text")


def test_spaces_inside_lines_only_on_request() -> None:
    text = "    a   b\t\tc\u00a0\u00a0d"
    assert run(whitespace(), text) is None
    assert clean(whitespace(most_spaces=1), text) == "    a b c\u00a0\u00a0d"
    assert clean(whitespace(most_spaces=2), text) == "    a  b\t\tc\u00a0\u00a0d"
    assert clean(whitespace(most_spaces=1, plain_spaces=True), text) == "    a b c d"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" ", None),
        ("\n", "x"),
        (" \n", "x"),
        ("\t ", None),
        ("a  ", "a " * 333_333 + "x"),
        ("\r\n", "x"),
        ("\u00a0", " " * 1_000_000 + "x"),
    ],
)
def test_a_megabyte_of_white_space_is_cleaned(text: str, expected: str | None) -> None:
    """Inputs on which a backtracking pattern would take quadratic time."""
    assert run(whitespace(most_spaces=1, plain_spaces=True), text * (1_000_000 // len(text)) + "x") == expected


# Boilerplate

BODY = "A text about something.\n\nIt has paragraphs, too."


@pytest.mark.parametrize(
    "line",
    [
        "We use cookies to improve your experience.",
        "© 2024 Example Inc. All rights reserved.",
        "Share on Facebook",
        "SKIP TO MAIN CONTENT",
        "Home | About | Contact",
        "Home » Shop » Very special shoes » News",
        "Home\nAbout us\n• Contact\n\nLog in",
        "Home\nNews\nContact",
    ],
)
def test_lines_of_the_frame_go(line: str) -> None:
    assert clean(boilerplate(), f"{line}\n{BODY}").strip("\n") == BODY
    assert clean(boilerplate(), f"{BODY}\n{line}").strip("\n") == BODY


@pytest.mark.parametrize(
    "line",
    [
        "Home",
        "Home\nContact",  # two entries are not yet a menu
        "Home\nContact\nThe text goes on.\nNews",
        "a | b | c",
        "The phrase all rights reserved stands here in a line that has far more words than any notice of that kind "
        "would have, and so it stays.",
    ],
)
def test_lines_of_the_text_stay(line: str) -> None:
    assert run(boilerplate(), f"{line}\n{BODY}") is None


def test_the_user_may_add_and_switch_off() -> None:
    text = f"Read our Newsletter\nPage 3 of 9\nShare on Facebook\n{BODY}"
    added = boilerplate(phrases=["OUR newsletter"], patterns=[r"^Page \d+ of \d+$"], builtin=False)
    assert clean(added, text) == f"Share on Facebook\n{BODY}"
    assert run(boilerplate(menu_lines=0), f"Home\nAbout\nContact\n{BODY}") is None
    assert clean(boilerplate(max_words=3), f"we use cookies\nwe use cookies here\n{BODY}").startswith(
        "we use cookies here"
    )
    with pytest.raises(ValidationError, match="is not a regular expression"):
        BoilerplateSpec(patterns=["("])


def test_a_document_of_boilerplate_goes() -> None:
    assert run(boilerplate(), "Accept all cookies\n\n") == Drop("nothing but boilerplate")


def test_a_megabyte_of_menus_is_cleaned() -> None:
    """Inputs on which a backtracking pattern would take quadratic time."""
    for text in ("| " * 500_000, "|\n" * 500_000, " |" * 140 + "\n" + "x" * 1_000_000):
        assert run(boilerplate(), text) is None
    assert run(boilerplate(), "home\n" * 200_000 + "x") == "x"
