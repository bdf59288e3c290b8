"""`objective: reward` end to end: pairs are learned, the numbers do not depend on accumulation, resumes are exact, and
an export scores as the run does."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.session.conftest import spec_data, train_until

from bessemer.align.reward_model import RewardModel
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec

COLOURS = ["red", "green", "blue", "black"]
COLUMNS = {"prompt": "question", "chosen": "good", "rejected": "bad"}


def make_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The chosen answer names the colour of the question. The margin is that of a clear case."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        first, second = draw.sample(COLOURS, 2)
        question = f"is {first} {draw.randrange(1000)}"
        rows.append({"question": question, "good": f"yes {first}", "bad": f"no {second}", "margin": number % 2})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", make_pairs(200))


def make_spec(pairs: Path, name: str, **parts: Any) -> RunSpec:
    columns = {**COLUMNS, **parts.pop("columns", {})}
    data = {"sources": {"pairs": {"path": str(pairs), "columns": columns}}, "context": 48, "validation": 0.25}
    budget = {"steps": 30, "batch": 16 * 48, **parts.pop("budget", {})}
    spec = spec_data(name, pairs, pairs.parent / "runs", objective="reward", data=data, budget=budget)
    spec |= {"tokenizer": {"kind": "char", "chat": "none"}, "optimizer": {"lr": 3e-3}, **parts}
    return RunSpec.model_validate(spec)


def columns_of(spec: RunSpec, *names: str) -> np.ndarray:
    return np.array([[record[name] for name in names] for record in Run.existing(run_folder(spec)).metrics()])


@pytest.mark.parametrize(
    "section", [pytest.param({}, id="plain"), pytest.param({"heads": 3, "smoothing": 0.1}, id="ensemble")]
)
def test_pairs_are_learned_and_accumulation_changes_nothing(pairs: Path, section: dict[str, Any]) -> None:
    curves, names = [], ["loss", "accuracy", "margin", "mean_reward", "grad_norm"]
    names += ["ensemble_std"] * bool(section)
    for micro in (16, 4):
        spec = make_spec(pairs, f"m{micro}-{len(section)}", reward=section, budget={"micro_batch": micro})
        outcome = Session(spec).train()
        curves.append(columns_of(spec, *names))
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3, atol=2e-4)
    assert outcome.kind == "finished" and outcome.validation is not None
    assert outcome.validation["accuracy"] > 0.95 and outcome.validation["margin"] > 1


def test_the_export_scores_as_the_run_and_as_transformers_does(pairs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from bessemer.export.hf import open_native, to_hf

    for heads in (1, 2):
        spec = make_spec(pairs, f"export-{heads}", reward={"heads": heads}, budget={"steps": 6})
        Session(spec).train()
        folder = tmp_path / f"hf-{heads}"
        to_hf(open_native(run_folder(spec)), folder)
        ours = RewardModel.load(run_folder(spec), device="cpu")
        rows = make_pairs(20, seed=1)
        prompts, answers = [row["question"] for row in rows], [row["good"] for row in rows]
        talks = [
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["good"]}]
            for row in rows
        ]
        scores = ours.head_scores(talks)
        torch.testing.assert_close(RewardModel.load(folder, device="cpu").head_scores(talks), scores)
        alone = torch.cat([ours.head_scores([talk]) for talk in talks])
        torch.testing.assert_close(alone, scores, rtol=1e-5, atol=1e-6)
        theirs, tokenizer = (
            AutoModelForSequenceClassification.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )
        assert theirs.config.num_labels == heads
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        with torch.no_grad():  # padded on the right, as in TRL
            inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
            torch.testing.assert_close(theirs.eval()(**inputs).logits, scores, rtol=1e-4, atol=1e-5)
        means = ours.score_with_std(prompts, answers)
        assert [mean for mean, _ in means] == ours.score(prompts, answers)
        assert all((std > 0) == (heads > 1) for _, std in means)


def test_a_resume_is_exact(pairs: Path) -> None:
    section = {"heads": 2, "center_rewards_coefficient": 0.1}
    spec = make_spec(pairs, "complete", reward=section, budget={"steps": 8})
    Session(spec).train()
    stopped = make_spec(pairs, "stopped", reward=section, budget={"steps": 8})
    train_until(stopped, 3)
    Session(stopped).train()
    names = ("loss", "margin", "ensemble_std")
    np.testing.assert_array_equal(columns_of(spec, *names), columns_of(stopped, *names))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "sft"}, "would learn the rejected answers too"),
        ({"objective": "dpo", "reward": {"heads": 2}}, "has no effect with objective: dpo"),
        ({"reward": {"heads": 0}}, "heads"),
        ({"parallel": {"cp": 2}}, "summed over complete rows: write cp: 1"),
        ({"models": {"reference": "runs/base"}}, "objective: reward uses no other model"),
        ({"data": {"sources": {"a": {"path": "x.jsonl", "messages_field": "m"}}}}, "reward compares two answers"),
    ],
)
def test_mistakes_have_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    sources = {"pairs": {"path": "pairs.jsonl", "columns": COLUMNS}}
    spec = {"model": "1M", "objective": "reward", "data": {"sources": sources}, "budget": {"steps": 1}, **change}
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(spec))
    with pytest.raises(UserError, match=message):
        load_spec(path)


def test_a_margin_that_is_no_number_is_named(tmp_path: Path) -> None:
    rows = [{**row, "margin": "much"} for row in make_pairs(4)]
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(UserError, match=r"pairs.jsonl:1: 'margin' holds 'much' and not a finite number"):
        Session(make_spec(path, "margin", columns={"margin": "margin"})).train()


def test_a_model_that_scores_nothing_is_refused(pairs: Path) -> None:
    spec = make_spec(pairs, "dpo", objective="dpo", dpo={"loss": "simpo"}, budget={"steps": 1})
    Session(spec).train()
    with pytest.raises(UserError, match="is no reward model: train one with objective: reward"):
        RewardModel.load(run_folder(spec))
