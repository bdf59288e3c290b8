"""`bessemer train --profile` as a user calls it."""

import json
from pathlib import Path

import yaml

from .conftest import Call


def test_the_report_is_printed_and_kept(call: Call, tmp_path: Path) -> None:
    words = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]
    lines = [json.dumps({"text": " ".join(words[i % 12 :] + words[: i % 7])}) for i in range(200)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    asked = {
        "name": "small", "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32},
        "tokenizer": {"vocab": 280}, "data": {"sources": {"words": "words.jsonl"}, "context": 16},
        "budget": {"steps": 10, "batch": 64}, "precision": "fp32", "parallel": {"device": "cpu"},
    }  # fmt: skip
    Path("small.yaml").write_text(yaml.safe_dump(asked))
    said = call("train", "small.yaml", "--profile", "--profile-steps", "2")
    assert said.code == 0 and "what to do first" in said.out and "in runs/small/profile" in said.out, said.err
    assert Path("runs/small/profile/profile.txt").read_text() in said.out
    said = call("train", "small.yaml", "--profile", "--set", "budget.steps=4")
    assert said.code == 2 and said.err.strip().splitlines()[-1].startswith("--profile: needs 8 steps")
