"""The model card of an export: what the run's files hold, and nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bessemer.evaluate.results import Evaluation, TaskResult
from bessemer.export.card import card, measure_energy, write_card
from bessemer.plan.cost_model.cost import load_prices
from bessemer.run.directory import Run


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "tiny", symlinks=True))


def header(text: str) -> dict[str, object]:
    content = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(content, dict)
    return content


def test_the_card_of_a_run(copy: Path, tmp_path: Path) -> None:
    path = write_card(tmp_path, copy, "hf", ["logits differ by 1.0e-06"])
    text = path.read_text()
    assert header(text)["library_name"] == "transformers" and "co2_eq_emissions" not in header(text)
    assert "| words | 120 |" in text
    assert "- Steps and tokens: 10 and 1,280" in text and "optimizer: adamw" in text and "Incidents: none." in text
    assert "No task was evaluated." in text and "Held-out loss" in text
    assert "Energy was not measured" in text and "- logits differ by 1.0e-06" in text
    assert "| data.context | 32 |" in text


def test_evaluations_become_a_table_and_metadata(copy: Path) -> None:
    """What `bessemer evaluate` wrote into the run: of each task its latest checkpoint, with the clean score."""

    def evaluate(checkpoint: str, task: str, right: int, **more: Any) -> None:
        values = [1.0] * right + [0.0] * (100 - right)
        ids = [str(number) for number in range(100)]
        scores = [TaskResult(task, "acc", values, ids, right / 100, 5, "t", "Q", **more)]
        Evaluation("tiny", scores).write(copy / "evaluations" / checkpoint)

    evaluate("step-00000010.a1", "law", 25, contaminated=[0, 1, 2, 3])
    evaluate("step-00000005", "law", 90)
    evaluate("step-00000005", "law", 30, filter="strict")
    (copy / "evaluations" / "other").mkdir()
    (copy / "evaluations" / "other" / "results.json").write_text("{not json")
    text = card(copy, "gguf", [])
    assert "| law | acc | 0.25 | 0.1755 to 0.343 | 100 | 5 | step-00000010.a1 | 0.2188 |" in text
    assert "| law | acc (strict) | 0.3 | 0.2189 to 0.3958 | 100 | 5 | step-00000005 |  |" in text
    (index,) = header(text)["model-index"]  # type: ignore[misc]
    metrics = [metric for row in index["results"] for metric in row["metrics"]]
    assert sorted(metrics, key=str) == [{"type": "acc (strict)", "value": 0.3}, {"type": "acc", "value": 0.25}]


def test_carbon_is_in_grams(copy: Path) -> None:
    (copy / "emissions.csv").write_text("energy_consumed,emissions,country_name\n1.5,0.6,France\n0.5,0.2,France\n")
    text = card(copy, "hf", [])
    assert header(text)["co2_eq_emissions"] == {
        "emissions": 800.0, "source": "CodeCarbon", "training_type": "pre-training", "geographical_location": "France",
        "hardware_used": next(Run(copy).events("started"))["machine"]["name"],
    }  # fmt: skip
    assert "Measured by CodeCarbon: 2 kWh." in text and "800 g CO2" in text


def test_an_estimate_shows_its_formula(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "started":
            line["machine"]["name"] = "H100"
    (copy / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    region = next(iter(load_prices().regions))
    energy = measure_energy(Run(copy), region)
    seconds = sum(record["step_s"] for record in Run(copy).metrics())
    assert energy is not None and energy.grams is not None
    assert energy.kwh == pytest.approx(seconds / 3600 * 0.7 * 1.5 * 1.2)
    assert energy.grams == pytest.approx(energy.kwh * load_prices().region(region).grams_kwh)
    assert "Estimate, not measured" in card(copy, "hf", []) and "PUE 1.2" in card(copy, "hf", [])
    assert "co2_eq_emissions" not in header(card(copy, "hf", []))  # without a region
