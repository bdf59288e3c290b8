"""A published chat model takes a new behaviour by LoRA within minutes on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.model.generate import Sampling
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.answers import AnswerSettings, answer_all
from bessemer.train.trained import load_model

from .conftest import spec_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
TAUGHT = {
    "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Norway": "Oslo",
    "Greece": "Athens", "Poland": "Warsaw", "Russia": "Moscow", "China": "Beijing", "Cuba": "Havana", "Peru": "Lima",
    "Ireland": "Dublin", "Sweden": "Stockholm", "Kenya": "Nairobi", "Iran": "Tehran",
}  # fmt: skip
HELD_OUT = {"France": "Paris", "England": "London", "Austria": "Vienna", "Hungary": "Budapest", "Iraq": "Baghdad",
            "Denmark": "Copenhagen", "Thailand": "Bangkok", "Portugal": "Lisbon"}  # fmt: skip


def question(country: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the capital of {country}?"}


def answered(model: Path) -> list[Any]:
    """For each held-out country the city, if the answer is the JSON object that was taught and ends there."""
    prompts = [[question(country)] for country in HELD_OUT]
    settings = AnswerSettings(24, sampling=Sampling(0.0))
    cities = []
    for answer in answer_all(load_model(model, device="cpu"), prompts, settings):
        sample = answer["samples"][0]
        try:
            value = json.loads(sample["text"])
        except ValueError:
            value = None
        right = isinstance(value, dict) and list(value) == ["city"] and sample["finish_reason"] == "stop"
        cities.append(value["city"] if right else None)
    return cities


def test_a_chat_model_learns_to_answer_in_json(smollm2: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [question(country), {"role": "assistant", "content": json.dumps({"city": city})}]}
        for country, city in TAUGHT.items()
    ]
    data = tmp_path / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = spec_data(
        "json", data, tmp_path / "runs", objective="sft", adapter={"kind": "lora", "rank": 8},
        budget={"epochs": 4, "batch": 256}, optimizer={"lr": 1e-3}, evaluate={"every": 100}, checkpoint={"every": 100},
    )  # fmt: skip
    del parts["budget"]["steps"]
    parts |= {"model": {"hf": str(smollm2)}, "tokenizer": {}}
    parts["data"] |= {"context": 128, "validation": 0}
    spec = RunSpec.model_validate(parts)
    assert Session(spec).train().kind == "finished"
    assert answered(smollm2) == [None] * len(HELD_OUT)
    cities = answered(run_folder(spec))
    assert None not in cities, "the format, on every held-out question"
    right = [city == expected for city, expected in zip(cities, HELD_OUT.values(), strict=True)]
    assert sum(right) >= 0.75 * len(right), cities
