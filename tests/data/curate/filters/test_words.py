"""Words are split as published filters count them, whatever was split before, and in linear time."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.curate.filters import words as words_module
from bessemer.data.curate.filters.word_splitter import FIXED, PUNCTUATION, in_brackets, is_address, split
from bessemer.data.curate.filters.words import BASE, Words, chunk_count, count_sentences, hash_words, pieces, powers

MARKS = "aBcUS.CA$€%+-–—~…'’\"“()[]{}<>:;,=/#@*&^_|!?°©日éЖ0195kmgs³²§`\U0001f600"
chunks = st.text(st.sampled_from(MARKS), min_size=1, max_size=12) | st.sampled_from(sorted(FIXED))
texts = st.lists(chunks | st.sampled_from([" ", "\n", "\t", "  "])).map("".join)


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ("word", "word"),
        ("(word),", "( word ) ,"),
        ("don't", "do n't"),
        ("Don’t", "Do n’t"),
        ("its", "its"),
        ("it's", "it 's"),
        ("dog's", "dog 's"),
        ("cannot", "can not"),
        ("end.", "end ."),
        ("J.", "J."),
        ("AB.", "AB ."),
        ("U.S.", "U.S."),
        ("e.g.,", "e.g. ,"),
        ("wait...", "wait ..."),
        ("...and", "... and"),
        ("…yes……", "… yes ……"),
        ("well-known", "well - known"),
        ("a--b---c", "a -- b --- c"),
        ("1-2", "1 - 2"),
        ("-5", "-5"),
        ("+5", "+5"),
        ("+x", "+ x"),
        ("5km", "5 km"),
        ("50%", "50 %"),
        ("10am", "10 am"),
        ("US$5", "US$ 5"),
        ("5US$", "5 US$"),
        ("3.14", "3.14"),
        ("word.Next", "word . Next"),
        ("a,b", "a , b"),
        ("1,000", "1,000"),
        ("and/or", "and/or"),
        ("this/that", "this / that"),
        ("http://example.com/a-b", "http://example.com/a-b"),
        ("(www.example.com).", "( www.example.com ) ."),
        ("who@example.org,", "who@example.org ,"),
        ("key=value", "key = value"),
        ("foo_bar(x)", "foo_bar(x )"),
        ("__init__", "_ _ init _ _"),
        ("see:)", "see :)"),
        (":-)", ":-)"),
        ("o.O", "o.O"),
        ("20°C.", "20 ° C ."),
        ("日本語。", "日本語 。"),
    ],
)  # fmt: skip
def test_a_chunk_is_split_by_the_published_rules(chunk: str, expected: str) -> None:
    assert " ".join(split(chunk)) == expected


@given(chunks)
def test_the_words_join_to_the_chunk(chunk: str) -> None:
    found = split(chunk)
    assert "".join(found) == chunk
    assert all(found)


ODD_PIECES = "( . … a. a@ a- :) 's 1+ :// a.b/ x= é. 5km n't US$ @. °C. -_ ('.…a.b@:)5km"


@pytest.mark.parametrize("text", ODD_PIECES.split())
def test_long_text_without_a_space_is_split_in_linear_time(text: str) -> None:
    chunk = text * (200_000 // len(text))
    assert sum(map(len, split(chunk))) == len(chunk)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("example.com", True),
        ("ftp://a.example.com:21/x", True),
        ("mailto:me@example.com", True),
        ("8.8.8.8", True),
        ("10.0.0.1", False),
        ("192.168.1.1:8080", False),
        ("lower.Upper", False),
        ("example.c", False),
        ("a..com", False),
        ("-a.com", False),
        ("a" * 64 + ".com", True),
        ("a" * 65 + ".com", False),
        ("example.com:1", False),
    ],
)
def test_addresses_are_kept_whole(text: str, expected: bool) -> None:
    assert is_address(text) is expected


def naive_counts(text: str) -> tuple[int, int, int, int]:
    found = [word for chunk in text.split() for word in split(chunk)]
    plain = [word for word in found if any(mark not in PUNCTUATION for mark in word)]
    letters = [word for word in found if any(mark.isalpha() for mark in word)]
    return len(found), len(plain), sum(map(len, plain)), len(letters)


@given(st.lists(texts, max_size=8), st.sampled_from([0, 3, 1000]))
def test_counts_are_those_of_the_words_whatever_is_remembered(many: list[str], most_chunks: int) -> None:
    memory = Words(max_chunks=most_chunks)
    for text in [*many, *many]:
        assert memory.counts(text) == naive_counts(text)
        assert memory.count(text) == naive_counts(text)[0]
        assert memory.distinct(text) == {word for chunk in text.split() for word in split(chunk)}


@given(texts)
def test_spans_are_those_of_the_words(text: str) -> None:
    found = [word for chunk in text.split() for word in split(chunk)]
    spans = Words().spans(text)
    assert spans.lengths.tolist() == [len(word) for word in found]
    assert spans.hashes.tolist() == [naive_hash(word) for word in found]


def naive_hash(word: str) -> int:
    return sum((ord(mark) + 1) * pow(BASE, i, 1 << 64) for i, mark in enumerate(word)) % (1 << 64)


@given(st.lists(st.text(min_size=1), min_size=1))
def test_the_hash_of_joined_words_follows_from_theirs(parts: list[str]) -> None:
    hashes = hash_words(parts)
    starts = np.cumsum([0, *map(len, parts)][:-1])
    assert int((hashes * powers(starts)).sum(dtype=np.uint64)) == naive_hash("".join(parts))


def test_powers_hold_far_out() -> None:
    exponents = [0, 1, 65535, 65536, 65537, 1_000_000]
    modulus = 1 << 64
    assert powers(np.array(exponents)).tolist() == [pow(BASE, e, modulus) for e in exponents]
    assert powers(np.array(exponents), inverse=True).tolist() == [pow(BASE, -e, modulus) for e in exponents]


def test_a_long_text_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "PIECE_CHARS", 50)
    text = "Some words, don't they? " * 40
    assert len(list(pieces(text))) > 10
    assert Words().counts(text) == naive_counts(text)
    assert Words(max_chunks=2).spans(text).hashes.tolist() == Words().spans(text).hashes.tolist()
    assert chunk_count(text) == 160


def test_memory_of_chunks_is_bounded() -> None:
    memory = Words(max_chunks=100)
    for i in range(2000):
        memory.counts(f"a{i} b{i}")
    assert len(memory._chunks) <= 102
    memory = Words(max_chars=1000)
    for i in range(100):
        memory.counts(f"{i}" * 100)
    assert sum(map(len, memory._chunks)) <= 1300


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", 1),
        ("No end", 1),
        ("One. ", 1),
        ("One. Two", 2),
        ("One. Two.", 2),
        ("Is it? Yes! It is.", 3),
        ("Pi is 3.14 and so on.", 1),
        ("Dr. Who met Mr. X.", 1),
        ('He said "no." (Twice.) Then left.', 3),
        ("One. )", 1),
        ("One.  )", 2),  # a space too many is a word of its own to the published rules
        ("Wait... what?", 1),
        ("終わり。次", 1),  # one piece, of which the mark is inside
        ("終わり。 次", 2),
    ],
)
def test_sentences_are_counted_by_end_marks(line: str, expected: int) -> None:
    assert count_sentences(line, most=100) == expected


def test_sentences_are_counted_no_further_than_asked() -> None:
    assert count_sentences("One. Two. Three. Four.", most=2) == 2


def test_a_class_for_a_regex_has_exactly_its_characters() -> None:
    found = re.findall(f"[{in_brackets('a-]^c' + chr(92))}]", "abc-]^\\[,.")
    assert found == ["a", "c", "-", "]", "^", "\\"]
