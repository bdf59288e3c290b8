"""lm-eval's tasks from local files: a run, its export, and lm-eval's own Hugging Face backend give equal numbers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.evaluate.conftest import TEMPLATES, Workshop, make_rows, write_jsonl

from bessemer.errors import UserError
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.results import Evaluation
from bessemer.evaluate.run_tasks import TaskSettings, run_tasks
from bessemer.evaluate.suite import SUITE, split_files
from bessemer.export.hf import open_native, to_hf
from bessemer.train.trained import load_model

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def exported(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "hf"
    to_hf(open_native(workshop.run), folder, mode="skip")
    return folder


def run(model: Path, workshop: Workshop, **settings: Any) -> Evaluation:
    tasks = tuple(str(workshop.tasks / f"{name}.yaml") for name in TEMPLATES)
    return run_tasks(LanguageModel(load_model(model, device="cpu")), TaskSettings(tasks, **settings))


def likelihoods(result: Evaluation) -> list[float]:
    found = result.find("local_choice", "acc")
    assert found is not None
    return [float(choice[0]) for row in found.samples for choice in row["filtered_resps"]]


@pytest.fixture(scope="module")
def ours(workshop: Workshop) -> Evaluation:
    return run(workshop.run, workshop)


def test_a_run_and_its_export_score_the_same(ours: Evaluation, workshop: Workshop, exported: Path) -> None:
    other = run(exported, workshop)
    assert [each.name for each in ours.results] == [each.name for each in other.results]
    for a, b in zip(ours.results, other.results, strict=True):
        assert (a.values, a.template, a.prompt) == (b.values, b.template, b.prompt)
        assert a.reported == pytest.approx(b.reported, rel=1e-5)
    np.testing.assert_allclose(likelihoods(ours), likelihoods(other), atol=1e-4)


def test_the_numbers_are_those_of_lm_evals_own_backend(ours: Evaluation, workshop: Workshop, exported: Path) -> None:
    """What `lm_eval --model hf` computes, without its command line, which reads all definitions first."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = simple_evaluate(
        HFLM(pretrained=str(exported), device="cpu", dtype="float32", batch_size=4), tasks=list(TEMPLATES),
        task_manager=TaskManager(include_path=str(workshop.tasks), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    assert theirs is not None
    for each in ours.results:
        assert each.reported == pytest.approx(theirs["results"][each.task][f"{each.metric},none"], rel=1e-5), each.name
    rows = sorted(theirs["samples"]["local_choice"], key=lambda row: row["doc_id"])
    found = [choice[0] for row in rows for choice in row["filtered_resps"]]
    np.testing.assert_allclose(likelihoods(ours), found, atol=1e-4)
    assert ours.results[0].prompt == rows[0]["arguments"][0][0]  # the same examples, drawn with the same seed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_numbers_are_those_of_lm_evals_own_command(
    ours: Evaluation, workshop: Workshop, exported: Path, tmp_path: Path
) -> None:
    """`lm_eval` on the exported folder: the same scores, and the same likelihood of each choice."""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
               f"pretrained={exported},dtype=float32", "--device", "cpu", "--batch_size", "4", "--tasks",
               ",".join(TEMPLATES), "--include_path", str(workshop.tasks), "--output_path", str(tmp_path),
               "--log_samples"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    (file,) = tmp_path.rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]
    for each in ours.results:
        assert each.reported == pytest.approx(theirs[each.task][f"{each.metric},none"], rel=1e-5), each.name
    (file,) = tmp_path.rglob("samples_local_choice_*.jsonl")
    rows = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: int(row["doc_id"]))
    found = [float(choice[0]) for row in rows for choice in row["filtered_resps"]]
    np.testing.assert_allclose(likelihoods(ours), found, atol=1e-4)


def test_scores_carry_what_repeats_them(ours: Evaluation, tmp_path: Path) -> None:
    shape = json.loads(ours.write(tmp_path).read_text())
    row = shape["results"]["local_choice"]
    assert {"acc,none", "acc_stderr,none", "acc_norm,none"} <= row.keys() and shape["n-shot"]["local_choice"] == 2
    acc = next(score for score in shape["bessemer"]["scores"] if score["metric"] == "acc")
    assert acc["shots"] == 2 and acc["prompt"].count("Question:") == 3 and len(acc["values"]) == acc["questions"] == 16
    assert 0 <= acc["low"] <= acc["score"] <= acc["high"] <= 1 and 0 <= acc["ece"] <= 1
    assert "begin" in shape["bessemer"]["settings"]["prefix"]
    assert len((tmp_path / "samples_local_choice.jsonl").read_text().splitlines()) == 16
    again = Evaluation.read(tmp_path)
    assert [each.values for each in again.results] == [each.values for each in ours.results]


