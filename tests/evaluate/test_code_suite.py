"""HumanEval and MBPP by name: rows from disk, prompts with the usual examples, answers run in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.evaluate.conftest import Workshop

from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.run_tasks import TaskSettings, run_tasks
from bessemer.evaluate.suite import run_code_suite
from bessemer.sandbox import NoIsolation, run_python
from bessemer.train.trained import load_model

HUMANEVAL = [
    {
        "task_id": f"HumanEval/{k}", "prompt": f'def add_{k}(x):\n    """Adds {k}."""\n', "entry_point": f"add_{k}",
        "canonical_solution": f"    return x + {k}\n", "test": f"def check(f):\n    assert f(1) == {1 + k}\n",
    }
    for k in range(3)
]  # fmt: skip
MBPP = [
    {
        "task_id": k, "text": f"Write a function that adds {k}.", "code": f"def add(x):\n    return x + {k}",
        "test_list": [f"assert add(1) == {1 + k}"], "test_setup_code": "",
    }
    for k in (2, 3, 4, 11, 12, 600)
]  # fmt: skip


class Programmer:
    """Stands in for a model: answers with given texts and keeps what it was asked."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers, self.requests = list(answers), list[tuple[str, dict[str, Any]]]()

    def answer(self, requests: list[tuple[str, dict[str, Any]]]) -> list[str]:
        self.requests = requests
        return self.answers[: len(requests)]


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        run_python("")
    except NoIsolation as error:
        pytest.skip(str(error))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """As the Hub lays them out: parquet in a folder of the configuration, and one test file."""
    (tmp_path / "humaneval").mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in HUMANEVAL)
    (tmp_path / "humaneval" / "test-00000-of-00001.jsonl").write_text(rows)
    (tmp_path / "mbpp" / "full").mkdir(parents=True)
    parts = {"prompt": MBPP[:3], "test": MBPP[3:5], "train": MBPP[5:]}
    for split, part in parts.items():
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "mbpp" / "full" / f"{split}-00000-of-00001.parquet")
    return tmp_path


def test_humaneval_runs_what_the_model_wrote(data: Path) -> None:
    model = Programmer(["    return x\n", "    return x + 2\n", "    return x + 2\n\nprint(add_2(1))"])
    result = run_code_suite(model, "humaneval", data / "humaneval", None, None)  # type: ignore[arg-type]
    assert result.values == [1.0, 0.0, 1.0] and result.reported == pytest.approx(2 / 3) and result.metric == "pass@1"
    assert result.ids == ["HumanEval/0", "HumanEval/1", "HumanEval/2"] and result.shots == 0
    assert [prompt for prompt, _ in model.requests] == [row["prompt"] for row in HUMANEVAL]
    assert all("\ndef " in settings["until"] for _, settings in model.requests)


def test_mbpp_shows_three_examples_and_asks_the_test_range(data: Path) -> None:
    model = Programmer(["def add(x):\n    return x + 11", "def add(x):\n    return 0"])
    result = run_code_suite(model, "mbpp", data / "mbpp", None, None)  # type: ignore[arg-type]
    assert result.ids == ["11", "12"] and result.values == [1.0, 0.0] and result.shots == 3
    prompt = model.requests[0][0]
    assert prompt.count("[BEGIN]") == 4 and prompt.count("[DONE]") == 3 and prompt.endswith("[BEGIN]\n")
    assert "adds 2." in prompt and "adds 11." in prompt and "adds 12." not in prompt
    assert run_code_suite(model, "mbpp", data / "mbpp", 1, 0).shots == 0  # type: ignore[arg-type]
    assert model.requests[0][0].count("[BEGIN]") == 1


def test_a_model_is_asked_through_the_suite(workshop: Workshop, data: Path) -> None:
    model = LanguageModel(load_model(workshop.run, device="cpu"))
    result = run_tasks(model, TaskSettings(("humaneval",), limit=1, data=data))
    (score,) = result.results
    assert (score.task, score.values) == ("humaneval", [0.0])  # a model of ten steps writes no program
    assert score.samples[0]["doc"]["task_id"] == "HumanEval/0" and score.samples[0]["filtered_resps"][0] is not None
