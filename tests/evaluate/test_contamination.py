"""Planted questions are found by file and row, and only they; the score without them is that of the others."""

from __future__ import annotations

import pytest
from tests.evaluate.conftest import Workshop

from bessemer.evaluate.contamination import find_matches, mark_contaminated, open_training_data
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.results import Evaluation
from bessemer.evaluate.run_tasks import TaskSettings, run_tasks
from bessemer.train.trained import load_model


@pytest.fixture(scope="module")
def marked(workshop: Workshop) -> Evaluation:
    model = LanguageModel(load_model(workshop.run, device="cpu"))
    result = run_tasks(model, TaskSettings((str(workshop.questions),)))
    result.settings["contamination"] = mark_contaminated(result, workshop.run)
    return result


def test_planted_questions_are_named_by_file_and_row(workshop: Workshop, marked: Evaluation) -> None:
    facts = marked.settings["contamination"]["questions"]
    found = {match["question"]: match["row"] for match in facts["matches"]}
    assert found == workshop.planted and facts["share"] == len(workshop.planted) / 16
    assert all(match["file"] == str(workshop.training) for match in facts["matches"])
    first = min(workshop.planted)
    assert f"question {first}: 100% of it in {workshop.training}:{workshop.planted[first]}" in facts["lines"][1]


def test_the_clean_score_leaves_them_out(workshop: Workshop, marked: Evaluation) -> None:
    acc = marked.find("questions", "acc")
    assert acc is not None and acc.contaminated == sorted(workshop.planted)
    kept = [value for number, value in enumerate(acc.values) if number not in workshop.planted]
    assert acc.clean == pytest.approx(sum(kept) / (16 - len(workshop.planted)))
    # A score that contamination made: only the planted questions are right.
    acc.values = [float(number in workshop.planted) for number in range(16)]
    assert sum(acc.values) == len(workshop.planted) and acc.clean == 0.0
    assert acc.to_json()["clean_score"] == 0.0


def test_phrases_and_halves_are_no_leak(workshop: Workshop) -> None:
    data = open_training_data(workshop.run)
    text = data.tokenizer.decode(data.train["words"].slice(0, 60).tolist())
    long = " ".join(text.split()[:10]) + " and then nothing of this was ever written in any file that the run read"
    matches, short = find_matches(data, [long, "two words"])
    assert matches == [] and short == [1]
