"""A classifier has the same losses on 1, 2 and 4 ranks, whatever they share."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {"dp_replicate": 2}),
    "shards": (4, {"dp_shard": 4}),
    "stages": (2, {"pp": 2}),
    "tensors": (2, {"tp": 2}),
    "columns": (2, {"cp": 2}),
}


def spec_of(folder: Path, name: str, asked: dict[str, Any]) -> RunSpec:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        draw = random.Random(0)
        texts = [[draw.choice("abcdefgh") for _ in range(draw.randint(3, 25))] for _ in range(120)]
        rows.write_text("\n".join(json.dumps({"text": " ".join(t), "label": int("a" in t)}) for t in texts))
    source = {"path": [str(rows)], "columns": {"label": "label"}}
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
        "objective": "classify", "classify": {"labels": ["without", "with"]},
        "model": {"width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64},
        "data": {"sources": {"rows": source}, "context": 32, "validation": 0.1},
        "budget": {"steps": 6, "batch": 256, "micro_batch": 2}, "optimizer": {"lr": 0.01},
        "schedule": {"kind": "constant", "warmup": 2}, "evaluate": {"every": 3}, "checkpoint": {"every": 3},
        "parallel": {"device": "cpu", "threads": 1, **asked},
    })  # fmt: skip


def curves(spec: RunSpec) -> dict[str, list[float]]:
    run = Run.existing(run_folder(spec))
    steps, validations = list(run.metrics()), list(run.validations())
    return {
        "loss": [record["loss"] for record in steps], "accuracy": [record["accuracy"] for record in steps],
        "validation": [record["loss"] for record in validations], "f1": [record["f1"] for record in validations],
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("classify")
    spec = spec_of(folder, "one", {})
    assert ranks(1, lambda: train(spec).kind) == ["finished"]
    return folder, curves(spec)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name != "stages" else name for name in LAYOUTS]
)
def test_the_same_losses(ranks: Any, alone: tuple[Path, dict[str, list[float]]], layout: str) -> None:
    folder, expected = alone
    size, asked = LAYOUTS[layout]
    spec = spec_of(folder, layout, asked)
    assert set(ranks(size, lambda: train(spec).kind)) == {"finished"}
    for key, values in curves(spec).items():
        assert values == pytest.approx(expected[key], rel=5e-6, abs=5e-6), key
