"""The page and the notebook of the Python API run as they are, from top to bottom."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bessemer import Run, RunSpec
from bessemer.session import api

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "python.md").read_text()
pytestmark = pytest.mark.usefixtures("one_probe")


def run_blocks(blocks: list[str], name: str) -> dict[str, Any]:
    """The variables after all blocks have run."""
    variables: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{name}, block {number}", "exec"), variables)
    return variables


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    variables = run_blocks(re.findall(r"```python\n(.*?)```", PAGE, re.S), "docs/python.md")
    printed = capsys.readouterr().out
    assert "heats finished runs/heats" in printed and "'started'" in printed and "'finished'" in printed
    comment = re.search(r"print\(error\)  # (.*)", PAGE)
    assert comment and printed.rstrip().endswith(comment[1])
    losses = variables["columns"]["loss"]
    assert len(losses) == 40 and losses[-1] < losses[0] - 1
    assert RunSpec.model_fields.keys() >= {"model", "data"} and "parallel:" in Path("seven.yaml").read_text()


def test_the_members_and_functions_exist() -> None:
    table = PAGE.partition("| member | is |")[2].partition("\n\n")[0]
    for name in re.findall(r"`(\w+)[`(]", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)):
        assert hasattr(Run("runs/x"), name) or name in dir(Run), name
    for name in re.findall(r"`?(\w+_run)\(", PAGE):
        assert callable(getattr(api, name)), name


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells run in order, and the veto is where the text says it is."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    variables = run_blocks(
        ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"], "docs/notebook.ipynb"
    )
    assert [event["step"] for event in variables["poisoned"].events("veto")] == [variables["step"]]
    assert list(variables["clean"].events("veto")) == []
    assert variables["at"] > variables["before"] + 2 and abs(variables["after"] - variables["before"]) < 0.3
    figure = api.plot_run(variables["poisoned"])._repr_svg_()
    assert figure.startswith("<svg xmlns") and f"veto {variables['step']}" in figure
    printed = capsys.readouterr().out
    assert "optimizer.lr" in printed and f"step {variables['step']}: loss outlier" in printed
