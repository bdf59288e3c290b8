"""Runs of other frameworks on the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.observe.foreign import read
from bessemer.run.directory import RunWriter, list_runs
from bessemer.watch.access import PageAccess
from bessemer.watch.app import make_app
from bessemer.watch.export import export_run
from bessemer.watch.foreign import import_runs
from bessemer.watch.library import Library

LOG = "step 0: train loss 4.2874, val loss 4.2823\n" + "".join(
    f"iter {step}: loss {'nan' if step == 7 else 4 - step / 100}, time 12.50ms, mfu 12.34%\n" for step in range(100)
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "gpt 2.log"
    path.write_text(LOG)
    return path


def test_the_page_shows_an_imported_run(log: Path, tmp_path: Path) -> None:
    state = {"step": 10, "loss": 2.5, "learning_rate": 1e-3}
    history = [state, state | {"step": 20, "loss": 2.0}, {"step": 20, "eval_loss": 2.25}]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 40}))
    (tmp_path / "out" / "config.json").write_text('{"hidden_size": 64}')
    runs = tmp_path / "runs"
    imported = import_runs([log, tmp_path / "out"], runs)
    assert [(run.name, run.format) for run in imported] == [("gpt-2", "nanogpt"), ("out", "hf_trainer")]
    page = TestClient(make_app(Library(runs), PageAccess("", True, 8800)), base_url="http://127.0.0.1")
    summaries = {run["name"]: run for run in page.get("/api/runs").json()["runs"]}
    assert summaries["out"]["total_steps"] == 40 and summaries["out"]["state"] == "finished"
    steps, validation = page.get("/api/runs/out/series?names=loss|lr|validation:loss&bins=50").json()["groups"]
    assert steps["x"] == [10, 20] and steps["series"]["loss"]["mean"] == [2.5, 2.0]
    assert validation["x"] == [20] and validation["series"]["validation:loss"]["mean"] == [2.25]
    assert "hidden_size: 64" in page.get("/api/runs/out").json()["spec"]
    (group,) = page.get("/api/runs/gpt-2/series?names=loss|step_s|mfu&bins=500").json()["groups"]
    assert group["x"] == list(range(100)) and group["series"]["loss"]["bad"][7] == 1
    assert group["series"]["step_s"]["mean"][5] == pytest.approx(0.0125)
    assert group["series"]["loss"]["mean"][99] == pytest.approx(3.01)
    lines = [event["line"] for event in page.get("/api/runs/gpt-2/events").json()["events"]]
    assert f"imported  from {log}" in lines
    assert export_run([runs / "gpt-2"], tmp_path / "one.html") > 10_000


def test_an_imported_run_reads_back(log: Path, tmp_path: Path) -> None:
    import_runs([log], tmp_path / "runs")
    (before,), (after,) = read(log), read(tmp_path / "runs" / "gpt-2")
    for name in ("loss", "validation_loss", "step_s", "mfu"):
        np.testing.assert_array_equal(after.series[name].steps, before.series[name].steps)
        np.testing.assert_array_equal(after.series[name].values, before.series[name].values)


def test_imports_are_replaced_and_other_runs_are_not(log: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    import_runs([log, log], runs)
    log.write_text(LOG + "iter 100: loss 2.0, time 12.50ms, mfu 12.34%\n")
    import_runs([log], runs)
    assert {run.name: run.step for run in list_runs(runs)} == {"gpt-2": 101, "gpt-2-2": 100}
    with RunWriter(tmp_path / "other" / "gpt-2") as run:
        run.event("started", step=0)
    with pytest.raises(UserError, match="exists and was not imported"):
        import_runs([log], tmp_path / "other")
    assert [path.name for path in runs.iterdir() if path.name.startswith(".")] == []


def test_the_command(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    runs = tmp_path / "imported"
    command = ["watch", str(runs), "--import", str(log), "--port", "0", "--no-browser"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "imported gpt-2  nanogpt" in result.output and (runs / "gpt-2" / "events.jsonl").exists()
    (tmp_path / "poem.txt").write_text("Roses\n")
    result = CliRunner().invoke(app, [*command, "--import", str(tmp_path / "poem.txt")])
    assert isinstance(result.exception, UserError) and "looked for trainer_state.json" in str(result.exception)
