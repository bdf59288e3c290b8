"""Tasks and samples inside a run of several processes: each layout gives the answers of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

pytest.importorskip("lm_eval")

Make = Callable[..., RunSpec]
LAYOUTS = {"dp_shard": {"dp_shard": 2}, "tp": {"tp": 2}, "dp_replicate": {"dp_replicate": 2}, "cp": {"cp": 2}}


def evaluate_in_run(make: Make, ranks: Any, folder: Path, name: str, size: int, layout: dict[str, int]) -> Any:
    """Log-likelihoods of all choices, accuracy, samples and held-out losses."""
    choices = ["steel", "iron ore", "blast flame heat", "mould"]
    rows = [{"prompt": f"{choices[i % 4]} is like", "choices": choices, "answer": i % 3} for i in range(11)]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate = {"every": "4 steps", "tasks": [str(questions)], "samples": ["steel", "the ore"], "sample_tokens": 5}
    parallel = {"device": "cpu", "threads": 1, **layout}
    model = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64}
    spec = make(name, model=model, evaluate=evaluate, parallel=parallel,
                budget={"steps": 4, "batch": 256, "micro_batch": 2})  # fmt: skip
    assert ranks(size, lambda: train(spec).kind) == ["finished"] * size
    place = run_folder(spec)
    (written,) = (place / "evaluations" / "step-00000004").glob("samples_*.jsonl")
    asked = [json.loads(line) for line in written.read_text().splitlines()]
    texts = (place / "samples" / "prompts-00000004.jsonl").read_text()
    losses = [record["loss"] for record in Run.existing(place).validations()]
    return asked, texts, losses


@pytest.fixture
def alone(tiny_spec: Make, ranks: Any, tmp_path: Path) -> Any:
    return evaluate_in_run(tiny_spec, ranks, tmp_path, "alone", 1, {})


@pytest.mark.parametrize(
    "name", ["dp_shard", *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n != "dp_shard")]
)
def test_a_layout_changes_no_answer(alone: Any, tiny_spec: Make, ranks: Any, tmp_path: Path, name: str) -> None:
    asked, texts, losses = evaluate_in_run(tiny_spec, ranks, tmp_path, name, 2, LAYOUTS[name])
    assert texts == alone[1] and len(asked) == 11
    np.testing.assert_allclose(losses, alone[2], rtol=1e-5)
    for ours, theirs in zip(asked, alone[0], strict=True):
        answers, expected = ours.pop("filtered_resps"), theirs.pop("filtered_resps")
        np.testing.assert_allclose(answers, expected, rtol=1e-5)
        assert ours == theirs
