"""Repeated paragraphs: by hand, and against a plain dictionary for any parts, batches and workers."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bessemer.data.curate.dedup.shuffle as shuffle
from bessemer.data.curate.dedup.exact import DedupParagraphs, split
from bessemer.data.curate.step import Drop
from bessemer.spec.curate.dedup import DedupParagraphsSpec

A, B, C = ("The first paragraph, " * 3, "Another one here. " * 4, "And the third of them; " * 3)


def step(**settings: Any) -> DedupParagraphs:
    return DedupParagraphs(DedupParagraphsSpec(**{"min_left_chars": 0, "min_chars": 3, **settings}), 0)


def test_paragraphs_after_the_first_occurrence_go(run_step: Any, documents: Any) -> None:
    texts = [f"{A}\n\n{B}", f"own\n\n{A}\n\nrest", f"{C}\n \n\n{B}\n\n", A]
    ran = run_step(step(), documents(texts), parts=2)
    assert ran.texts(texts) == [texts[0], "own\n\nrest", f"{C}\n \n\n", ""]
    assert ran.summary == {
        "paragraphs": 8,
        "repeats": 3,
        "most_frequent": [
            {"count": 3, "first": "a.jsonl:1", "paragraph": 1},
            {"count": 2, "first": "a.jsonl:1", "paragraph": 2},
        ],
    }


def test_lines(run_step: Any, documents: Any) -> None:
    texts = ["one\ntwo\n\nthree", "two\nfour\nthree\n", "one\n\n\nfive"]
    ran = run_step(step(unit="line"), documents(texts))
    assert ran.texts(texts) == ["one\ntwo\n\nthree", "four\n", "\n\nfive"]


def test_a_paragraph_twice_in_one_document(run_step: Any, documents: Any) -> None:
    assert run_step(step(), documents([f"{A}\n\n{B}\n\n{A}"])).outcomes == [f"{A}\n\n{B}"]


def test_short_ones_are_left_alone_at_the_threshold(run_step: Any, documents: Any) -> None:
    texts = ["abcd\n\nabcde", "abcd\n\nabcde", " abcd \n\nx"]
    ran = run_step(step(min_chars=5), documents(texts))
    assert ran.texts(texts) == [texts[0], "abcd", texts[2]]
    assert run_step(step(min_chars=6), documents(texts)).texts(texts) == texts


def test_how_often_one_must_occur(run_step: Any, documents: Any) -> None:
    texts = [f"{A}\n\n{B}", f"{A}\n\n{B}", f"x\n\n{A}"]
    assert run_step(step(min_count=3), documents(texts)).texts(texts) == [texts[0], B, "x"]
    assert run_step(step(min_count=4), documents(texts)).texts(texts) == texts


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({}, [1, 2]),
        ({"ignore_case": False}, [2]),
        ({"ignore_whitespace": False}, [1]),
        ({"ignore_punctuation": True}, [1, 2, 3]),
    ],
)
def test_differences_that_are_ignored(
    run_step: Any, documents: Any, settings: dict[str, bool], gone: list[int]
) -> None:
    texts = ["One two, three", "ONE two, three", "One  two,\nthree", "One two three"]
    ran = run_step(step(min_left_chars=1, **settings), documents(texts))
    assert ran.dropped == gone


def test_too_little_left(run_step: Any, documents: Any) -> None:
    texts = [A, f"{A}\n\nabcdef", f"{A}\n\nabcde", "tiny"]
    ran = run_step(step(min_left_chars=6), documents(texts))
    assert ran.outcomes == [
        None, "abcdef", Drop("too little left without repeated paragraphs", 5.0), None,
    ]  # fmt: skip


def test_splitting_loses_nothing() -> None:
    for text in ("", "a", "\n\n", "a\n\nb", "\n\na \n\t\n\n b\n\n", "a\n\n\n\nb\nc"):
        for unit in ("paragraph", "line"):
            pieces = split(text, unit)
            assert pieces[0][0] == 0
            assert [piece[2] for piece in pieces[:-1]] == [piece[0] for piece in pieces[1:]]
            assert pieces[-1][1:] == (len(text), len(text))
    assert [one[:2] for one in split("a\n \n\nb\nc", "paragraph")] == [(0, 1), (5, 8)]


def paragraphs_by_hand(text: str) -> list[tuple[int, int]]:
    """The same without a regular expression that can backtrack: white space is skipped, then its last newline found."""
    spans, start, at = [], 0, text.find("\n")
    while at >= 0:
        word = re.compile(r"\S").search(text, at)
        last = text.rfind("\n", at + 1, word.start() if word else len(text))
        if last >= 0:
            spans.append((start, at))
            start = last + 1
        at = text.find("\n", max(at, last) + 1)
    return [*spans, (start, len(text))]


@pytest.mark.parametrize(
    "text",
    ["\n" * 10**6, "\n " * 500_000, " " * 10**6, pytest.param("a\n" * 500_000, marks=pytest.mark.slow),
     "\n" + " " * 10**6],
)  # fmt: skip
def test_long_runs_are_split_as_by_hand(text: str) -> None:
    """Inputs on which a backtracking pattern would take quadratic time."""
    assert [piece[:2] for piece in split(text, "paragraph")] == paragraphs_by_hand(text)
    assert [end - start for start, end, _ in split(text, "line")] == list(map(len, text.split("\n")))


texts = st.lists(
    st.lists(st.sampled_from(["aaa", "bbb", "AAA", "c", "ddd"]), max_size=6).map("\n\n".join), min_size=1, max_size=9
)


@given(texts, st.integers(2, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from([60, 10**6]))
@settings(max_examples=60)
def test_as_with_a_dictionary(
    run_step: Any, documents: Any, some: list[str], least: int, parts: int, batch: int, limit: int
) -> None:
    def key(paragraph: str) -> str | None:
        return paragraph.lower() if len(paragraph) >= 3 else None

    counts = Counter(key(paragraph) for text in some for paragraph in text.split("\n\n"))
    seen, expected = set(), []
    for text in some:
        kept = []
        for paragraph in text.split("\n\n"):
            one = key(paragraph)
            if one is None or counts[one] < least or one not in seen:
                kept.append(paragraph)
            seen.add(one)
        expected.append("\n\n".join(kept))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BUCKET_BYTES", limit)
        ran = run_step(step(min_count=least), documents(some), parts, batch, gaps=2)
    assert ran.texts(some) == expected


def test_workers_make_no_difference(run_step: Any, documents: Any, pool: Any) -> None:
    texts = [f"own {i}\n\n{(A, B, C)[i % 3]}\n\n{A}" for i in range(20)]
    ran = run_step(step(), documents(texts))
    other = run_step(step(), documents(texts), 6, 3, each=pool)
    assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)
