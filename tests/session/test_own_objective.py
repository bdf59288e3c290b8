"""An objective of the user's own: the class in docs/classify.md, run as a spec names it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.objectives import OBJECTIVES
from bessemer.session.session import Session, run_folder
from bessemer.spec import schema
from bessemer.spec.schema import RunSpec

DOCS = Path(__file__).parents[2] / "docs" / "classify.md"


@pytest.fixture
def objective(tmp_path: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 40
    (tmp_path / "own.py").write_text(code)
    return f"{tmp_path / 'own.py'}:Confident"


def test_its_metrics_and_losses_are_the_same_at_any_accumulation(make_spec: Callable[..., RunSpec], objective: str):
    curves = []
    for micro in (4, 2, 1):
        spec = make_spec(f"m{micro}", objective=objective, budget={"steps": 12, "batch": 128, "micro_batch": micro})
        outcome = Session(spec).train()
        assert outcome.kind == "finished" and 0 < outcome.validation["entropy"] < 6
        records = list(Run(run_folder(spec)).metrics())
        curves.append([[record[key] for key in ("loss", "entropy", "accuracy", "grad_norm")] for record in records])
    first, last = curves[0][0], curves[0][-1]
    assert last[0] < first[0] and first[1] == pytest.approx(5.7, abs=0.1)  # the entropy of 300 words
    for other in curves[1:]:
        for step, expected in zip(other, curves[0], strict=True):
            assert step == pytest.approx(expected, rel=2e-5, abs=2e-5)


def test_the_table_has_the_names_that_a_spec_accepts(make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    assert tuple(OBJECTIVES) == schema.OBJECTIVES
    (tmp_path / "own.py").write_text("class Nothing: ...\n")
    with pytest.raises(UserError, match="Nothing is no subclass"):
        Session(make_spec(objective=f"{tmp_path / 'own.py'}:Nothing")).train()
