"""`bessemer review` on the command line."""

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app

FAULTY = """import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(10):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss)
raise SystemExit("it was run")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text(FAULTY)
    return path


def test_faults_with_line_and_fix(script: Path) -> None:
    result = CliRunner().invoke(app, ["review", str(script)])
    assert result.exit_code == 1
    assert "train.py:8: critical: `optimizer` steps in a loop that never clears" in result.output
    assert "train.py:9:" in result.output and "2 faults" in result.output
    assert script.read_text() == FAULTY


def test_json_is_one_finding_a_fault(script: Path) -> None:
    result = CliRunner().invoke(app, ["review", str(script), "--json"])
    (review,) = json.loads(result.output)
    assert [finding["rule"] for finding in review["findings"]] == ["zero-grad-missing", "loss-keeps-graph"]
    assert review["findings"][0]["evidence"] == {"file": "train.py", "line": 8, "patch": True}
    assert review["patch"].startswith("--- a/train.py")


def test_the_patch_applies_and_clears_the_faults(script: Path) -> None:
    result = CliRunner().invoke(app, ["review", str(script), "--patch"])
    assert result.exit_code == 1
    subprocess.run(["git", "apply"], input=result.output, text=True, check=True)
    assert "    optimizer.zero_grad()\n    losses.append(loss.detach())" in script.read_text()
    assert CliRunner().invoke(app, ["review", str(script)]).exit_code == 0


def test_fix_changes_the_file(script: Path) -> None:
    result = CliRunner().invoke(app, ["review", str(script), "--fix"])
    assert result.exit_code == 0 and result.output.count("(fixed)") == 2
    assert "optimizer.zero_grad()" in script.read_text()


def test_wrong_input_is_named(script: Path) -> None:
    for arguments in (["missing.py"], ["."], [str(script), "--patch", "--json"]):
        result = CliRunner().invoke(app, ["review", *arguments])
        assert result.exit_code != 0 and result.exception
