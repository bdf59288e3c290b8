"""Verbs with --json print JSON with the facts of their lines, and nothing else on standard output."""

import json
from pathlib import Path

import pytest

from bessemer.run.directory import RunWriter

from .conftest import Call

SPEC = "name: a\nmodel: 1M\ndata:\n  sources: {web: data/}\n  context: 512\nbudget: {tokens: 3M}\n"


@pytest.fixture
def spec(call: Call) -> str:
    Path("data").mkdir()
    for number in range(20):
        Path(f"data/{number}.txt").write_text(f"{number} words\n" * 100)
    Path("a.yaml").write_text(SPEC)
    return "a.yaml"


def test_spec_check(call: Call, spec: str) -> None:
    answer = json.loads(call("spec", "check", spec, "--set", "optimizer.lr=1", "--json").out)
    assert answer["run"] == "a" and answer["paths_checked"]
    lines = call("spec", "check", spec, "--set", "optimizer.lr=1").out.splitlines()[:-1]
    assert [f"{w['place']}: warning: {w['key']}: {w['message']} [{w['rule']}]" for w in answer["warnings"]] == lines
    assert lines


def test_spec_show(call: Call, spec: str) -> None:
    assert json.loads(call("spec", "show", spec, "--json").out)["data"]["context"] == 512


def test_launch(call: Call, spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options = ("launch", spec, "--on", "slurm", "--gpus", "8", "--json")
    files = json.loads(call(*options, "--dry-run").out)["files"]
    assert any("#SBATCH" in text for text in files.values()) and not Path("runs").exists()
    submitted = call(*options)
    assert json.loads(submitted.out)["submitted"] is False and "is not installed here" in submitted.err
    assert all(Path(name).is_file() for name in files)
    refused = call("launch", spec, "--on", "local", "--gpus", "0", "--json")
    assert refused.code == 2 and refused.err.count("\n") == 1


def test_plan_job_and_emit(call: Call, spec: str) -> None:
    job = json.loads(call("plan", "job", spec, "--gpus", "8xH100", "--on", "slurm", "--json").out)
    assert all(Path(name).is_file() for name in job["files"]) and "sbatch" in job["start"]
    emitted = json.loads(call("launch", spec, "--emit", "torchtitan", "--json").out)
    assert all(Path(name).is_file() for name in emitted["files"]) and emitted["start"]


def test_new(call: Call) -> None:
    made = json.loads(call("new", "sentiment", "mine", "--json").out)
    assert made["kind"] == "sentiment" and all(Path(name).is_file() for name in made["files"])


def test_metrics_of_a_run(call: Call) -> None:
    with RunWriter("runs/a") as run:
        for step in range(3):
            run.step({"step": step, "loss": 3.0 - step, "lr": 0.1})
    answer = json.loads(call("runs", "metrics", "runs/a", "--json").out)
    assert answer["rows"] == [{"step": step, "loss": 3.0 - step, "lr": 0.1} for step in range(3)]
    said = call("runs", "metrics", "runs/a", "--names", "loss")
    assert said.out.splitlines()[0].split() == ["step", "loss"]
    assert said.out.splitlines()[-1].startswith("loss: min 1 at step 2, max 3 at step 0, mean 2")
    assert call("runs", "metrics", "runs/a", "--names", "reward").code == 2
