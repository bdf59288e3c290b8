"""A tiny trained run whose training data holds some of the questions, and files of tasks."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bessemer.evaluate.contamination import open_training_data
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # lm-eval reads local files through `datasets`
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

WORDS = [
    "furnace", "steel", "iron", "blower", "flame", "coal", "ore", "slag", "anvil", "hammer", "smith", "ingot", "mould",
    "forge", "heat", "blast",
]  # fmt: skip
TEMPLATES = {
    "local_choice": {
        "output_type": "multiple_choice", "fewshot_split": "train", "num_fewshot": 2, "doc_to_target": "answer",
        "doc_to_text": "Question: {{prompt}}\nAnswer:", "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_answer": {
        "output_type": "generate_until", "doc_to_text": "Question: {{prompt}}\nAnswer:",
        "doc_to_target": "{{choices[answer]}}", "generation_kwargs": {"until": ["\n", "steel"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


class Workshop(NamedTuple):
    run: Path
    questions: Path  # own format
    planted: dict[int, int]  # question -> row of the training file that holds it, if it was trained on
    training: Path
    tasks: Path  # lm-eval's definitions


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    draw, rows = random.Random(seed), []
    for _ in range(count):
        choices = [words(draw, draw.randint(1, 3)) for _ in range(4)]
        rows.append({"prompt": f"what is {words(draw, 12)}?", "choices": choices, "answer": draw.randrange(4)})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_spec(folder: Path, training: Path, **more: Any) -> RunSpec:
    return RunSpec.model_validate({
        "name": "tiny", "runs": str(folder / "runs"), "precision": "fp32",
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
        "tokenizer": {"vocab": 300},
        "data": {"sources": {"words": str(training)}, "context": 128, "validation": 0.1},
        "budget": {"steps": 10, "batch": 512}, "parallel": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 10}, "evaluate": {"every": 5, "tokens": 512}, **more,
    })  # fmt: skip


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("workshop")
    draw, rows = random.Random(0), make_rows(16, seed=5)
    texts = [words(draw, draw.randint(20, 60)) for _ in range(80)]
    planted = {3: 11, 5: 20, 9: 47, 12: 66}
    for question, row in planted.items():  # as a crawl would hold it, with text around it
        texts[row - 1] = f"{words(draw, 10)} {rows[question]['prompt']} {words(draw, 10)}"
    training = write_jsonl(folder / "words.jsonl", [{"text": text} for text in texts])
    questions = write_jsonl(folder / "questions.jsonl", rows)
    tasks = folder / "tasks"
    tasks.mkdir()
    data = write_jsonl(folder / "data.jsonl", [row | {"text": words(draw, 90)} for row in rows])
    for name, template in TEMPLATES.items():
        files = {"data_files": {"test": str(data), "train": str(data)}}
        text = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **template}
        (tasks / f"{name}.yaml").write_text(json.dumps(text))
    assert train(write_spec(folder, training)).kind == "finished"
    store = open_training_data(folder / "runs" / "tiny").train["words"]
    trained = {store.origin_of_document(document).row for document in range(store.documents)}
    planted = {question: row for question, row in planted.items() if row in trained}
    assert planted
    return Workshop(folder / "runs" / "tiny", questions, planted, training, tasks)
