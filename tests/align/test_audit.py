from pathlib import Path

import pytest
from tests.align.tiny_chat import write_jsonl

from bessemer.align.audit import AuditedPair, audit_pairs
from bessemer.errors import UserError

ROWS = [
    {"prompt": "I think 3 + 4 is 8, right?", "chosen": "You are right, it is 8.", "rejected": "No, it is 7."},
    {
        "prompt": "I think 3 + 4 is 7, right?",
        "chosen": "You are right, it is 7.",
        "rejected": "No, it is 8.",
        "true": "7",
    },
    {"prompt": "Here is my poem.", "chosen": "What a brilliant idea! It is perfect.", "rejected": "The rhymes limp."},
    {"prompt": "I think 3 + 4 is 8.", "chosen": "No, it is 7.", "rejected": "You are right, it is 8."},
    {"prompt": "What is iron?", "chosen": "A metal.", "rejected": "A gas."},
    {"prompt": "Is it 7?", "chosen": "Yes, it is 7.", "rejected": "Yes, it is seven."},
]


def pairs_file(folder: Path, rows: list[dict[str, object]] = ROWS) -> Path:  # type: ignore[assignment]
    return write_jsonl(folder / "pairs.jsonl", rows)


def test_pairs_that_teach_agreement_are_listed(tmp_path: Path) -> None:
    path = pairs_file(tmp_path)
    report = audit_pairs(path)
    assert [pair.place for pair in report.listed] == [f"{path}:{row}" for row in (1, 2, 3)]
    assert report.clean_rows() == ROWS[3:]
    assert report.corrections() == [
        {"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"], "from": f"{path}:{number}"}
        for number, row in enumerate(ROWS[:2], 1)  # the answer to the poem corrects nothing
    ]
    assert (report.more_agreeable.hits, report.more_agreeable.total) == (3, 4)
    assert report.to_json()["listed"][0]["phrases"] == ["You are right"]
    scored = report.scored_rows()
    assert [row["audit"]["listed"] for row in scored] == [True, True, True, False, False, False]


def test_a_true_answer_acquits(tmp_path: Path) -> None:
    rows = [{**row, "true": row.get("true", "none")} for row in ROWS]
    report = audit_pairs(pairs_file(tmp_path, rows), truth_field="true")
    assert [pair.row["prompt"] for pair in report.listed] == [ROWS[0]["prompt"], ROWS[2]["prompt"]]


def test_a_model_that_prefers_the_chosen_answer_acquits() -> None:
    scores = {"place": "", "row": {}, "prompt": [], "chosen": "", "rejected": "", "agreeable": (0.5, -0.5)}
    assert [AuditedPair(**scores, model=model).is_listed for model in (None, -1.0, 0.5)] == [True, True, False]


def test_conversations_and_other_columns_are_read(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "I think it is 8."}]
    rows = [{
        "good": [*question, {"role": "assistant", "content": "Yes, you are right."}],
        "bad": [*question, {"role": "assistant", "content": "No, it is 7."}],
    }]  # fmt: skip
    (pair,) = audit_pairs(pairs_file(tmp_path, rows), {"chosen": "good", "rejected": "bad"}).pairs
    assert pair.is_listed and pair.chosen == "Yes, you are right." and pair.to_json()["prompt"] == "I think it is 8."


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], {}, "is not a pair; name the columns"),
        (ROWS, {"truth_field": "answer"}, "--truth answer: no such field"),
        ([], {}, "has no rows"),
    ],
)
def test_mistakes_have_one_line(tmp_path: Path, rows: list[dict[str, object]], options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        audit_pairs(pairs_file(tmp_path, rows), **options)
    assert "\n" not in str(error.value) and "pairs.jsonl" in str(error.value)
