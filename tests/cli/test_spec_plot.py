"""`bessemer spec show --plot` draws the schedule of a spec before any data is there."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app

SPEC = """
model: 1M
data: {sources: {a: nowhere.jsonl}}
budget: {steps: 2000}
optimizer: {lr: 3e-4}
schedule: {kind: wsd, decay: 20%, floor: 0%, warmup: 100, segments: [{from_step: 1000, to: 50%, length: 100 steps}]}
"""


def shown(folder: Path, *options: str) -> str:
    path = folder / "run.yaml"
    path.write_text(SPEC)
    result = CliRunner().invoke(app, ["spec", "show", str(path), "--plot", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_curve_its_peak_and_its_changes_are_drawn(tmp_path: Path) -> None:
    lines = shown(tmp_path).splitlines()
    assert lines[0].startswith("learning rate   * wsd") and "the learning-rate schedule changes 1e+03" in lines[0]
    assert lines[1].strip().startswith("0.0003") and lines[1].count("*") > 20, "the peak lasts until the segment"
    assert len(lines) == 16 or not lines[16].strip()


def test_json_has_the_steps_and_rates(tmp_path: Path) -> None:
    drawn = json.loads(shown(tmp_path, "--json"))
    rates = dict(zip(drawn["steps"], drawn["lr"], strict=True))
    assert rates[0] == pytest.approx(3e-6) and rates[500] == 3e-4 and rates[1999] == pytest.approx(1.5e-4)
    assert drawn["notes"] == []


def test_what_the_plan_decides_is_noted(tmp_path: Path) -> None:
    output = shown(tmp_path, "--set", "optimizer.lr=auto", "--set", "budget.steps=null")
    assert "as a share of the peak" in output and "assumed 1,000" in output
