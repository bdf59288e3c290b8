"""A run beside its plan: the first on a machine is measured, the next one is predicted and compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.observe.view import LineView
from bessemer.plan.actual import HostLoad
from bessemer.run.directory import Run
from bessemer.session import record
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.rank_report import HostLoadProbe

from .conftest import Faults

Quiet = type("Quiet", (HostLoadProbe,), {"__call__": lambda self: HostLoad(others_busy=0.0)})


def test_the_first_run_teaches_the_second(
    make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "WORTH_KEEPING_S", 0.0)
    monkeypatch.setattr(record, "HostLoadProbe", Quiet)  # whatever else this machine is doing
    first, second = make_spec("first"), make_spec("second")
    Session(first).train()
    plan = json.loads((run_folder(first) / "plan.json").read_text())["decisions"]
    (said,) = [one for one in plan if one["key"].startswith("expected.")]
    assert said["value"] == "unknown" and "bessemer bench" in said["reason"]
    (kept,) = (tmp_path / "cache/bessemer/machines").glob("*.runs.jsonl")
    entry = json.loads(kept.read_text())
    assert entry["run"] == "first" and entry["base_s"] is None and entry["step_s"] > 0

    Session(second, LineView(line_every_s=0.0)).train()
    said = capsys.readouterr().out
    assert "% of plan)" in said and "against plan  memory" in said
    plan = json.loads((run_folder(second) / "plan.json").read_text())["decisions"]
    named = {one["key"]: one for one in plan}
    assert {"expected.tokens_per_s", "expected.mfu", "expected.time", "expected.memory"} <= set(named)
    assert "1 earlier run on this machine" in named["expected.tokens_per_s"]["reason"]
    (event,) = Run(run_folder(second)).events("against_plan")
    numbers = event["numbers"]
    rate = 128 / entry["step_s"]  # tokens of a batch
    assert abs(numbers["tokens/s"]["plan"] / rate - 1) < 1e-6 and numbers["tokens/s"]["run"] > 0
    assert set(numbers) == {"memory", "tokens/s", "MFU", "time", "error_bar", "basis", "steps"}
    assert len(kept.read_text().splitlines()) == 2
    folder = str(run_folder(second))
    shown = CliRunner().invoke(app, ["runs", folder]).output
    assert "run/plan" in shown and "MFU" in shown
    (told,) = json.loads(CliRunner().invoke(app, ["runs", folder, "--json"]).output)
    assert told["against_plan"]["memory"]["ratio"] > 0


def test_short_runs_and_those_with_faults_are_not_kept(
    make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Session(make_spec("short", budget={"steps": 6})).train()
    monkeypatch.setattr(record, "WORTH_KEEPING_S", 0.0)
    Session(make_spec("faulty", budget={"steps": 6}), faults=Faults()).train()
    assert not list((tmp_path / "cache").rglob("*.runs.jsonl"))


def test_a_step_is_measured_before_the_first_one_and_changes_nothing(
    make_spec: Callable[..., RunSpec], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = make_spec("plain", budget={"steps": 8}, dropout={"residual": 0.1})
    measured = make_spec("measured", budget={"steps": 8}, dropout={"residual": 0.1})
    Session(plain).train()
    monkeypatch.setattr(record, "WORTH_MEASURING_S", 0.0)
    estimates = []
    kept = record.estimate_duration
    monkeypatch.setattr(record, "estimate_duration", lambda *a: estimates.append(kept(*a)) or estimates[-1])
    Session(measured).train()
    (estimate,) = estimates
    assert estimate is not None and estimate.seconds > 0 and "measured before the first step" in estimate.basis
    losses = [[step["loss"] for step in Run(run_folder(spec)).metrics()] for spec in (plain, measured)]
    assert losses[0] == losses[1]
