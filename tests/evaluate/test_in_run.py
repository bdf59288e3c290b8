"""Tasks and samples inside a run: they change nothing of it, are registered before it, and leave their record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluate.conftest import Workshop, write_jsonl, write_spec

from bessemer.errors import UserError
from bessemer.evaluate.registered import compare_registration
from bessemer.evaluate.results import Evaluation
from bessemer.evaluate.run_tasks import TaskSettings, registration
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.train.trained import load_model

EVALUATE = {"every": 5, "tokens": 512}


def records(folder: Path) -> tuple[list[Any], list[Any]]:
    """What the guard judged at each step, and the held-out losses, to the last bit."""
    run = Run(folder)
    steps = [[record[key] for key in ("step", "loss", "grad_norm", "lr")] for record in run.metrics()]
    return steps, [[record["step"], record["loss"], record["per_source"]] for record in run.validations()]


@pytest.fixture(scope="module")
def scored(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workshop's run again, with tasks of both kinds and samples."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("scored")
    tasks = [str(workshop.questions), str(workshop.tasks / "local_answer.yaml")]
    more = {"tasks": tasks, "samples": ["what is iron", "the flame"], "sample_tokens": 6, "limit": 8}
    # Dropout draws from torch's global generator at every step.
    spec = write_spec(folder, workshop.training, evaluate=EVALUATE | more, dropout={"residual": 0.1})
    assert train(spec).kind == "finished"
    return folder / "runs" / "tiny"


def test_an_evaluation_inside_a_run_changes_nothing(workshop: Workshop, scored: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, workshop.training, evaluate=EVALUATE, dropout={"residual": 0.1})
    assert train(spec).kind == "finished"
    assert records(scored) == records(tmp_path / "runs" / "tiny")
    weights, plain = (load_model(run, device="cpu").model.state_dict() for run in (scored, tmp_path / "runs" / "tiny"))
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_scores_and_samples_are_kept(scored: Path) -> None:
    run = Run(scored)
    shown = [record["tasks"] for record in run.validations()]
    assert len(shown) == 3 and all({"questions acc", "local_answer exact_match"} <= each.keys() for each in shown)
    last = Evaluation.read(scored / "evaluations" / "step-00000010")
    acc = last.find("questions", "acc")
    assert acc is not None and shown[-1]["questions acc"]["score"] == acc.reported and len(acc.ids) == 8
    samples = [json.loads(line) for line in (scored / "samples" / "prompts-00000010.jsonl").read_text().splitlines()]
    assert [sample["prompt"] for sample in samples] == ["what is iron", "the flame"] and samples[0]["text"]
    assert [event["step"] for event in run.events("samples")] == [0, 5, 10]


def test_the_last_scores_are_those_of_the_command(workshop: Workshop, scored: Path) -> None:
    from bessemer.evaluate.language_model import LanguageModel
    from bessemer.evaluate.run_tasks import run_tasks

    again = run_tasks(LanguageModel(load_model(scored, device="cpu")), TaskSettings((str(workshop.questions),), 8))
    inside = Evaluation.read(scored / "evaluations" / "step-00000010")
    found, expected = again.find("questions", "acc"), inside.find("questions", "acc")
    assert found is not None and expected is not None and found.values == expected.values


def test_tasks_are_registered_before_training_and_held_to(workshop: Workshop, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in workshop.questions.read_text().splitlines()]
    mine = write_jsonl(tmp_path / "mine.jsonl", rows)
    spec = write_spec(tmp_path, workshop.training, evaluate=EVALUATE | {"tasks": [str(mine)], "limit": 2})
    assert train(spec).kind == "finished"
    run = tmp_path / "runs" / "tiny"
    (event,) = Run(run).events("tasks_registered")
    hashes = registration(TaskSettings((str(mine),), 2))
    assert event["step"] == 0 and event["hashes"] == hashes
    assert compare_registration(run, hashes) == {"registered": f"before step 0: {mine}"}
    write_jsonl(mine, rows[::-1])
    assert "CHANGED" in compare_registration(run, registration(TaskSettings((str(mine),), 2)))["registered"]
    with pytest.raises(UserError, match=r"evaluate.tasks: .*mine.jsonl changed: .* registered its tasks before step 0"):
        train(spec)


def test_a_registration_covers_the_data_of_its_tasks(workshop: Workshop, tmp_path: Path) -> None:
    """Of a definition the files that it names, of a named task those of its folder."""
    data = write_jsonl(tmp_path / "law.jsonl", [{"prompt": "a", "choices": ["b", "c"], "answer": 0}])
    task = {"task": "law", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (tmp_path / "law.yaml").write_text(json.dumps(task))
    (tmp_path / "gsm8k").mkdir()
    gsm8k = write_jsonl(tmp_path / "gsm8k" / "test.jsonl", [{"question": "1 + 1", "answer": "#### 2"}])
    settings = TaskSettings((str(tmp_path / "law.yaml"), "gsm8k", str(workshop.questions)), data=tmp_path)
    before = registration(settings)
    assert registration(settings) == before
    write_jsonl(data, [{"prompt": "a", "choices": ["b", "c"], "answer": 1}])
    write_jsonl(gsm8k, [{"question": "1 + 1", "answer": "#### 3"}])
    changed = [name for name, value in registration(settings).items() if value != before[name]]
    assert changed == [str(tmp_path / "law.yaml"), "gsm8k"]


def test_a_run_without_held_out_data_cannot_score(workshop: Workshop, tmp_path: Path) -> None:
    data = {"sources": {"words": str(workshop.training)}, "context": 128, "validation": 0.0}
    spec = write_spec(tmp_path, workshop.training, evaluate=EVALUATE | {"samples": ["x"]}, data=data)
    with pytest.raises(UserError, match=r"data\.validation"):
        train(spec)