def test_lm_eval_leaves_the_random_generators_alone(workshop: Workshop) -> None:
    model, tasks = LanguageModel(load_model(workshop.run, device="cpu")), (str(workshop.tasks / "local_choice.yaml"),)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    run_tasks(model, TaskSettings(tasks, 2))
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def suite_data(folder: Path) -> Path:
    """A few rows in the columns of HellaSwag, GSM8K and two subjects of MMLU."""
    rows = make_rows(6, seed=2)
    for subject in ("anatomy", "virology"):
        place = folder / "mmlu" / subject
        place.mkdir(parents=True)
        columns = [{"question": row["prompt"], "choices": row["choices"], "answer": row["answer"]} for row in rows]
        write_jsonl(place / "test.jsonl", columns)
        write_jsonl(place / "dev-00000-of-00001.jsonl", columns[:5])
    (folder / "gsm8k").mkdir()
    sums = [{"question": row["prompt"], "answer": f"So\n#### {row['answer']}"} for row in rows]
    write_jsonl(folder / "gsm8k" / "test.jsonl", sums)
    write_jsonl(folder / "gsm8k" / "train.jsonl", sums)
    return folder


def test_named_tasks_read_local_data_with_the_usual_shots(workshop: Workshop, tmp_path: Path) -> None:
    data = suite_data(tmp_path)
    model = LanguageModel(load_model(workshop.run, device="cpu"))
    result = run_tasks(model, TaskSettings(("gsm8k", "hellaswag"), limit=2, data=data))
    gsm8k = result.find("gsm8k", "exact_match")
    assert gsm8k is not None and gsm8k.shots == 5 and gsm8k.prompt.count("Question:") == 6
    (line,) = result.settings["missing"]
    assert line.startswith("hellaswag: no data") and f"--local-dir {data / 'hellaswag'}" in line


def test_missing_data_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESSEMER_EVALUATION_DATA", raising=False)
    with pytest.raises(UserError, match="--data FOLDER"):
        run_tasks(None, TaskSettings(("mmlu",)))  # type: ignore[arg-type]
    with pytest.raises(UserError) as refused:
        run_tasks(None, TaskSettings(("mmlu", "medqa"), data=suite_data(tmp_path)))  # type: ignore[arg-type]
    assert "mmlu: no data (abstract_algebra: dev, test; astronomy: dev, test; business_ethics" in str(refused.value)
    assert "medqa: no data" in str(refused.value) and "GBaker/MedQA-USMLE-4-options-hf" in str(refused.value)


def test_files_are_sorted_by_split(tmp_path: Path) -> None:
    for name in ("data/test-00000-of-00001.parquet", "all/dev.jsonl", "validation/0.csv", "notes.md", ".git/test.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = split_files(tmp_path, None)
    assert {split: [Path(file).name for file in files] for split, files in found.items()} == {
        "test": ["test-00000-of-00001.parquet"], "dev": ["dev.jsonl"], "validation": ["0.csv"],
    }  # fmt: skip
    assert split_files(tmp_path, "all").keys() == {"dev"}


def test_every_named_task_has_definitions() -> None:
    from bessemer.evaluate.suite import CODE, definition_files, yaml_key

    for name, task in SUITE.items():
        files = definition_files(task) if name not in CODE else []
        names = [yaml_key(file.read_text(encoding="utf-8"), "task") for file in files]
        assert name in CODE or any(names), name
    assert len(definition_files(SUITE["mmlu"])) == 57


def test_unknown_tasks_are_refused_before_a_model_is_asked(workshop: Workshop) -> None:
    (workshop.tasks / "broken.yaml").write_text("output_type: multiple_choice\n")
    with pytest.raises(UserError, match="has no `task:`"):
        run_tasks(None, TaskSettings((str(workshop.tasks / "broken.yaml"),)))  # type: ignore[arg-type]
    (workshop.tasks / "broken.yaml").unlink()
