"""Each training project of `bessemer new`: its specs are right, and (slow) its own tests pass."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import bessemer
from bessemer.cli.main import app
from bessemer.starters.project import TRAINED, new_project

SOURCE = str(Path(bessemer.__file__).parents[1])


@pytest.mark.parametrize("kind", TRAINED)
def test_specs_are_right_on_the_projects_data(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-project"
    names = {path.name for path in new_project(kind, folder)}
    assert {"README.md", "make_data.py", "test_project.py", "conftest.py", ".gitignore"} <= names
    for path in folder.rglob("*"):
        assert not path.is_file() or "{{" not in path.read_text(), path
    monkeypatch.chdir(folder)
    runpy.run_path("make_data.py", run_name="__main__")
    specs = sorted(path.name for path in folder.glob("*.yaml"))
    assert specs
    for spec in specs:
        result = CliRunner().invoke(app, ["spec", "check", spec])
        assert result.exit_code == 0 and f"{spec}: fine" in result.output, result.output
        assert spec in (folder / "README.md").read_text()


@pytest.mark.parametrize("kind", TRAINED)
def test_the_commands_of_a_readme_exist(kind: str, tmp_path: Path) -> None:
    new_project(kind, tmp_path / "my-project")
    block = (tmp_path / "my-project" / "README.md").read_text().split("```")[1]
    lines = [line.split("#")[0].split() for line in block.splitlines() if line.startswith("bessemer ")]
    assert lines
    for words in lines:
        help = CliRunner().invoke(app, [*words[1:2], "--help"])
        assert help.exit_code == 0, words


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", TRAINED)
def test_a_projects_own_tests(kind: str, tmp_path: Path) -> None:
    new_project(kind, tmp_path / "my-project")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path / "my-project"),
    ]
    result = subprocess.run(
        command, cwd=tmp_path / "my-project", capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout[-4000:] + result.stderr[-1000:]
