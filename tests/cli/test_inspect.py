"""`bessemer inspect` as a user calls it."""

import json
from pathlib import Path

import pytest
import yaml

from .conftest import Call

WORDS = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": " ".join(WORDS[i % 12 :] + WORDS[: i % 7])}) for i in range(200)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    path = tmp_path / "small.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "runs": str(tmp_path / "runs"),
                "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32},
                "tokenizer": {"vocab": 280},
                "data": {"sources": {"words": {"path": "words.jsonl"}}, "context": 16, "validation": 0.1},
                "budget": {"steps": 10, "batch": 64},
                "precision": "fp32",
                "parallel": {"device": "cpu"},
            }
        )
    )
    return path


@pytest.mark.slow
def test_every_look_prints_json_and_a_page(call: Call, spec: Path) -> None:
    said = call("inspect", "lr", str(spec), "--steps", "20", "--html", "lr.html")
    assert said.code == 0 and "earning" in said.out and "*" in said.out
    assert "<svg" in Path("lr.html").read_text() and not Path("runs/small").exists()
    assert call("train", str(spec), "--plain").code == 0
    for verb, key in (
        ("gradients", "parameters"), ("landscape", "grid"), ("histograms", "tensors"), ("noise", "noise_trace"),
        ("nan", "stage"),
    ):  # fmt: skip
        more = ["--step", "9", "--checkpoint", "last"] if verb == "nan" else []
        said = call("inspect", verb, "runs/small", *more, "--json", "--html", "page.html")
        assert said.code == 0 and key in json.loads(said.out), said.err
        assert "<!doctype html>" in Path("page.html").read_text()
    said = call("inspect", "gradients", "runs/small")
    assert said.code == 0 and "small at step-00000010.a1" in said.out and "embedding.weight" in said.out


def test_mistakes_end_in_one_line(call: Call, spec: Path) -> None:
    for arguments in (("gradients", "runs/none"), ("lr", "none.yaml"), ("lr", str(spec), "--first", "0")):
        said = call("inspect", *arguments)
        assert said.code == 2 and len(said.err.strip().splitlines()) == 1
    assert "Usage: bessemer" in call("inspect", "nan", "runs/none").err
