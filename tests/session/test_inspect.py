"""Looks inside a run: on its own batches and weights, with nothing written into its folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bessemer.diagnose.report import backward_step, mean_step_loss
from bessemer.errors import UserError
from bessemer.session.inspect import (
    from_run,
    from_spec,
    inspect_gradients,
    inspect_histograms,
    inspect_landscape,
    inspect_lr,
    inspect_nan,
    inspect_noise,
    inspect_transfer,
    inspect_warmup,
)
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec

from .conftest import spec_data, write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 25 steps with checkpoints at 10, 20 and 25; the first is thinned out."""
    place = tmp_path_factory.mktemp("inspected")
    data = spec_data(
        "run", write_corpus(place / "words.jsonl", 300), place / "runs", budget={"steps": 25, "batch": 256}
    )
    spec = RunSpec.model_validate(data)
    Session(spec).train()
    return run_folder(spec)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def losses(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "metrics" / "steps.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


def test_the_losses_are_those_that_the_run_recorded(trained: Path) -> None:
    """Checkpoint of step 20: the loss of step 20 is recomputed, and replayed steps lead to the losses after it."""
    recorded = losses(trained)
    bench = from_run(trained, "step-00000020.a1", "cpu")
    assert bench.step == 20
    assert mean_step_loss(bench.subject(), [20]) == pytest.approx(recorded[20], rel=1e-5)
    assert mean_step_loss(bench.subject(micro_rows=1), [20]) == pytest.approx(recorded[20], rel=1e-5)
    for step in (23, 24):
        found = json.loads(inspect_nan(trained, step, None, "cpu").to_json())
        assert found["loss"] == pytest.approx(recorded[step], rel=1e-5) and found["stage"] is None
    as_saved = json.loads(inspect_nan(trained, 24, "step-00000020.a1", "cpu").to_json())
    assert as_saved["loss"] != pytest.approx(recorded[24], rel=1e-5)


def test_every_look_leaves_the_run_as_it_was(trained: Path) -> None:
    before = contents(trained)
    bench = from_run(trained, "best", "cpu")
    weights = [p.detach().clone() for p in bench.model.parameters()]
    reports = [
        inspect_gradients(bench, 2),
        inspect_landscape(bench, 1, 0.5, 3, 2, 0),
        inspect_noise(bench, 4),
        inspect_histograms(bench),
        inspect_nan(trained, 24, None, "cpu"),
    ]
    assert all(torch.equal(a, b) for a, b in zip(weights, bench.model.parameters(), strict=True))
    for report in reports:
        assert report.text() and json.loads(report.to_json()) and "<svg" in report.html() + "<svg"
    assert contents(trained) == before


def test_numbers_of_the_looks(trained: Path) -> None:
    bench = from_run(trained, "last", "cpu")
    noise = inspect_noise(bench, 8).data
    assert noise["batch"] == 256 and noise["small"] == 32 and noise["noise_trace"] > 0
    histograms = inspect_histograms(bench).data["tensors"]
    lost = [one["lost"] for one in histograms if one["kind"] == "weight"]
    assert all(0 <= share <= 1 for share in lost) and max(lost) > 0
    assert {one["kind"] for one in histograms} == {"weight", "gradient", "activation"}
    landscape = inspect_landscape(bench, 1, 1.0, 3, 0, 0).data
    assert landscape["line"][1] == pytest.approx(landscape["centre"]) and landscape["curvature"] > 0
    assert len(inspect_gradients(bench, 1).data["parameters"]) == len(list(bench.model.parameters()))


def test_nan_weights_of_a_run_are_traced(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.session import inspect

    healthy = inspect.from_run

    def poisoned(*arguments: str) -> inspect.Inspection:
        bench = healthy(*arguments)
        with torch.no_grad():
            bench.model.blocks[0].ffn.up.weight[0, 0] = torch.nan
        return bench

    monkeypatch.setattr(inspect, "from_run", poisoned)
    found = inspect_nan(trained, 20, "step-00000020.a1", "cpu")
    assert found.data["module"] == "blocks.0.ffn.up" and found.data["step"] == 20
    assert found.data["bad_weights"] == {"blocks.0.ffn.up.weight": 1}
    assert found.data["cured_by_fp32"] is None  # the run is in fp32 already


@pytest.mark.slow
def test_the_suggested_rate_trains_and_far_above_it_fails(make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    spec = make_spec("fresh", budget={"steps": 60, "batch": 256})
    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(spec))
    found = inspect_lr(path, [], "last", "auto", 1e-5, 10.0, 100).data
    assert not run_folder(spec).exists(), "it writes no run"
    assert found["diverged"] is not None and found["suggested"] <= found["diverged"] / 10

    def after(rate: float) -> float:
        bench = from_spec(spec)
        subject = bench.subject()
        for step in range(60):
            last = float(backward_step(subject, step))
            bench.update(rate)
        return last

    at = {factor: after(factor * found["suggested"]) for factor in (0.01, 1.0, 300.0)}
    assert at[1.0] < at[0.01] - 1 and at[1.0] < at[300.0] - 1, at


def test_widths_and_warm_ups_are_compared_by_short_runs(make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    """The numbers are those of updates made by hand; no run is written."""
    spec = make_spec("fresh", model={"init": "mup", "mup_width": 32}, budget={"steps": 40, "batch": 128})
    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(spec))
    found = inspect_transfer(path, [], "cpu", (32, 64), (1e-3, 1e-2), 12)
    assert set(found.data["losses"]) == {"width 32", "width 64"} and found.data["rates"] == [1e-3, 1e-2]
    bench = from_spec(spec)
    subject, losses_by_hand = bench.subject(), []
    for step in range(12):
        losses_by_hand.append(float(backward_step(subject, step)))
        bench.update(1e-2 * min(1.0, (step + 1) / 10))
    assert found.data["losses"]["width 32"][1] == pytest.approx(sum(losses_by_hand[-3:]) / 3)
    assert "With init mup the best rate" in found.text() and not run_folder(spec).exists()
    with pytest.raises(UserError, match="--widths 40: is no multiple of 32"):
        inspect_transfer(path, [], "cpu", (40,), (1e-3,), 8)
    found = inspect_warmup(path, [], "cpu", (1, 8), 20, None)
    assert set(found.data["runs"]) == {1, 8} and found.data["rate"] == 0.01
    assert found.data["runs"][1]["losses"][0] == found.data["runs"][8]["losses"][0]


def test_a_range_test_from_a_checkpoint_begins_at_its_loss(trained: Path) -> None:
    found = inspect_lr(trained, [], "step-00000020.a1", "cpu", 1e-6, 10.0, 60).data
    assert found["losses"][0] == pytest.approx(losses(trained)[20], rel=1e-5)
    assert found["asked"] == 0.01 and found["diverged"] is not None


def test_mistakes_are_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steps 0 to 24"):
        inspect_nan(trained, 25, "last", "cpu")
    with pytest.raises(UserError, match="no checkpoint at or before step 3"):
        inspect_nan(trained, 3, None, "cpu")
    with pytest.raises(UserError, match="no checkpoint 'x'"):
        from_run(trained, "x", "cpu")
    with pytest.raises(UserError, match="--device gpu"):
        from_run(trained, "last", "gpu")
    with pytest.raises(UserError, match="not a run"):
        from_run(tmp_path)
    with pytest.raises(UserError, match="0 < first < last"):
        inspect_lr(trained, [], "last", "cpu", 1.0, 0.1, 60)
