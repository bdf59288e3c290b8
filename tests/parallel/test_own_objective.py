"""An objective of the user's own has the same losses and metrics in every layout: the class in docs/classify.md."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

pytestmark = pytest.mark.distributed

DOCS = Path(__file__).parents[2] / "docs" / "classify.md"
LAYOUTS = {
    "stages": {"pp": 2}, "tensors": {"tp": 2}, "shards": {"dp_shard": 2}, "replicas": {"dp_replicate": 2},
    "columns": {"cp": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def objective(tmp_path_factory: pytest.TempPathFactory) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(code)
    return f"{file}:Confident"


def curves(spec: RunSpec) -> dict[str, list[float]]:
    run = Run.existing(run_folder(spec))
    steps, validations = list(run.metrics()), list(run.validations())
    return {
        **{name: [record[name] for record in steps] for name in ("loss", "accuracy", "entropy", "grad_norm")},
        "validation": [record["entropy"] for record in validations],
    }


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name != "tensors" else name for name in LAYOUTS]
)
def test_the_same_numbers(
    ranks: Any, tiny_spec: Callable[..., RunSpec], objective: str, layout: str, tmp_path: Path
) -> None:
    on_cpu, asked = {"device": "cpu", "threads": 1}, LAYOUTS[layout]
    model = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64}
    budget = {"steps": 6, "batch": 256, "micro_batch": 2}
    same = {"objective": objective, "runs": str(tmp_path), "model": model, "budget": budget}
    alone, cut = tiny_spec(name="alone", **same), tiny_spec(name=layout, parallel=on_cpu | asked, **same)
    assert ranks(1, lambda: train(alone).kind) == ["finished"]
    assert set(ranks(2, lambda: train(cut).kind)) == {"finished"}
    expected = curves(alone)
    for name, values in curves(cut).items():
        assert values == pytest.approx(expected[name], rel=2e-5, abs=2e-5), name
