"""A chain trains its stages, skips what is finished, and starts again what follows a changed stage."""

import json
import random
from pathlib import Path

import pytest

from bessemer.run.directory import Run
from bessemer.session.stages import train_chain
from bessemer.spec.stages import load_chain

WORDS = ["red", "blue", "green", "white", "black", "pink", "gold", "grey"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pretraining_an_adapter_and_preferences(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    rows = {
        "text": [{"text": " ".join(draw.choices(WORDS, k=30))} for _ in range(200)],
        "chat": [{"prompt": f"say {(w := draw.choice(WORDS))}", "completion": f"{w} {w}"} for _ in range(200)],
        "pairs": [
            {"prompt": f"say {i}", "chosen": " ".join(pair), "rejected": " ".join(reversed(pair))}
            for i in range(200)
            for pair in [draw.sample(WORDS, 2)]
        ],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    common = {
        "name": "colors", "runs": str(tmp_path / "runs"), "precision": "fp32", "data": {"context": 64},
        "parallel": {"device": "cpu", "threads": 1}, "tokenizer": {"vocab": 300, "chat": "plain"},
    }  # fmt: skip
    stages = [
        {"name": "pre", "model": {"width": 32, "layers": 1, "heads": 2}, "budget": {"steps": 6, "batch": 512},
         "data": {"sources": {"words": str(tmp_path / "text.jsonl")}}},
        {"name": "sft", "objective": "sft", "adapter": "lora", "budget": {"steps": 4, "batch": 512},
         "data": {"sources": {"chat": str(tmp_path / "chat.jsonl")}}},
        {"name": "dpo", "objective": "dpo", "budget": {"steps": 3, "batch": 512},
         "data": {"sources": {"pairs": str(tmp_path / "pairs.jsonl")}}},
    ]  # fmt: skip
    path = tmp_path / "chain.yaml"
    path.write_text(json.dumps(common | {"stages": stages}))
    chain = load_chain(path)
    assert train_chain(chain, ["--plain"]) == 0
    losses = [[record["loss"] for record in Run(stage.run).metrics()] for stage in chain.stages]
    assert [len(of_stage) for of_stage in losses] == [6, 4, 3]
    assert abs(losses[2][0] - 0.6931) < 1e-4  # the model is its own reference, with its adapter merged
    report = (tmp_path / "runs" / "colors" / "report.md").read_text()
    assert "| dpo | dpo | finished | 3 |" in report and "- chosen_shift: " in report
    capfd.readouterr()
    assert train_chain(chain, ["--plain"]) == 0  # nothing is left to do
    assert capfd.readouterr().out.count("finished before") == 3
    stages[1]["budget"]["steps"] = 5  # type: ignore[index]
    path.write_text(json.dumps(common | {"stages": stages}))
    assert train_chain(load_chain(path), ["--plain"]) == 0
    assert capfd.readouterr().out.count("finished before") == 1
    again = [[record["loss"] for record in Run(stage.run).metrics()] for stage in chain.stages]
    assert [len(of_stage) for of_stage in again] == [6, 5, 3] and again[0] == losses[0] and again[2] != losses[2]
