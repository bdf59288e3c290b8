"""Exact duplicates: which URLs and texts count as the same, and the same outcome for any parts, batches and workers."""

from typing import Any

import numpy as np
import pytest

import bessemer.data.curate.dedup.shuffle as shuffle
from bessemer.data.curate.dedup.exact import DedupExact, DedupUrl, hash_128, normal_url, simplify
from bessemer.data.curate.step import Drop, is_global, make_step
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import TRACKING, DedupExactSpec, DedupUrlSpec

SAME = "//example.org/a"


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://example.org/a", SAME),
        ("https://EXAMPLE.org/a/", SAME),
        ("HTTPS://example.org:443/a#part", SAME),
        ("http://example.org:80/a?utm_source=x&fbclid=1", SAME),
        ("//example.org./a", SAME),
        ("  example.org/a ", SAME),
        ("http://example.org/%61", SAME),
        ("http://example.org:8080/a", "//example.org:8080/a"),
        ("http://example.org:443/a", "//example.org:443/a"),  # the default of another scheme
        ("http://example.org/A", "//example.org/A"),
        ("http://example.org/a?b=1&utm_x=2&c", "//example.org/a?b=1&c"),
        ("http://example.org/a?UTM_Source=2", SAME),
        ("http://example.org/a?futm_=1", "//example.org/a?futm_=1"),
        ("http://example.org/%e4%2f", "//example.org/%E4%2F"),
        ("http://user@example.org/a", "//user@example.org/a"),
        ("http://[2001:DB8::1]:80/a", "//[2001:db8::1]/a"),
        ("ftp://example.org:21/a", "ftp://example.org/a"),
        ("http://example.org", "//example.org"),
        ("http://example.org/?", "//example.org"),
        ("http://example.org:port/a", "http://example.org:port/a"),
        ("http://[half", "http://[half"),
    ],
)
def test_spellings_of_an_address(url: str, normal: str) -> None:
    assert normal_url(url, TRACKING) == normal


def test_the_query_can_be_left_out() -> None:
    assert normal_url("http://example.org/a?b=1", ignore_query=True) == SAME


def test_of_one_address_one_document_stays(run_step: Any, documents: Any) -> None:
    urls = ["http://a.org/x", "", "https://a.org/x/", "http://a.org/y", "   ", "http://A.org/x#z"]
    docs = documents(["short", "same", "the longest", "b", "same", "middle"], url=urls)
    ran = run_step(DedupUrl(DedupUrlSpec(), 0), docs, parts=2)
    assert ran.outcomes == [
        None,
        None,
        Drop("duplicate of an earlier document", "a.jsonl:1"),
        None,
        None,
        Drop("duplicate of an earlier document", "a.jsonl:1"),
    ]
    assert ran.summary["documents"] == 4
    longest = run_step(DedupUrl(DedupUrlSpec(keep="longest"), 0), docs, parts=2)
    assert longest.dropped == [0, 5]
    assert longest.outcomes[5] == Drop("duplicate of a document that stays", "a.jsonl:3")


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({}, [0, 1]),
        ({"ignore_whitespace": False}, []),
        ({"ignore_case": True}, [0, 1, 2]),
        ({"ignore_punctuation": True}, [0, 1, 3]),
        ({"ignore_case": True, "ignore_punctuation": True}, [0, 1, 2, 3]),
    ],
)
def test_differences_that_are_ignored(
    run_step: Any, documents: Any, settings: dict[str, bool], same: list[int]
) -> None:
    docs = documents(["One two", "\tOne  two\n", "ONE two", "One, two!", "one three"])
    ran = run_step(DedupExact(DedupExactSpec(**settings), 0), docs)
    assert ran.dropped == same[1:]


def test_letters_with_marks_are_not_punctuation() -> None:
    spec = DedupExactSpec(ignore_punctuation=True)
    assert simplify("कि. की", spec) == "कि की"
    assert simplify("a—b «c» $5", spec) == "ab c 5"


def test_hashes_are_the_same_everywhere() -> None:
    key, check = hash_128(["bessemer"])
    assert (int(key[0]), int(check[0])) == (15911448180655979728, 2223995558679933253)


def test_empty_and_blank_texts_are_duplicates_of_each_other(run_step: Any, documents: Any) -> None:
    assert run_step(DedupExact(DedupExactSpec(), 0), documents(["", "x", " \n", ""])).dropped == [2, 3]


def corpus(documents: Any) -> Any:
    draw = np.random.default_rng(3)
    return documents([f"text {draw.integers(60)}" for _ in range(200)])


@pytest.mark.parametrize("step", [DedupExact(DedupExactSpec(), 0), DedupExact(DedupExactSpec(keep="longest"), 0)])
def test_parts_batches_buckets_and_workers_make_no_difference(
    run_step: Any, documents: Any, pool: Any, monkeypatch: pytest.MonkeyPatch, step: DedupExact
) -> None:
    docs = corpus(documents)
    ran = run_step(step, docs)
    seen: set[str] = set()
    again = [one.text in seen or seen.add(one.text) is not None for one in docs]
    if step.spec.keep == "first":
        assert ran.dropped == [i for i, one in enumerate(again) if one]
    for parts, batch, gaps in ((1, 1, 0), (3, 7, 0), (200, 5, 0), (7, 50, 3)):
        other = run_step(step, docs, parts, batch, gaps)
        assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)
    other = run_step(step, docs, 5, 9, each=pool)
    assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 100)
    other = run_step(step, docs, 5, 9)
    assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)


def test_a_part_with_nothing_left_takes_no_harm(run_step: Any, documents: Any, collect: Any, tmp_path: Any) -> None:
    step = DedupExact(DedupExactSpec(), 0)
    collected = collect(step, documents(["a", "b", "a"]), tmp_path / "collected", parts=3)
    np.savez(collected[1].path)  # its only document was dropped by an earlier step
    (tmp_path / "scratch").mkdir()
    decisions, summary = step.resolve(collected, tmp_path / "scratch", lambda f, tasks: [f(task) for task in tasks])
    assert [part["ordinal"].tolist() for part in decisions] == [[], [], [0]]
    assert summary["documents"] == 2


def test_truncated_files_are_refused_by_name(documents: Any, collect: Any, tmp_path: Any) -> None:
    step = DedupExact(DedupExactSpec(), 0)
    collected = collect(step, documents(["a", "b", "a"]), tmp_path / "collected", parts=3)
    collected[1].path.write_bytes(collected[1].path.read_bytes()[:-100])
    (tmp_path / "scratch").mkdir()
    with pytest.raises(UserError, match="part 1 of source 'web'"):
        step.resolve(collected, tmp_path / "scratch", lambda f, tasks: [f(task) for task in tasks])


def test_no_documents_at_all(run_step: Any) -> None:
    ran = run_step(DedupExact(DedupExactSpec(), 0), [], parts=2)
    assert (ran.outcomes, ran.summary["documents"]) == ([], 0)


def test_the_step_is_made_by_its_name() -> None:
    assert is_global(make_step(DedupUrlSpec(), 0))
    assert is_global(make_step(DedupExactSpec(), 0))
