"""Questions of a file: what is refused, how answers are judged, and the scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.evaluate.conftest import Workshop, write_jsonl

from bessemer.errors import UserError
from bessemer.evaluate.language_model import LanguageModel, rolling_windows
from bessemer.evaluate.own_tasks import FORMATS, read_questions, run_questions
from bessemer.evaluate.question_metrics import METRICS
from bessemer.train.trained import load_model

REFUSED = {
    "{": "1: is not JSON",
    "[1]": "1: is a list",
    '{"answer": "x"}': "1: has no prompt",
    '{"prompt": "x"}': "1: has no answer",
    '{"prompt": "x", "answer": "y", "metrik": 1}': "unknown key 'metrik'",
    '{"prompt": "x", "answer": 2, "choices": ["a", "b"]}': "answer is 2; write the number of a choice, 0 to 1",
    '{"prompt": "x", "answer": 0, "choices": ["a"]}': "at least two",
    '{"prompt": "x", "answer": 0, "choices": ["a", "b"], "metric": "exact"}': "has no metric",
    '{"prompt": "x", "answer": "y", "metric": "bleu"}': "metric 'bleu'",
    '{"prompt": "x", "answer": "(", "metric": "regex"}': "not valid",
    '{"prompt": "x", "answer": "y", "max_tokens": 0}': "max_tokens is 0",
    '{"prompt": "x", "answer": "y", "stop": [""]}': "stop is ['']",
    '{"prompt": "x", "answer": "y", "shot": true}': "has no questions",
}


@pytest.mark.parametrize("row", REFUSED)
def test_mistakes_are_named_with_file_and_row(row: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(row + "\n")
    with pytest.raises(UserError) as refused:
        read_questions(tmp_path / "mine.jsonl")
    assert REFUSED[row] in str(refused.value) and "mine.jsonl" in str(refused.value)


def test_a_file_has_one_kind_of_question(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "answer": "y"}, {"prompt": "x", "answer": 0, "choices": ["a", "b"]}]
    with pytest.raises(UserError, match="mixes choices and exact"):
        read_questions(write_jsonl(tmp_path / "mine.jsonl", rows))


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "score"),
    [
        ("exact", " forty  two\n", "forty two", 1.0), ("exact", "Forty two", "forty two", 0.0),
        ("contains", "It is Iron ore.", "iron  ORE", 1.0), ("contains", "iron", "ore", 0.0),
        ("numeric", "so $1,234.50 in all", "1234.5", 1.0), ("numeric", "from 3 to 4", "3", 0.0),
        ("numeric", "none", "3", 0.0), ("regex", "in 1856", r"\b18\d\d\b", 1.0),
        ("f1", "The cat sat.", "a cat sat down", 0.8), ("f1", "", "", 1.0), ("f1", "x", "", 0.0),
    ],
)  # fmt: skip
def test_answers_are_judged(metric: str, answer: str, expected: str, score: float) -> None:
    assert METRICS[metric](answer, expected) == pytest.approx(score)


def test_scores_choices_formats_shots_and_clusters(workshop: Workshop, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in workshop.questions.read_text().splitlines()]
    rows = [row | {"cluster": f"text {number // 2}"} for number, row in enumerate(rows)]
    rows[0]["shot"] = rows[1]["shot"] = True
    questions = read_questions(write_jsonl(tmp_path / "mine.jsonl", rows))
    model = LanguageModel(load_model(workshop.run, device="cpu"))
    acc, by_length = run_questions(model, "mine", questions, shots=1, limit=10, formats=3)
    assert (acc.metric, by_length.metric, len(acc.ids), acc.shots) == ("acc", "acc_norm", 10, 1)
    assert acc.clusters is not None and len(set(acc.clusters)) == 5
    assert list(acc.formats) == list(FORMATS)[:3] and acc.formats["plain"] == acc.reported
    assert acc.prompt.endswith(rows[2]["prompt"]) and acc.prompt.startswith("what is") and "\n\n" in acc.prompt
    # The best choice is that with the highest likelihood, or the highest per byte.
    for number, row in enumerate(rows[2:12]):
        pairs = [(acc.samples[number]["arguments"][0][0], f" {choice}") for choice in row["choices"]]
        logps = [each.logp for each in model.score_pairs(pairs)]
        per_byte = [logp / len(choice) for logp, choice in zip(logps, row["choices"], strict=True)]
        assert acc.values[number] == float(logps.index(max(logps)) == row["answer"])
        assert by_length.values[number] == float(per_byte.index(max(per_byte)) == row["answer"])
    assert acc.calibration is not None
    with pytest.raises(UserError, match="--shots 3"):
        run_questions(model, "mine", questions, shots=3)


def test_generated_answers_end_at_a_stop(workshop: Workshop, tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {word}", "answer": [".*", "x"], "metric": "regex", "max_tokens": 6, "stop": ["e"]}
            for word in ("iron", "steel", "coal")]  # fmt: skip
    questions = read_questions(write_jsonl(tmp_path / "mine.jsonl", rows))
    (result,) = run_questions(LanguageModel(load_model(workshop.run, device="cpu")), "mine", questions)
    assert result.values == [1.0, 1.0, 1.0] and result.metric == "regex"
    assert all("e" not in row["filtered_resps"][0] for row in result.samples)


def test_windows_cover_a_text_once_as_lm_eval_does() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for length in (1, 4, 7, 8, 20):
        ids = list(range(100, 100 + length))
        theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, 0, 7, 1))
        assert list(rolling_windows(ids, 0, 7)) == [tuple(window) for window in theirs]
