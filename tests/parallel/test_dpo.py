"""Preference pairs, and answers with labels, have the same losses on 1, 2 and 4 ranks."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {"dp_replicate": 2}),
    "shards": (4, {"dp_shard": 4}),
    "tensors": (2, {"tp": 2}),
    "four": (4, {"dp_replicate": 4}),
}
NAMES = {
    "dpo": ("loss", "accuracy", "margin", "chosen_shift", "chosen_nll", "grad_norm"),
    "kto": ("loss", "accuracy", "kl", "chosen_reward", "rejected_reward", "grad_norm"),
}


def spec_of(folder: Path, name: str, layout: dict[str, Any], **parts: Any) -> RunSpec:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        draw = random.Random(0)
        pairs = [{"q": f"{draw.randint(0, 99)}", "good": "yes" * draw.randint(1, 4), "bad": "no"} for _ in range(80)]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "objective": "dpo",
        "model": {"width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64},
        "data": {"sources": {"rows": {"path": [str(rows)], "columns": columns}}, "context": 48, "validation": 0.1},
        "tokenizer": {"kind": "char", "chat": "none"},
        "budget": {"steps": 5, "batch": 48 * 8, "micro_batch": 2}, "optimizer": {"lr": 0.01},
        "schedule": {"kind": "constant", "warmup": 2}, "evaluate": {"every": 5}, "checkpoint": {"every": 5},
        "parallel": {"device": "cpu", "threads": 1, **layout}, **parts,
    })  # fmt: skip


@pytest.fixture(scope="module")
def base(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of ORPO, which needs no reference, and what starts from its checkpoint."""
    folder = tmp_path_factory.mktemp("dpo")
    spec = spec_of(folder, "base", {}, dpo={"loss": "orpo"})
    assert ranks(1, lambda: train(spec).kind) == ["finished"]
    checkpoint = next((run_folder(spec) / "checkpoints").glob("step-*"))
    tokenizer = {"path": str(run_folder(spec) / "tokenizer.json"), "chat": "none"}
    return folder, {"start_from": str(checkpoint), "tokenizer": tokenizer, "dpo": {"sft": 0.3}}


def curves(spec: RunSpec) -> np.ndarray:
    names = NAMES[spec.objective]
    return np.array([[record[name] for name in names] for record in Run.existing(run_folder(spec)).metrics()])


def tokens_read(spec: RunSpec) -> list[float]:
    return [record["tokens_per_s"] * record["step_s"] for record in Run.existing(run_folder(spec)).metrics()]


@pytest.fixture(scope="module")
def alone(ranks: Any, base: tuple[Path, dict[str, Any]]) -> np.ndarray:
    spec = spec_of(base[0], "one", {}, **base[1])
    assert ranks(1, lambda: train(spec).kind) == ["finished"]
    return curves(spec)


@pytest.mark.parametrize(
    "name",
    ["replicas", pytest.param("shards", marks=pytest.mark.slow), pytest.param("tensors", marks=pytest.mark.slow)],
)
def test_losses_are_the_same(ranks: Any, base: tuple[Path, Any], alone: np.ndarray, name: str) -> None:
    size, layout = LAYOUTS[name]
    spec = spec_of(base[0], name, layout, **base[1])
    assert ranks(size, lambda: train(spec).kind) == ["finished"] * size
    np.testing.assert_allclose(curves(spec), alone, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(tokens_read(spec), tokens_read(spec_of(base[0], "one", {}, **base[1])), atol=1)
    assert alone[0, 0] == pytest.approx(np.log(2), abs=1e-5) and alone[-1, 0] < 0.69


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_kto_is_the_same_at_any_number_of_ranks_and_accumulation(
    ranks: Any, base: tuple[Path, dict[str, Any]], accumulation: int
) -> None:
    """Also its validation, and with the weights divided."""
    parts = {key: value for key, value in base[1].items() if key != "dpo"} | {"objective": "kto"}
    results = {}
    for name in (None, "replicas", "shards", "tensors", "four"):
        size, layout = LAYOUTS[name] if name else (1, {})
        budget = {"steps": 5, "batch": 48 * 16, "micro_batch": 16 // (layout.get("dp_replicate", 1) * accumulation)}
        if layout.get("dp_shard"):
            budget["micro_batch"] //= layout["dp_shard"]
        spec = spec_of(base[0], f"kto-{name}-{accumulation}", layout, **parts, budget=budget)
        assert ranks(size, lambda spec=spec: train(spec).kind) == ["finished"] * size
        held_out = json.loads((run_folder(spec) / "metrics" / "validation.jsonl").read_text().splitlines()[-1])
        results[name] = np.append(curves(spec).ravel(), [held_out["loss"], held_out["kl"]])
    assert results[None][0] == pytest.approx(0.5, abs=1e-5) and (results[None][8::6] != 0).all()  # kl
    for name, curve in results.items():
        np.testing.assert_allclose(curve, results[None], rtol=2e-4, atol=2e-5, err_msg=str(name))
