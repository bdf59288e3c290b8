"""`spec check` looks for what a spec names; a path that cannot be looked at is a line, never a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.spec.data import STEPS
from bessemer.spec.lints import lint_spec
from bessemer.spec.paths import STEP_PATHS, NamedPath, find_path_problem, path_problems
from bessemer.spec.schema import RunSpec


def spec_of(**more: Any) -> RunSpec:
    return RunSpec.model_validate({"model": "1M", "data": {"sources": {"web": "here.jsonl"}}} | more)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("here.jsonl").write_text("{}\n")
    Path("empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nope.jsonl", "no such file or folder: 'nope.jsonl'"),
        ("here.jsonl/x", "no such file or folder"),
        ("x" * 420 + ".jsonl", "a path of 426 characters is too long for this file system"),
        ("a/" * 3000, "too long for this file system"),
        ("a\0b", "'a\\x00b' cannot be read: embedded null byte"),
        ("*.parquet", "no file matches '*.parquet'"),
        ("empty", "is an empty folder"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_source_that_cannot_be_read(path: str, problem: str) -> None:
    os.symlink("loop", "loop")
    spec = spec_of(data={"sources": {"web": path}})
    (found,) = path_problems(spec)
    assert found[0] == ("data", "sources", "web", "path") and problem in found[1]
    assert "\n" not in found[1] and len(found[1]) < 300
    lint_spec(spec)  # reads first rows where it can


@pytest.mark.parametrize("path", ["here.jsonl", "*.jsonl", ".", "s3://bucket/x", "https://host/x.jsonl", "python"])
def test_a_source_that_is_there_or_is_elsewhere(path: str) -> None:
    assert not list(path_problems(spec_of(data={"sources": {"web": path}})))


def test_a_file_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    assert "permission denied" in (find_path_problem(NamedPath(("x",), "here.jsonl")) or "")


@pytest.mark.parametrize(
    ("more", "key", "problem"),
    [
        ({"model": {"hf": "nope"}}, "model.hf", "no such folder"),
        ({"model": {"hf": "here.jsonl"}}, "model.hf", "is a file: write a folder"),
        ({"model": {"hf": "."}}, "model.hf", "it has no config.json"),
        ({"start_from": "empty"}, "start_from", "is an empty folder"),
        ({"start_from": "."}, "start_from", "is not a checkpoint"),
        ({"tokenizer": {"path": "tok.json"}}, "tokenizer.path", "no such file or folder"),
        ({"tokenizer": {"chat": "x.jinja"}}, "tokenizer.chat", "no such file"),
        ({"tokenizer": {"chat": "empty"}}, "tokenizer.chat", "is a folder: write a file"),
    ],
)
def test_other_paths(more: dict[str, Any], key: str, problem: str) -> None:
    (found,) = path_problems(spec_of(**more))
    assert ".".join(map(str, found[0])) == key and problem in found[1]


def test_paths_of_curation_steps() -> None:
    steps = [
        {"quality": {"model": "q"}}, {"toxicity": {"lexicons": {"en": "words"}}}, {"block_urls": {"lists": ["a", "b"]}},
        {"decontaminate": {"sets": {"arc": "arc/*.jsonl"}}}, {"score": {"function": "dir/f.py:f"}},
        {"score": {"function": "module:f"}},
    ]  # fmt: skip
    found = dict(path_problems(spec_of(data={"sources": {"web": "here.jsonl"}, "clean": steps})))
    keys = [".".join(map(str, key)) for key in found]
    assert keys == [
        "data.clean.0.quality.model", "data.clean.1.toxicity.lexicons", "data.clean.2.block_urls.lists",
        "data.clean.3.decontaminate.sets.arc", "data.clean.4.score.function",
    ]  # fmt: skip


def test_every_step_key_with_a_path_exists() -> None:
    assert all(key in STEPS[step].model_fields for step, keys in STEP_PATHS.items() for key in keys)


def test_a_models_folder_is_opened_as_far_as_its_config() -> None:
    folder = Path("model")
    folder.mkdir()
    spec = spec_of(model={"hf": "model"})

    def problem() -> str:
        return next((text for _, text in path_problems(spec, read)), "")

    def read(config: dict[str, Any]) -> None:
        if config.get("model_type") != "llama":
            raise UserError("config.json: model_type: 'x' is unknown")

    (folder / "config.json").write_text("{")
    assert "has no weights" in problem()
    (folder / "model.safetensors").touch()
    assert "has no tokenizer.json" in problem()
    (folder / "tokenizer.json").touch()
    assert "config.json cannot be read" in problem()
    (folder / "config.json").write_text("[]")
    assert "config.json cannot be read" in problem()
    (folder / "config.json").write_text("{}")
    assert "'model': config.json: model_type: 'x' is unknown" in problem()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert problem() == ""


def test_what_rewards_and_environments_name_must_exist() -> None:
    rewards = {
        "own": "nope.py:f", "fine": "here.jsonl:f", "taste": {"model": "runs/no"},
        "form": {"verifier": "json", "json_schema": "no.json"},
        "judge": {"judge": {"url": "http://localhost:1/v1", "model": "j", "rubric": "no.md"}},
    }  # fmt: skip
    rl = {"rewards": rewards, "environment": "tools.py:Env"}
    source = {"path": "here.jsonl", "columns": {"prompt": "q"}}
    spec = RunSpec.model_validate({"model": "1M", "objective": "grpo", "rl": rl, "data": {"sources": {"web": source}}})
    problems = {".".join(map(str, key)): text for key, text in path_problems(spec)}
    assert set(problems) == {
        "rl.rewards.own.function", "rl.rewards.taste.model", "rl.rewards.form.json_schema",
        "rl.rewards.judge.judge.rubric", "rl.environment",
    }  # fmt: skip
    assert "no such file: 'nope.py'" in problems["rl.rewards.own.function"]
