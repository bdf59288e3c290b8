"""The fine-tuning recipes on the models and data that they name, as a newcomer runs them."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.export.hf import open_native, to_hf
from bessemer.model.generate import Sampling
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.lints import lint_spec
from bessemer.spec.load import load_document
from bessemer.spec.schema import RunSpec
from bessemer.train.answers import AnswerSettings, answer_all, read_prompts
from bessemer.train.trained import load_model

ROOT = Path(__file__).parents[2]
FAST = ("sft", "qlora", "classify", "dpo", "kto", "reward", "grpo")
SLOW = ("lora", "prefix", "tools", "distill", "gkd", "orpo", "ppo")
FINE_TUNING = (*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
pytest.importorskip("transformers")


def recipe(name: str, **budget: float) -> RunSpec:
    spec = load_document(ROOT / "recipes" / f"{name}.yaml", ["parallel.device=cpu"]).spec
    return spec.model_copy(update={"budget": spec.budget.model_copy(update=budget)})


def make_base(exercises: int, **budget: int) -> None:
    """recipes/data and runs/tiny-base of the current folder."""
    path = ROOT / "recipes" / "make_data.py"
    spec = importlib.util.spec_from_file_location("make_data", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(Path("recipes/data"), exercises)
    base = recipe("tiny-base", **budget)
    if budget:
        base = base.model_copy(update={"schedule": base.schedule.model_copy(update={"warmup": "auto"})})
    assert Session(base).train().kind == "finished"
    to_hf(open_native(run_folder(base)), Path("runs/tiny-base/export/hf"))
    Path("runs/sft").mkdir()
    Path("runs/sft/export").symlink_to(Path("runs/tiny-base/export").absolute())  # that of recipes/sft.yaml


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, one_probe: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("recipes"))
        make_base(600, steps=4)
        yield


@pytest.mark.parametrize("name", FINE_TUNING)
def test_each_is_right_and_trains(name: str, base: None) -> None:
    path = ROOT / "recipes" / f"{name}.yaml"
    result = CliRunner().invoke(app, ["spec", "check", str(path)])
    assert result.exit_code == 0 and "fine" in result.output, result.output
    spec = recipe(name, steps=3, epochs=None)
    spec = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"warmup": "auto"})})
    assert lint_spec(spec, folder=Path.cwd()) == []
    assert Session(spec).train().kind == "finished"
    assert len(list(Run(run_folder(spec)).metrics())) == 3


@pytest.mark.parametrize("name", ["tiny-base", *FINE_TUNING])
def test_each_is_planned_on_this_machine(name: str, base: None) -> None:
    path = str(ROOT / "recipes" / f"{name}.yaml")
    result = CliRunner().invoke(app, ["plan", path, "--set", "parallel.device=cpu"])
    assert result.exit_code == 0 and "this machine (" in result.output and "K parameters on " in result.output
    if name == "sft":
        assert "data.size" in result.output and "6 passes" in result.output
    result = CliRunner().invoke(app, ["plan", path, "--gpus", "1xH100"])
    assert result.exit_code == 0, result.exception


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tiny_model_learns_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SFT and after LoRA, above 90 % of the held-out questions are answered exactly and end there; the base
    answers none."""
    monkeypatch.chdir(tmp_path)
    make_base(20_000)
    prompts = read_prompts(Path("recipes/data/prompts.jsonl"))
    tests = [
        json.loads(line)["messages"][1]["content"] for line in Path("recipes/data/test.jsonl").read_text().splitlines()
    ]

    def right(model: str) -> float:
        answers = list(answer_all(load_model(model, device="cpu"), prompts, AnswerSettings(24, sampling=Sampling(0.0))))
        samples = [answer["samples"][0] for answer in answers]
        return sum(s["text"] == t and s["finish_reason"] == "stop" for s, t in zip(samples, tests, strict=True)) / 100

    assert right("runs/tiny-base/export/hf") == 0
    for name in ("sft", "lora"):
        Session(recipe(name)).train()
        assert right(f"runs/{name}") > 0.9, name
