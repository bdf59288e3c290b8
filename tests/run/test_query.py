"""Questions about a run's metrics: ranges, thinning that hides no extreme, evaluations, non-finite values."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.run.directory import Run, RunWriter
from bessemer.run.query import MOST_ROWS, MetricSummary, query_metrics


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(1000):
            loss = 50.0 if step == 777 else math.nan if step == 500 else 4 - step / 1000
            writer.step({"step": step, "loss": loss, "lr": 1e-3, "veto": None, "clipped": False})
        writer.validation({"step": 500, "loss": 3.4, "accuracy": 0.5, "time": 1.0})
        writer.validation({"step": 999, "loss": 3.1, "accuracy": 0.6, "time": 2.0})
    return Run(tmp_path / "run")


def test_thinning_hides_no_spike(run: Run) -> None:
    answer = query_metrics(run)
    assert answer.steps == 1000 and len(answer.rows) == MOST_ROWS and answer.every == 5
    assert answer.summary.keys() == {"loss", "lr"}
    loss = answer.summary["loss"]
    assert (loss.max, loss.max_step, loss.min_step, loss.nonfinite) == (50.0, 777, 999, 1)
    assert loss.mean == pytest.approx((sum(4 - s / 1000 for s in range(1000) if s not in (500, 777)) + 50) / 999)


def test_a_range(run: Run) -> None:
    answer = query_metrics(run, ["loss"], 770, 780, 3)
    assert [row["step"] for row in answer.rows] == [770, 773, 776, 779]
    assert answer.steps == 11 and answer.summary["loss"].max == 50.0


def test_evaluations_are_never_thinned(run: Run) -> None:
    answer = query_metrics(run, ["loss", "validation.accuracy"], every=100)
    assert [row["step"] for row in answer.rows if "validation.accuracy" in row] == [500, 999]
    assert query_metrics(run, ["validation.loss"]).summary["validation.loss"].last == 3.1


def test_mistakes(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward: no such metric .* loss, lr, validation.loss, validation.accuracy"):
        query_metrics(run, ["reward"])
    RunWriter(tmp_path / "empty").close()
    with pytest.raises(UserError, match="no step is recorded yet"):
        query_metrics(Run(tmp_path / "empty"))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=50))
def test_a_summary_is_that_of_all_values(values: list[float]) -> None:
    summary = MetricSummary()
    for step, value in enumerate(values):
        summary.add(step, value)
    finite = [value for value in values if math.isfinite(value)]
    assert (summary.count, summary.nonfinite) == (len(values), len(values) - len(finite))
    assert (summary.min, summary.max) == ((min(finite), max(finite)) if finite else (None, None))
    if finite:
        assert values[summary.min_step] == summary.min and values[summary.max_step] == summary.max
        assert min(finite) <= summary.mean <= max(finite) or summary.mean == pytest.approx(
            sum(v / len(finite) for v in finite)
        )
