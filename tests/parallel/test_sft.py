"""Supervised fine-tuning on several ranks: loss and gradient norm of one process, at any accumulation."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint  # noqa: F401 (before the fork, once for all)

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
WORDS = ["steel", "iron", "copper", "zinc", "ore", "coke", "slag", "tin"]
SLOW = [
    ({"dp_replicate": 2}, 2), ({"dp_shard": 4}, 1), ({"dp_replicate": 2, "dp_shard": 2}, 1), ({"cp": 2}, 4),
    ({"tp": 2}, 2), ({}, 8), ({}, 2), ({}, 1),
]  # fmt: skip
CASES = [({"dp_shard": 2}, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Answers of very different lengths."""
    rows = [
        {"messages": [
            {"role": "user", "content": f"{WORDS[i % 8]} {i}?"},
            {"role": "assistant", "content": " ".join(WORDS[(i + k) % 8] for k in range(1 + 5 * (i % 3)))},
        ]}
        for i in range(64)
    ]  # fmt: skip
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("degrees", "micro_batch"), CASES, ids=str)
def test_the_losses_of_one_process(
    ranks: Ranks, tiny_spec: Spec, talks: Path, degrees: dict[str, int], micro_batch: int
) -> None:
    records = []
    noise = None if {"cp", "tp"} & degrees.keys() else {"neftune": 5.0}  # which needs complete embeddings
    model = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 64}
    for name, layout, rows in (("one", {}, 4), ("several", degrees, micro_batch)):
        spec = tiny_spec(
            name, objective="sft", tokenizer={"kind": "char", "vocab": 300}, sft=noise, model=model,
            data={"sources": {"talks": {"path": [str(talks)]}}, "context": 128, "validation": 0},
            budget={"steps": 4, "batch": 1024, "micro_batch": rows}, optimizer={"lr": 1e-3},
            parallel={"device": "cpu", "threads": 1, **layout},
        )  # fmt: skip
        size = math.prod(layout.values())
        assert ranks(size, lambda spec=spec: train(spec).kind) == ["finished"] * size
        records.append([(record["loss"], record["grad_norm"]) for record in Run(run_folder(spec)).metrics()])
    values = [[value for record in each for value in record] for each in records]
    difference = max(abs(several / one - 1) for one, several in zip(*values, strict=True))
    print(f"{degrees}, micro-batch {micro_batch}: losses and norms differ by {difference:.1e}")
    assert len(values[0]) == 8 and difference < 1e-6
