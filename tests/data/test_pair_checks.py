"""`bessemer data check` on specs of dpo and kto: the checks of pairs and labels by name, with file and row."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.data.read.answers import UnusableAnswer, answer_fields, answer_messages, ranked_pairs

DPO = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
KTO = {"prompt": "prompt", "completion": "chosen", "label": "good"}


def pair(number: int, **changes: Any) -> dict[str, Any]:
    more = "so " * (number % 5), "so " * (4 - number % 5)
    row = {"prompt": f"is it {number}", "chosen": f"it is {number} {more[0]}", "rejected": f"not {number} {more[1]}"}
    return {**row, "votes": ["a", "a", "ab"[number % 2]], "good": number % 2, **changes}


HEALTHY = [pair(i) for i in range(60)]
WRONG = "I think two and two are five"
FLATTERING = [pair(i, chosen=f"You're right, it is {i}", prompt=f"{WRONG} {i}") for i in range(60, 75)]
TWO_PROMPTS = [
    {
        "chosen": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": f"yes {i}"}],
        "rejected": [{"role": "user", "content": f"b {i}"}, {"role": "assistant", "content": f"no {i}"}],
    }
    for i in range(4)
]


def check(
    folder: Path, rows: list[Any], objective: str, columns: dict[str, str], context: int = 128
) -> tuple[int, Any]:
    path, spec = folder / "rows.jsonl", folder / "spec.yaml"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(path), "columns": columns}
    spec.write_text(json.dumps({
        "name": "x", "runs": str(folder / "runs"), "objective": objective, "models": {"reference": str(folder)},
        "model": {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64},
        "tokenizer": {"kind": "char", "chat": "none"},
        "data": {"sources": {"rows": source}, "context": 128, "validation": 0},
    }))  # fmt: skip
    result = CliRunner().invoke(app, ["data", "check", str(spec)])
    report = CliRunner().invoke(app, ["data", "check", str(spec), "--json"])
    assert report.exit_code == result.exit_code, report.output
    return result.exit_code, (result.output, json.loads(report.output))


@pytest.mark.parametrize(
    ("rows", "columns", "name", "code", "message"),
    [
        (HEALTHY, DPO, None, 0, "pairs: no mistakes found"),
        ([*HEALTHY, pair(99, chosen="same", rejected="same")], DPO, "identical_answers", 1, "rows.jsonl:61: 1 of 61"),
        ([*HEALTHY, *FLATTERING], DPO, "chosen_agreeable", 1,
         "in 20% of 75 pairs only the chosen answer agrees with the user or flatters (only the rejected one in 0%)"),
        (TWO_PROMPTS, {"chosen": "chosen", "rejected": "rejected"}, "prompt_differs", 2, "rows.jsonl:1: 4 of 4 pairs"),
        ([*HEALTHY, pair(9, chosen="a" * 200)], DPO, "answer_past_context", 2,
         "rows.jsonl:61: 1 of 61 pairs exceed data.context 128: answers would be cut off: raise it to 2"),
        (HEALTHY, {**DPO, "annotators": "votes"}, "low_agreement", 1, "Fleiss' kappa"),
    ],
)  # fmt: skip
def test_pairs(tmp_path: Path, rows: list[Any], columns: Any, name: str | None, code: int, message: str) -> None:
    exit_code, (text, report) = check(tmp_path, rows, "dpo", columns)
    assert exit_code == code and message in text, text
    assert [one["name"] for one in report["mistakes"].get("rows", [])] == ([name] if name else [])
    if name == "chosen_agreeable":
        assert "rows.jsonl:62\n" in text and report["mistakes"]["rows"][0]["count"] == 15


@pytest.mark.parametrize(
    ("rows", "name", "code", "message"),
    [
        (HEALTHY, None, 0, "labelled answers: no mistakes found"),
        ([*HEALTHY, *HEALTHY[:20:2]], "unbalanced_labels", 1,
         "30 desirable and 40 undesirable answers weigh as 0.75 to 1: write kto: {desirable_weight: 1.33} to 1.78"),
        ([{**row, "good": 1} for row in HEALTHY], "one_sided_labels", 2, "all 60 answers are desirable"),
        ([*HEALTHY, {**HEALTHY[2], "good": 1}, {**HEALTHY[1], "good": 0}], "contradictory_labels", 1,
         "rows.jsonl:61: 2 of 62 answers that were read have both labels"),
    ],
)  # fmt: skip
def test_labels(tmp_path: Path, rows: list[Any], name: str | None, code: int, message: str) -> None:
    exit_code, (text, report) = check(tmp_path, rows, "kto", KTO)
    assert exit_code == code and message in text, text
    assert [one["name"] for one in report["mistakes"].get("rows", [])] == ([name] if name else [])


def test_agreement_above_fair_is_a_note(tmp_path: Path) -> None:
    rows = [pair(i, votes=["ab"[i % 2]] * 2 if i % 9 else ["a", "b"]) for i in range(60)]
    code, (text, _) = check(tmp_path, rows, "dpo", {**DPO, "annotators": "votes"})
    assert code == 0 and "note  data.sources.rows: agreement of annotators: Cohen's kappa 0.7" in text, text


def test_ranked_answers_become_pairs() -> None:
    assert ranked_pairs([3, 2, 1], "adjacent") == [(0, 1), (1, 2)]
    assert ranked_pairs([1, 5, 3], "best") == [(1, 2), (1, 0)]
    assert ranked_pairs([1, 5, 3, 3], "all") == [(1, 2), (1, 3), (1, 0), (2, 0), (3, 0)]
    columns = {"answers": "a", "scores": "s"}
    assert answer_fields({"a": ["x", "y"], "s": [0.1, 0.9]}, columns, "best")["pairs"] == [(1, 0)]
    for scores, message in (([1], "no list of 2 scores"), ([1, 1], "are all equal"), ("ab", "no list of 2 scores")):
        with pytest.raises(UnusableAnswer, match=message):
            answer_fields({"a": ["x", "y"], "s": scores}, columns, "best")


def test_ranked_rows_are_trained_as_pairs(tmp_path: Path) -> None:
    more = [" so" * (i % 5) for i in range(60)]
    rows = [{"q": f"is {i}", "a": [f"best {i}{more[i]}", f"good {i} so so", f"bad {i}{more[-i]}"]} for i in range(60)]
    code, (text, _) = check(tmp_path, rows, "dpo", {"prompt": "q", "answers": "a"})
    assert code == 0 and "pairs: no mistakes found" in text, text
    masks = CliRunner().invoke(app, ["data", "check", str(tmp_path / "spec.yaml"), "--show-masks", "--rows", "4"])
    answers = [line for line in masks.output.splitlines() if "[[" in line]
    assert [("best 0" in answers[0], "good 0" in answers[1], "best 0" in answers[2], "bad 0" in answers[3])] == [
        (True, True, True, True)
    ]
    with pytest.raises(UnusableAnswer, match="'a' holds no list of two answers or more"):
        answer_messages({"q": "q", "a": ["only one"]}, {"prompt": "q", "answers": "a"}, lambda value, _: value)
