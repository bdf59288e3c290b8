"""The Python API: a spec as a file, a mapping or a RunSpec; runs by name; one line for each mistake."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bessemer import Run, UserError, evaluate_run, load_spec, plan_run, plot_run, train_run
from bessemer.cli.main import app
from bessemer.run.directory import RunWriter
from bessemer.session.session import run_folder
from bessemer.spec.load import dump_spec, override_lines
from bessemer.spec.schema import RunSpec

Make = Callable[..., RunSpec]


def as_mapping(spec: RunSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_unset=True)


def test_file_mapping_and_spec_are_one_spec(make_spec: Make, tmp_path: Path) -> None:
    spec = make_spec("one")
    path = tmp_path / "one.yaml"
    path.write_text(dump_spec(spec))
    overrides = {"optimizer.lr": 3e-5, "schedule.floor": "10%", "data.clean": [], "name": "1e5"}
    loaded = [load_spec(source, override_lines(overrides)) for source in (path, as_mapping(spec), spec)]
    assert loaded[0] == loaded[1] == loaded[2]
    assert loaded[0].optimizer.lr == 3e-5 and loaded[0].name == "1e5"
    assert override_lines("a=1") == ["a=1"] and override_lines(["a=1", "b=2"]) == ["a=1", "b=2"]


def test_a_run_is_trained_continued_and_evaluated(make_spec: Make, capsys: pytest.CaptureFixture[str]) -> None:
    spec = as_mapping(make_spec("first", budget={"steps": 8, "batch": 128}))
    run = train_run(spec)
    assert run.state == "finished" and capsys.readouterr().out == ""
    longer = train_run(spec, {"budget.steps": 12}, progress=True)
    assert "finished  step 12" in capsys.readouterr().out
    columns = longer.columns("step", "loss")
    assert columns["step"] == list(range(12)) and all(map(math.isfinite, columns["loss"]))
    assert longer.columns().keys() >= {"lr", "grad_norm"}
    assert [path.name for path in longer.complete_checkpoints][-1].startswith("step-00000012")
    assert longer.plan["optimizer.lr"] == {
        "key": "optimizer.lr", "value": 0.01, "reason": "written in the spec", "source": "asked", "basis": "",
    }  # fmt: skip
    assert Run.open("first", longer.folder.parent).folder == longer.folder == Run.open(longer.folder).folder
    assert [name for name, values in plot_run(longer, "loss", "lr").series.items() if len(values) == 12] == [
        "loss",
        "lr",
    ]

    result = evaluate_run(longer, held_out=True, device="cpu")
    (stored,) = longer.evaluations.values()
    assert stored["bessemer"]["held_out"] == result.held_out
    answer = CliRunner().invoke(
        app, ["evaluate", str(longer.folder), "--held-out", "--device", "cpu", "--json"], catch_exceptions=False
    )
    assert json.loads(answer.stdout)["bessemer"]["held_out"] == result.held_out


def test_a_plan_is_that_of_the_command(tmp_path: Path) -> None:
    plan = plan_run(model="7b", tokens="100B", gpus="8xA100-80GB")
    answer = CliRunner().invoke(app, ["plan", "--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB", "--json"])
    assert json.loads(answer.stdout) == json.loads(json.dumps(plan.facts))
    assert plan.decisions["optimizer.lr"]["reason"] in plan.facts["decisions"][-1]["reason"] or len(plan.decisions) > 10
    assert str(plan).startswith("6.74B parameters on 100B tokens, 8 x A100-80GB")
    assert load_spec(plan.write(tmp_path / "seven.yaml")).budget.tokens == 100_000_000_000


def test_a_metric_that_some_steps_lack(tmp_path: Path) -> None:
    """It is None there; a veto is a line of the figure."""
    with RunWriter(tmp_path / "marked") as run:
        run.step({"step": 0, "loss": 2.0})
        run.step({"step": 1, "loss": float("nan"), "extra": 1})
        run.event("veto", step=1)
    columns = Run.open("marked", tmp_path).columns()
    assert columns["extra"] == [None, 1] and columns["step"] == [0, 1]
    assert plot_run(Run.open("marked", tmp_path)).marks == {"veto 1": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda make: train_run({"modl": "1M", "data": {"sources": {"a": "x"}}}),
            "modl: unknown key; did you mean model",
        ),
        (lambda make: train_run(make(), {"optimizer.lr": "fast"}), "optimizer.lr: expected a number such as 3e-4"),
        (
            lambda make: train_run(make(), {"parallel.tp": 2}),
            "parallel.tp: 2 does not divide 2 heads, 1 key-value heads",
        ),
        (lambda make: train_run("missing.yaml"), "missing.yaml: no such file"),
        (lambda make: plan_run(), "pass a spec, or model and gpus"),
        (lambda make: plan_run(make(), network="400 Gb/s"), "network: for GPUs of the catalogue"),
        (lambda make: Run.open("nowhere"), "nowhere: no such run, neither as a folder nor in runs/"),
        (lambda make: evaluate_run("runs/x"), "name what to measure"),
    ],
)
def test_mistakes_are_one_line(call: Callable[[Make], object], message: str, make_spec: Make) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        call(make_spec)
    assert message in str(caught.value)


def test_an_unknown_metric_is_named(make_spec: Make) -> None:
    spec = make_spec("short", budget={"steps": 2, "batch": 128})
    train_run(spec)
    with pytest.raises(UserError, match=r"los: no such metric in .*; there are step, "):
        Run(run_folder(spec)).columns("los")
