"""A tiny spec on the CPU, and requests made from it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.launch.request import LaunchRequest, check_request
from bessemer.spec.schema import RunSpec

WORDS = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "forge", "anvil", "hammer", "tongs"]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """600 steps of a one-layer model: some seconds."""
    draw = random.Random(0)
    corpus = tmp_path / "words.jsonl"
    rows = [json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(20, 120)))}) for _ in range(120)]
    corpus.write_text("\n".join(rows) + "\n")
    return RunSpec.model_validate(
        {
            "name": "tiny",
            "runs": str(tmp_path / "runs"),
            "model": {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64},
            "tokenizer": {"vocab": 300},
            "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
            "budget": {"steps": 600, "batch": 256},
            "optimizer": {"lr": 0.01},
            "precision": "fp32",
            "parallel": {"device": "cpu", "threads": 1},
            "guard": {"warmup": 8, "window": 32},
            "checkpoint": {"every": 50},
            "evaluate": {"every": 200, "tokens": 512},
        }
    )


@pytest.fixture
def ask(spec: RunSpec, tmp_path: Path) -> Callable[..., LaunchRequest]:
    """ask("slurm", nodes=2): a request that has been checked."""
    needed: dict[str, dict[str, Any]] = {
        "kubernetes": {"image": "team/bessemer:1", "volume": "work"},
        "sky": {"install": "bessemer.whl", "gpu_type": "H100", "volume": "s3://bucket"},
        "modal": {"install": "bessemer.whl", "gpu_type": "H100"},
        "ssh": {"hosts": ("gpu1", "me@gpu2")},
    }

    def make(on: str, **options: Any) -> LaunchRequest:
        return check_request(LaunchRequest(spec, on, workdir=str(tmp_path), **{**needed.get(on, {}), **options}))

    return make
