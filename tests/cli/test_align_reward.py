"""`bessemer align score` and `best`, and stages that make their rows, on models with known preferences."""

import json
import random
from pathlib import Path

import pytest
from tests.align.test_reward import make_pairs, make_spec, write_rows
from tests.session.conftest import spec_data

from bessemer.export.hf import open_native, to_hf
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.session.stages import train_chain
from bessemer.spec.schema import RunSpec
from bessemer.spec.stages import load_chain

from .conftest import Call


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A folder with prompts, a model that answers at random, and a reward model that knows the right answer."""
    folder = tmp_path_factory.mktemp("best")
    pairs, draw = make_pairs(240), random.Random(1)
    rows = [{"prompt": row["question"], "completion": row[draw.choice(("good", "bad"))]} for row in pairs]
    path = write_rows(folder / "answers.jsonl", rows)
    data = {"sources": {"a": {"path": str(path)}}, "context": 48, "validation": 0}
    spec = spec_data("sft", path, folder / "runs", objective="sft", data=data)
    spec |= {"tokenizer": {"kind": "char", "chat": "none"}, "budget": {"steps": 200, "batch": 768}}
    spec |= {"model": {"width": 64, "layers": 2, "heads": 4}}
    sft = RunSpec.model_validate(spec | {"optimizer": {"lr": 4e-3}})
    Session(sft).train()
    reward = make_spec(write_rows(folder / "pairs.jsonl", pairs), "reward", reward={"heads": 2}, budget={"steps": 40})
    Session(reward).train()
    prompts = [{"prompt": row["question"], "answer": row["good"]} for row in make_pairs(8, seed=5)]
    write_rows(folder / "prompts.jsonl", prompts)
    return folder, run_folder(sft), run_folder(reward)


@pytest.mark.slow
def test_best_of_n_raises_the_reward_and_writes_rows(
    models: tuple[Path, Path, Path], tmp_path: Path, call: Call
) -> None:
    folder, sft, reward = models
    base = ["align", "best", str(sft), "--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "16"]
    out, figure = tmp_path / "pairs.jsonl", tmp_path / "curve.svg"
    printed = call(
        *base, "--reward", str(reward), "--held-out", "{verifier: regex, pattern: '^yes'}", "--n", "8", "--pairs",
        "--write", str(out), "--figure", str(figure), "--json",
    )  # fmt: skip
    assert printed.code == 0, printed.err
    summary = json.loads(printed.out)
    curve = summary["curve"]
    assert [point["n"] for point in curve] == [1, 2, 4, 8]
    assert curve[3]["reward"] > curve[0]["reward"] + 0.5 and curve[3]["held_out"] > curve[0]["held_out"] + 0.2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == summary["rows"] > 0 and figure.read_text().startswith("<svg")
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in rows)
    printed = call("align", "score", str(reward), str(out), "--write", str(tmp_path / "scored.jsonl"))
    assert printed.code == 0 and "accuracy     100.0% of" in printed.out and "confidence" in printed.out, printed.err
    first = json.loads((tmp_path / "scored.jsonl").read_text().splitlines()[0])
    assert first["chosen_score"] == pytest.approx(first["chosen_reward"], abs=1e-4) and first["chosen_std"] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward", "nothing"], "--reward nothing: no such folder of a reward model, and no verifier 'nothing'"),
        (["--reward", "{verifier: regex}"], "verifier regex needs pattern"),
        (["--reward", "exact", "--pairs"], "--pairs: says what to write: add --write"),
        (["--reward", "exact", "--write", "rows.txt"], "write a name that ends in .jsonl"),
    ],
)
def test_mistakes_have_one_line(arguments: list[str], message: str, tmp_path: Path, call: Call) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "q"}])
    printed = call("align", "best", "runs/sft", "--prompts", str(prompts), *arguments)
    assert printed.code == 2 and message in printed.err


def test_files_that_cannot_be_scored_are_named(tmp_path: Path, call: Call) -> None:
    spec = make_spec(write_rows(tmp_path / "p.jsonl", make_pairs(40)), "tiny", budget={"steps": 1})
    Session(spec).train()
    reward = str(run_folder(spec))
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "chosen": "a", "rejected": " "}])
    printed = call("align", "score", reward, str(path))
    assert printed.code == 2 and f"{path}:1: 'rejected' holds no answer" in printed.err
    path = write_rows(tmp_path / "single.jsonl", [{"prompt": "is red 7", "completion": "yes red"}])
    printed = call("align", "score", reward, str(path), "--json")
    assert printed.code == 0 and json.loads(printed.out)["rows"] == 1, printed.err
    printed = call("align", "score", reward, str(path), "--figure", str(tmp_path / "c.svg"))
    assert printed.code == 2 and "draws the calibration on pairs" in printed.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_iterations_of_dpo_raise_the_reward_of_the_model(
    models: tuple[Path, Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, sft, reward = models
    to_hf(open_native(sft), tmp_path / "sft")
    prompts = [{"prompt": row["question"]} for row in make_pairs(24, seed=5)]
    path = write_rows(tmp_path / "prompts.jsonl", prompts)
    chain = {
        "name": "loop", "runs": str(tmp_path / "runs"), "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1},
        "model": {"hf": str(tmp_path / "sft")}, "tokenizer": {"chat": "none"},
        "data": {"context": 96, "validation": 0},
        "stages": [
            {"name": "dpo", "repeat": 2, "objective": "dpo", "budget": {"steps": 8, "batch": 1536},
             "optimizer": {"lr": 1e-3},
             "make": {"pairs": {"prompts": str(path), "reward": str(reward), "n": 6, "max_tokens": 16}}},
        ],
    }  # fmt: skip
    spec = tmp_path / "loop.yaml"
    spec.write_text(json.dumps(chain))
    loaded = load_chain(spec)
    assert [stage.name for stage in loaded.stages] == ["dpo-1", "dpo-2"] and loaded.stages[1].needs == ("dpo-1",)
    assert train_chain(loaded, ["--plain"]) == 0
    made = [json.loads(loaded.made_rows(stage.name).with_suffix(".json").read_text()) for stage in loaded.stages]
    before, after = (summary["curve"][0]["reward"] for summary in made)
    assert after > before + 0.5
    report = (tmp_path / "runs" / "loop" / "report.md").read_text()
    assert (
        report.count("reward of the best of 6: ") == 2 and [Run(s.run).state for s in loaded.stages] == ["finished"] * 2
    )
    capfd.readouterr()
    assert train_chain(loaded, ["--plain"]) == 0 and capfd.readouterr().out.count("finished before") == 2
