"""Context extension from end to end: trained at 128 tokens, stretched to 512, and asked for a needle at both."""

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.session.start import decide_shape, open_source
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.trained import find_checkpoint

SYMBOLS = string.ascii_letters[:32]
SHORT, LONG = 128, 512
ASKED = 96, 384  # tokens of the haystacks: at the very end of a row there is little to learn distances from
# The first layer sees one token back, which is half of what looking something up takes: learnt within 200 steps. With
# theta 300 the slowest pair of numbers turns by 0.6 in 128 tokens, and by 2.4, where its cosine is negative, in 512.
MODEL = {"width": 64, "layers": 2, "heads": 2, "ffn": 0, "windows": [2, 0], "init": "small"}
THETA = 300.0
FACTORS = {"yarn": 4.0, "linear": 4.0, "ntk": 8.0}  # ntk stretches the middle less than its factor says


def write_documents(path: Path, count: int, length: int) -> Path:
    """Each says some symbols once, in an order of its own, and then pieces of that again."""
    draw = random.Random(length)
    with path.open("w") as file:
        for _ in range(count):
            said = "".join(draw.sample(SYMBOLS, draw.choice((4, 8, 16, 30))))
            text = said
            while len(text) < length:
                at = draw.randrange(len(said))
                text += said[at : at + draw.randint(4, 16)]
            file.write(json.dumps({"text": text[:length]}) + "\n")
    return path


def spec_of(folder: Path, name: str, context: int, rows: int, steps: int, lr: float, **more: Any) -> RunSpec:
    documents = write_documents(folder / f"{name}.jsonl", max(400, steps * rows // 2), context - 1)
    sections: dict[str, Any] = {
        "name": name, "runs": str(folder / "runs"), "model": {**MODEL, "rope": {"theta": THETA}},
        "tokenizer": {"vocab": 257}, "data": {"sources": {"symbols": str(documents)}, "context": context},
        "budget": {"steps": steps, "batch": rows * context}, "optimizer": {"lr": lr},
        "schedule": {"kind": "linear", "warmup": "20 steps"}, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1}, "evaluate": {"every": 100, "tokens": 4096},
        "checkpoint": {"every": 1000},
    }  # fmt: skip
    return RunSpec.model_validate(sections | more)


def scores(run: Path) -> dict[int, float]:
    """The mean over the depths for each length, by the command."""
    arguments = ["evaluate", str(run), "--needle", "--lengths", f"{ASKED[0]},{ASKED[1]}", "--device", "cpu"]
    print(run.name, CliRunner().invoke(app, arguments).output, sep="\n")
    cells = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["cells"]
    return {length: sum(cell["score"] for cell in cells if cell["length"] == length) / 5 for length in ASKED}


@pytest.mark.slow
def test_a_stretched_model_finds_what_the_plain_one_has_lost(tmp_path: Path) -> None:
    assert train(spec_of(tmp_path, "short", SHORT, rows=16, steps=400, lr=1e-2)).kind == "finished"
    before = scores(tmp_path / "runs" / "short")
    assert before[96] > 0.8
    assert before[384] < 0.3  # as good as lost, though still above the chance of one in 32
    checkpoint = find_checkpoint(Run(tmp_path / "runs" / "short"), "last")
    for scaling, factor in FACTORS.items():
        rope = {"theta": THETA, "scaling": scaling, "factor": factor, "original": SHORT}
        spec = spec_of(
            tmp_path, scaling, LONG, rows=4, steps=40, lr=2e-3, start_from=str(checkpoint),
            model={**MODEL, "rope": rope},
            tokenizer={"path": str(tmp_path / "runs" / "short" / "tokenizer.json")},
        )  # fmt: skip
        assert train(spec).kind == "finished"
        run = Run(tmp_path / "runs" / scaling)
        assert [event["checkpoint"] for event in run.events("started_from")] == [checkpoint.name]
        after = scores(run.folder)
        assert after[96] > 0.8
        assert after[384] > 0.8
        decisions = {item["key"]: item for item in json.loads((run.folder / "plan.json").read_text())["decisions"]}
        assert decisions["model.rope"]["value"] == f"{scaling} x{factor:g}"
        assert "128 tokens" in decisions["model.rope"]["reason"]


def test_a_folder_says_where_the_stretch_begins(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def decided(**rope: Any) -> tuple[ModelShape, Plan]:
        data = {"sources": {"a": "b"}, "context": 256}
        spec = RunSpec.model_validate({"model": {"hf": str(tmp_path), "rope": rope}, "data": data})
        plan = Plan()
        return decide_shape(spec, open_source(spec), 300, plan)[0], plan

    shape, plan = decided(scaling="yarn", factor=4.0)
    assert (shape.rope.original, shape.max_positions) == (64, 256)  # which an export writes down
    assert plan.decisions["model.rope"].value == "yarn x4"
    assert "64 tokens are stretched to 256" in plan.decisions["model.rope"].reason
    shape, plan = decided(theta=20_000.0)
    assert (shape.rope.scaling, shape.max_positions) == ("none", 64)
    assert "256 tokens exceed the 64 that the model supports" in plan.decisions["model.rope"].reason
