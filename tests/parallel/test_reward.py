"""A reward model has the same losses, metrics and calibration on 1, 2 and 4 ranks, whatever they share."""

from pathlib import Path
from typing import Any

import pytest
from tests.align.test_reward import make_pairs, make_spec, write_rows

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {"dp_replicate": 2}),
    "shards": (4, {"dp_shard": 4}),
    "stages": (2, {"pp": 2}),
    "tensors": (2, {"tp": 2}),
}


def spec_of(pairs: Path, name: str, asked: dict[str, Any]) -> RunSpec:
    return make_spec(
        pairs, name, reward={"heads": 4, "smoothing": 0.05}, columns={"margin": "margin"}, precision="fp32",
        model={"width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64},
        budget={"steps": 6, "micro_batch": 2}, schedule={"kind": "constant", "warmup": 2},
        evaluate={"every": 3, "tokens": 1000}, parallel={"device": "cpu", "threads": 1, **asked},
    )  # fmt: skip


def curves(spec: RunSpec) -> dict[str, list[float]]:
    run = Run.existing(run_folder(spec))
    names = ("loss", "accuracy", "margin", "mean_reward", "ensemble_std")
    steps, validations = list(run.metrics()), list(run.validations())
    curves = {name: [record[name] for record in steps] for name in names}
    return curves | {
        f"validation {name}": [record[name] for record in validations] for name in ("loss", "ece", "margin")
    }


@pytest.fixture(scope="module")
def alone(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    pairs = write_rows(tmp_path_factory.mktemp("reward") / "pairs.jsonl", make_pairs(80))
    spec = spec_of(pairs, "one", {})
    assert ranks(1, lambda: train(spec).kind) == ["finished"]
    return pairs, curves(spec)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name != "replicas" else name for name in LAYOUTS]
)
def test_the_same_losses(ranks: Any, alone: tuple[Path, dict[str, list[float]]], layout: str) -> None:
    pairs, expected = alone
    size, asked = LAYOUTS[layout]
    spec = spec_of(pairs, layout, asked)
    assert set(ranks(size, lambda: train(spec).kind)) == {"finished"}
    for key, values in curves(spec).items():
        assert values == pytest.approx(expected[key], rel=5e-6, abs=5e-6), key
