"""Shingles against plain Python integers, in any blocks and batches."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bessemer.data.curate.dedup.near as module
from bessemer.data.curate.dedup.exact import LETTERS, fold_bytes
from bessemer.data.curate.dedup.near import shingles
from bessemer.data.stream.order import mix

WORD = 2**64 - 1


def slow_mix(value: int) -> int:
    return int(mix(value & WORD))


def slow_units(text: str, unit: str) -> list[int]:
    letters = re.sub(b"0+", b"0", fold_bytes(text).translate(LETTERS))
    words = [word for word in letters.split(b"\0") if word]
    parts = words if unit == "word" else [c.encode() for c in b" ".join(words).decode()]
    found = []
    for part in parts:
        total = sum(int(module._VALUES[c]) * pow(module._LETTER_BASE, i, 2**64) for i, c in enumerate(part))
        found.append(slow_mix(total + len(part)))
    return found


def slow_shingles(text: str, unit: str, n: int, brief: bool) -> list[int]:
    units = slow_units(text, unit)
    grams = [units[i : i + n] for i in range(len(units) - n + 1)]
    first = 0
    if len(units) < n and units and brief:
        grams, first = [units + [0] * (n - 1 - len(units))], module._SHORT_MARK
    found = []
    for gram in grams:
        total = first
        for unit_hash in gram:
            total = (total * module._UNIT_BASE + unit_hash) & WORD
        found.append(slow_mix(total))
    return found


def fast(texts: list[str], unit: str, n: int, brief: bool = True) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in texts]
    for block in shingles(texts, unit, n, brief):
        ends = [*block.starts[1:].tolist(), block.hashes.size][: block.starts.size]
        for document, first, start, end in zip(
            block.documents.tolist(), block.first.tolist(), block.starts.tolist(), ends, strict=True
        ):
            assert first == len(found[document])
            found[document] += block.hashes[start:end].tolist()
    return found


texts = st.lists(st.text(st.sampled_from("ab1 é漢,\n") | st.characters(codec="utf-8"), max_size=30), max_size=8)


@given(texts, st.sampled_from(["word", "char"]), st.integers(1, 6), st.booleans())
def test_as_in_plain_python(some: list[str], unit: str, n: int, brief: bool) -> None:
    assert fast(some, unit, n, brief) == [slow_shingles(text, unit, n, brief) for text in some]


@given(texts, st.sampled_from(["word", "char"]), st.integers(1, 6), st.integers(4, 40))
@settings(max_examples=200)
def test_blocks_and_batches_make_no_difference(some: list[str], unit: str, n: int, size: int) -> None:
    spaced = [text.strip() and " ".join(text.split()) for text in some]
    whole = fast(spaced, unit, n)
    assert [fast([text], unit, n)[0] for text in spaced] == whole
    longest_word = max((len(word) for text in spaced for word in fold_bytes(text).split(b" ")), default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", max(size, longest_word + 2))
        assert fast(spaced, unit, n) == whole


def test_characters_beyond_ascii_are_one_unit_each() -> None:
    assert [len(one) for one in fast(["日本語の文章です", "abc def", "naïve ж"], "char", 4)] == [12, 4, 4]


def test_a_short_text_is_one_shingle_and_not_that_of_a_longer_one() -> None:
    brief, same, longer, empty = fast(["one two", "One, two!", "one two three", "..."], "word", 5)
    assert len(brief) == len(longer) == 1
    assert brief == same != longer
    assert empty == []
    assert fast(["one two"], "word", 5, brief=False) == [[]]


def test_the_bits_of_hashes_are_even() -> None:
    text = " ".join(f"word{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676)}" for i in range(10_000))
    for unit, n in (("word", 1), ("word", 5), ("char", 24)):
        hashes = np.array(fast([text], unit, n)[0], np.uint64)
        assert np.unique(hashes).size == hashes.size
        bits = np.unpackbits(hashes.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
        assert abs(bits - 0.5).max() < 4.5 * 0.5 / hashes.size**0.5


def test_hashes_are_the_same_on_every_machine() -> None:
    assert fast(["The quick brown fox"], "word", 2) == [
        [11199241091127698856, 11628545771481334912, 15431101841556362243]
    ]
    assert fast(["abc"], "char", 2) == [[7894012649123248414, 14978776629375992283]]


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "a " * 500_000, "é" * 500_000, "1" * 10**6])
def test_a_long_text_of_one_kind_is_no_trouble(text: str) -> None:
    assert len(fast([text], "word", 5)[0]) <= 500_000
