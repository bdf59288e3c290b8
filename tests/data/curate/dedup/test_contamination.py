"""Decontamination: what matches, by hand and against plain sets of n-grams; what is done about it; what is reported."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.curate.dedup.decontaminate import Decontaminate, cut_words
from bessemer.data.curate.step import Drop, step_identity
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import DecontaminateSpec

QUESTION = "Which of these planets is the farthest from the Sun in our own system today"
ANSWER = "Neptune is"


@pytest.fixture
def arc(tmp_path: Path) -> Path:
    rows = [
        {"id": 7, "question": QUESTION, "choices": {"text": [ANSWER, "Mars"], "label": ["A", "B"]}},
        {"id": 8, "question": "How many legs", "choices": {"text": ["8"], "label": ["A"]}},
    ]
    path = tmp_path / "arc.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def step(path: Path, **settings: Any) -> Decontaminate:
    made = {"sets": {"arc": str(path)}, "ngram": 8, "min_left_chars": 0, **settings}
    return Decontaminate(DecontaminateSpec(**made), 0)


CLEAN = "Nothing of the kind stands in this text, although it is about planets far from the Sun."
PART = "Asked: «which of THESE planets is the farthest,  from the Sun...» and no one knew it."


def test_a_document_with_eight_words_of_an_item_goes(run_step: Any, documents: Any, arc: Path) -> None:
    seven = "which of these planets is the farthest moon"
    ran = run_step(step(arc), documents([CLEAN, PART, seven, QUESTION]), parts=2)
    assert ran.dropped == [1, 3]
    name = f"arc {arc}:1: which of THESE planets is the farthest, from"
    assert ran.outcomes[1] == Drop("contains text of an evaluation set", name)
    assert ran.summary == {
        "documents": 4,
        "matching_documents": 2,
        "acted_on": 2,
        "ngram": 8,
        "common_ngrams_skipped": 0,
        "sets": {
            "arc": {
                "items": 2,
                "too_short": 1,
                "contaminated": 1,
                "contaminated_share": 0.5,
                "documents_by_item": {f"{arc}:1": 2},
                "examples": [
                    {
                        "item": f"{arc}:1",
                        "document": "a.jsonl:2",
                        "ngram": "Which of these planets is the farthest from",
                    }
                ],
            }
        },
    }


def test_fields_are_joined_in_the_order_given(run_step: Any, documents: Any, arc: Path) -> None:
    across = "the Sun in our own system today Neptune is"
    assert run_step(step(arc), documents([across])).dropped == [0]
    only = {"arc": {"path": [str(arc)], "fields": ["question"]}}
    assert run_step(step(arc, sets=only), documents([across, QUESTION])).dropped == [1]


def test_only_reporting_leaves_a_label(run_step: Any, documents: Any, arc: Path) -> None:
    docs = documents([CLEAN, QUESTION])
    ran = run_step(step(arc, action="report"), docs)
    assert ran.outcomes == [None, None]
    assert [one.labels for one in docs] == [{}, {"contaminated": "arc"}]
    assert ran.summary["sets"]["arc"]["contaminated"] == 1


def test_what_matches_can_be_cut_out(run_step: Any, documents: Any, arc: Path) -> None:
    ran = run_step(step(arc, action="cut"), documents([CLEAN, PART, f"First. {QUESTION}. Last."]))
    assert ran.outcomes == [None, "Asked: «...» and no one knew it.", "First. . Last."]
    wide = run_step(step(arc, action="cut", margin_chars=5), documents([PART, QUESTION + " end"]))
    assert wide.outcomes == ["Askand no one knew it.", ""]
    left = run_step(step(arc, action="cut", min_left_chars=29), documents([PART, PART + " 12345"]))
    assert left.outcomes[0] == "Asked: «...» and no one knew it."
    left = run_step(step(arc, action="cut", min_left_chars=33), documents([PART]))
    assert left.outcomes == [Drop("too little left without text of evaluation sets", 32.0)]


def test_overlapping_matches_are_cut_once() -> None:
    text = "a b c d e f g h"
    assert cut_words(text, np.array([1, 2, 5]), 2, 0) == "a  e  h"
    assert cut_words(text, np.array([0, 6]), 2, 0) == " c d e f "
    assert cut_words(text, np.array([0]), 8, 3) == ""
    assert cut_words(text, np.array([99]), 2, 0) == text


def test_how_many_matches_are_allowed(run_step: Any, documents: Any, arc: Path) -> None:
    # PART has 10 words in a row of the question: three 8-grams.
    assert run_step(step(arc, max_matches=2), documents([PART])).dropped == [0]
    ran = run_step(step(arc, max_matches=3), documents([PART]))
    assert ran.dropped == []
    assert (ran.summary["matching_documents"], ran.summary["acted_on"]) == (1, 0)


def test_which_share_may_match(run_step: Any, documents: Any, arc: Path) -> None:
    # 10 of its 16 words.
    assert run_step(step(arc, max_share=0.62), documents([PART])).dropped == [0]
    assert run_step(step(arc, max_share=0.625), documents([PART])).dropped == []


def test_boilerplate_of_the_sets_can_be_passed_over(run_step: Any, documents: Any, tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("".join(f"read the text and answer the question below {word}\n" for word in ("a", "b", "c")))
    text = "Please read the text and answer the question below."
    for most, gone in ((2, []), (3, [0]), (None, [0])):
        ran = run_step(step(path, max_items=most), documents([text]))
        assert ran.dropped == gone
        assert ran.summary["common_ngrams_skipped"] == (1 if most == 2 else 0)
    assert ran.summary["sets"]["arc"]["contaminated_share"] == 1.0


def test_several_sets_and_a_compressed_one(run_step: Any, documents: Any, arc: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with gzip.open(tmp_path / "more" / "x.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n\nanother item with quite enough words in it to be found\n")
    sets = {"arc": str(arc), "more": str(tmp_path / "more"), "again": str(arc)}
    texts = [CLEAN, "and another item with quite enough words in it to be found", QUESTION]
    ran = run_step(step(arc, sets=sets), documents(texts), parts=3)
    assert ran.dropped == [1, 2]
    found = {name: one["documents_by_item"] for name, one in ran.summary["sets"].items()}
    assert found == {
        "arc": {f"{arc}:1": 1}, "more": {f"{tmp_path / 'more' / 'x.txt.gz'}:3": 1}, "again": {f"{arc}:1": 1},
    }  # fmt: skip
    assert all(one["examples"][0]["ngram"] for one in ran.summary["sets"].values())


vocabulary = st.lists(st.sampled_from("abcde"), max_size=14).map(" ".join)


@given(st.lists(vocabulary, min_size=1, max_size=5), st.lists(vocabulary, min_size=1, max_size=8), st.data())
@settings(max_examples=80)
@pytest.mark.slow
def test_as_with_plain_sets(
    run_step: Any,
    documents: Any,
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[str],
    texts: list[str],
    data: st.DataObject,
) -> None:
    def grams(text: str) -> list[str]:
        words = text.split()
        return [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]

    path = tmp_path_factory.mktemp("x") / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    most = data.draw(st.none() | st.integers(1, 3))
    count = {gram: sum(gram in grams(row) for row in rows) for row in rows for gram in grams(row)}
    known = {gram for gram, times in count.items() if most is None or times <= most}
    ran = run_step(step(path, ngram=3, max_items=most), documents(texts), data.draw(st.integers(1, 3)), 3, gaps=2)
    assert ran.dropped == [i for i, text in enumerate(texts) if known & set(grams(text))]
    about = ran.summary["sets"]["arc"]
    expected = {}
    for number, row in enumerate(rows, 1):
        hits = sum(bool(known & set(grams(row)) & set(grams(text))) for text in texts)
        if hits:
            expected[f"{path}:{number}"] = hits
    assert about["documents_by_item"] == expected
    assert about["items"] == sum(bool(row.strip()) for row in rows)
    assert about["too_short"] == sum(0 < len(row.split()) < 3 for row in rows)
    for one in about["examples"]:
        row, document = int(one["item"].rpartition(":")[2]), int(one["document"].rpartition(":")[2])
        assert one["ngram"] in grams(rows[row - 1])
        assert one["ngram"] in grams(texts[document - 1])


def test_long_documents_are_cut_at_the_right_words(run_step: Any, documents: Any, arc: Path) -> None:
    filler = "éa word " * 30_000  # several blocks
    text = f"{filler}{QUESTION} {filler}"
    [left] = run_step(step(arc, action="cut"), documents([text])).outcomes
    assert left == f"{filler} {filler}"


def test_workers_and_parts_make_no_difference(run_step: Any, documents: Any, arc: Path, pool: Any) -> None:
    texts = [CLEAN, PART, QUESTION, CLEAN + PART] * 4
    ran = run_step(step(arc), documents(texts))
    for parts, batch, each in ((16, 1, None), (3, 5, pool)):
        other = run_step(step(arc), documents(texts), parts, batch, **({"each": each} if each else {}))
        assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)


def test_another_content_of_a_set_is_another_step(arc: Path) -> None:
    before, grams = step_identity(step(arc)), step(arc).index.grams
    assert step_identity(step(arc)) == before
    arc.write_text(arc.read_text().replace("Neptune", "Uranus"))
    assert step_identity(step(arc)) != before
    assert not np.array_equal(step(arc).index.grams, grams)  # the kept index is not taken for the new one


@pytest.mark.parametrize(
    ("name", "content", "fields", "message"),
    [
        ("missing.jsonl", None, [], r"set 'arc': no file .*missing.jsonl; correct its path"),
        ("set.xlsx", "x", [], r"set.xlsx: the name does not tell the format; give .jsonl"),
        ("set.jsonl", '{"a": 1}\n{"a": ', [], r"set.jsonl:2: not valid JSON .*correct or delete this line"),
        ("set.jsonl", '{"a": "x", "b": 2}', ["c"], r"set.jsonl:1: no field 'c'; it has a, b: correct `parse_fields`"),
        ("set.jsonl", '"text"', ["c"], r"set.jsonl:1: no field 'c'; it has str"),
    ],
)
def test_sets_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: str | None, fields: list[str], message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        step(tmp_path, sets={"arc": {"path": [str(tmp_path / name)], "fields": fields}}).index  # noqa: B018


def test_empty_documents_and_empty_sets(run_step: Any, documents: Any, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    ran = run_step(step(path), documents(["", "  ", QUESTION]), parts=2)
    assert ran.outcomes == [None, None, None]
    assert ran.summary["sets"]["arc"]["contaminated_share"] == 0.0
