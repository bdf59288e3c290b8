"""`bessemer review` on the command line."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError

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


def run_review(*arguments: str) -> tuple[int, str]:
    """The exit code and what is printed, or the message of a refusal."""
    result = CliRunner().invoke(app, ["review", *arguments])
    if isinstance(result.exception, UserError):
        return 2, str(result.exception)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.log", b"loss 1.0\n", "a.log: is not Python; `bessemer review` reads .py and .ipynb"),
        ("a.json", b"{}", "a.json: is not Python"),
        ("a.py", b" \n", "a.py: is empty"),
        ("a.py", b"import torch\nprint 'hello'\n", "a.py:2: is Python 2; `bessemer review` reads Python 3"),
        ("a.py", b"for x in y\n    pass\n", "a.py:1: is not valid Python: expected ':'"),
        ("a.py", b"\xff\xfe\x00", "a.py: is not a text in UTF-8, the encoding of Python files"),
        ("a.py", b"x = 1\x00", "a.py: is not a text"),
        ("a.ipynb", b"{}", "a.ipynb: is not a notebook of format 4"),
        ("a.ipynb", b'{"cells": [{"cell_type": "markdown", "source": "x"}]}', "a.ipynb: has no Python code"),
        ("other.py", None, "other.py: no such file or folder"),
        ("sub", None, "sub: holds no Python file"),
    ],
)
def test_what_is_no_python_is_refused_by_name(script: Path, name: str, content: bytes | None, message: str) -> None:
    Path("sub").mkdir()
    if content is not None:
        Path(name).write_bytes(content)
    code, output = run_review(name)
    assert code == 2 and output.startswith(message) and "\n" not in output.strip()


def notebook(*cells: tuple[str, str]) -> str:
    rows = [{"cell_type": kind, "source": text.splitlines(keepends=True), "metadata": {}} for kind, text in cells]
    return json.dumps({"cells": rows, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_the_cells_of_a_notebook(script: Path) -> None:
    first, loop = FAULTY.split("losses", 1)
    cells = [("code", "%matplotlib inline\n!pip install torch\nfiles = !ls\n" + first), ("markdown", "# Loop"),
             ("code", "%%bash\nfor x in y; do"), ("code", "%%time\nlosses" + loop)]  # fmt: skip
    Path("a.ipynb").write_text(notebook(*cells))
    code, output = run_review("a.ipynb")
    assert code == 1 and "a.ipynb:cell 4:6: critical: `optimizer` steps" in output and "a.ipynb:cell 4:7:" in output
    (review,) = json.loads(run_review("a.ipynb", "--json")[1])
    places = [(row["evidence"]["cell"], row["evidence"]["line"]) for row in review["findings"]]
    assert places == [(4, 6), (4, 7)] and review["patch"] == ""
    for option in ("--fix", "--patch"):
        code, output = run_review("a.ipynb", option)
        assert code == 2 and "jupyter nbconvert --to script a.ipynb" in output
    Path("a.ipynb").write_text(notebook(("code", "x = 1"), ("code", "y = 2\nfor x in y\n    pass")))
    assert run_review("a.ipynb") == (2, "a.ipynb:cell 2:2: is not valid Python: expected ':'")


def test_a_folder_with_what_is_below_it(script: Path) -> None:
    for name in ("code/sub/a.py", "code/.venv/a.py", "code/env/lib/site-packages/x/a.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(FAULTY)
    Path("code/__init__.py").write_text("")
    Path("code/one.py").write_text(FAULTY.replace("losses.append(loss)", "optimizer.zero_grad()"))
    code, output = run_review("code", "code/one.py")
    assert code == 1 and output.count("[zero-grad-missing]") == 1 and "code/sub/a.py:8" in output
    assert "2 files: 2 faults, 0 notes, 2 with a patch" in output
    Path("code/old.py").write_text("print 'hello'\n")
    code, output = run_review("code")
    assert code == 1 and "not reviewed: code/old.py:1: is Python 2" in output and "code/sub/a.py:8" in output


def test_one_is_no_plural(script: Path) -> None:
    script.write_text(FAULTY.replace("losses.append(loss)", "print(step)"))
    assert "1 file: 1 fault, 0 notes, 1 with a patch" in run_review("train.py")[1]


@pytest.mark.parametrize("encode", [
    lambda text: text.replace("\n", "\r\n").encode(), lambda text: text.encode("utf-8-sig"),
    lambda text: f"# -*- coding: latin-1 -*-\n# \u00e9\n{text}".encode("latin-1"),
], ids=["crlf", "mark", "latin-1"])  # fmt: skip
def test_line_ends_and_encoding_stay(script: Path, encode: Callable[[str], bytes]) -> None:
    script.write_bytes(encode(FAULTY))
    assert run_review("train.py", "--fix")[0] == 0
    fixed = FAULTY.replace("losses.append(loss)", "optimizer.zero_grad()\n    losses.append(loss.detach())")
    assert script.read_bytes() == encode(fixed)


def test_the_patch_of_an_absolute_path_applies(script: Path) -> None:
    output = run_review(str(script.resolve()), "--patch")[1]
    assert output.startswith("--- a/train.py\n+++ b/train.py\n")
    Path("other").mkdir()
    script.rename("other/train.py")
    assert run_review(str(Path("other/train.py").resolve()), "--patch")[1].startswith("--- a/other/train.py\n")
