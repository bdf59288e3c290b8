"""The report of a run: its numbers, its incidents, its cost, and that nothing in it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.watch.conftest import MARKUP

pytest.importorskip("msgspec")

from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.evaluate.results import Evaluation, TaskResult
from bessemer.plan.cost_model.cost import list_price, load_prices
from bessemer.run.directory import Run, RunWriter
from bessemer.watch.report import BINS, RunReport


@pytest.fixture
def run(runs: Path) -> Run:
    return Run(runs / "first")


def test_the_page_tells_what_happened_and_runs_nothing(run: Run) -> None:
    page = RunReport(run).html()
    assert "finished: the budget is spent; step 60 of 60" in page
    assert "veto 1" in page and "reports/anomaly-000030.html" in page
    assert "&lt;script&gt;window.hacked" in page  # the reason of a decision
    assert "<script" not in page and "<img" not in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert page.count("<svg") == 5  # loss, validation, rate, norm, speed


def test_cost_and_energy_by_hand(run: Run) -> None:
    content = RunReport(run, usd_hour=3.0).to_json()
    assert content["cost"]["training_s"] == pytest.approx(60 * 0.5)
    times = [event["time"] for event in run.events()]
    hours = (max(times) - min(times)) / 3600
    assert content["cost"]["usd"] == pytest.approx(3.0 * hours) and content["cost"]["energy_kwh"] is None
    assert content["incidents"] == {"veto": 1} and content["tokens"] == 60 * 128
    json.dumps(content, allow_nan=False)


def test_scores_of_evaluations_are_a_table(run: Run) -> None:
    """As `bessemer evaluate` writes them."""
    scores = [TaskResult("law", "acc", [1.0, 0.0], ["0", "1"], 0.5, 0, "t", MARKUP)]
    Evaluation("first", scores).write(run.folder / "evaluations" / "step-00000060.a1")
    report = RunReport(run)
    assert [row["value"] for row in report.to_json()["evaluations"]] == [0.5]
    assert all(f"<td>{text}</td>" in report.html() for text in ("law", "acc", "0.5", "step-00000060.a1"))


def test_the_price_of_a_known_gpu_is_the_lowest_on_demand() -> None:
    usd_hour, source = list_price("NVIDIA H100 80GB HBM3")
    offers = [price for price in load_prices().prices if price.gpu.startswith("H100") and price.term == "on_demand"]
    assert usd_hour == min(price.usd_hour for price in offers) and "on-demand" in source
    assert list_price("a toaster") == (None, "")


def test_a_spike_of_one_step_stays_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    steps = 5 * BINS
    with RunWriter(tmp_path / "long") as writer:
        writer.event("started", step=0, total_steps=steps)
        for step in range(steps):
            writer.step({"step": step, "loss": 77.0 if step == 1234 else 2.0, "step_s": 1.0})
        writer.event("finished", step=steps, reason="done")
    report = RunReport(Run(tmp_path / "long"))
    chart = next(report._charts())
    assert max(chart.series["loss, highest"]) == 77.0 and max(chart.series["loss"]) < 77.0


def test_the_command(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(run.folder)])
    assert result.exit_code == 0 and Path("first-report.html").read_text().startswith("<!doctype html>")
    assert CliRunner().invoke(app, ["report", str(run.folder), "--out", "r.md"]).exit_code == 0
    assert "| 30" in Path("r.md").read_text()
    result = CliRunner().invoke(app, ["report", str(run.folder), "--json"])
    assert json.loads(result.stdout)["name"] == "first"
    with pytest.raises(Exception, match=r"end the name with \.html or \.md"):
        CliRunner().invoke(app, ["report", str(run.folder), "--out", "r.pdf"], catch_exceptions=False)
