"""Folding: which differences do not count, and that every word of the folded text is found again in the text."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bessemer.data.curate.dedup.exact import LETTERS, fold_bytes, word_spans


def words(text: str) -> list[str]:
    """As the shingles see them."""
    letters = re.sub(b"0+", b"0", fold_bytes(text).translate(LETTERS))
    return [word.decode() for word in letters.split(b"\0") if word]


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("Hello, World!", ["hello", "world"]),
        ("don't snake_case a-b", ["don", "t", "snake", "case", "a", "b"]),
        ("Café naïve ÅNGSTRÖM", ["cafe", "naive", "angstrom"]),
        ("cafe\u0301", ["cafe"]),  # the same accent written apart
        ("“quoted”—dash…end", ["quoted", "dash", "end"]),
        ("In 2024, 3.14 and 7", ["in", "0", "0", "0", "and", "0"]),
        ("٢٠٢٤ x9y12", ["0", "x0y0"]),  # digits of any script
        ("soft\u00adhyphen zero\u200bwidth", ["softhyphen", "zerowidth"]),
        ("日本語。中文", ["日", "本", "語", "中", "文"]),
        ("漢字kana", ["漢", "字", "kana"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("ΑΒΓ Привет", ["αβγ", "привет"]),
        ("\t\n \u3000\u00a0", []),
        ("", []),
        ("!?. ...", []),
    ],
)
def test_what_does_not_count(text: str, folded: list[str]) -> None:
    assert words(text) == folded


@given(st.text())
@example("a\u0301\u00adb 漢\u0301字 c")
@example("\u1fef\u037e½ﬁ①ªº")
def test_every_folded_word_is_found_again(text: str) -> None:
    starts, ends = word_spans(text)
    assert len(starts) == len(ends) == len(words(text))
    assert all(a < b for a, b in zip(starts, ends, strict=True))
    assert all(a <= b for a, b in zip(ends[:-1], starts[1:], strict=True))
    assert [words(text[a:b]) for a, b in zip(starts, ends, strict=True)] == [[word] for word in words(text)]


@given(st.text())
@example("ЁЖ 漢字 ½ x—y")
def test_text_that_is_mostly_ascii_is_folded_alike(text: str) -> None:
    """The two ways of folding, by runs and as a whole."""
    assert words(text + " filler" * 200) == words(text) + ["filler"] * 200
