"""A tiny corpus, a spec over it, and the run that it resolves to: made once, since emitting is pure after that."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.launch.emit import RunToEmit, resolve
from bessemer.spec.schema import RunSpec

WORDS = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus; runs and prepared data go there too."""
    folder, draw = tmp_path_factory.mktemp("emit"), random.Random(0)
    for name in ("words", "more"):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(10, 60))) for _ in range(150)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def make_spec(place: Path, **parts: Any) -> RunSpec:
    data: dict[str, Any] = {
        "name": "tiny", "runs": str(place / "runs"), "precision": "fp32",
        "model": {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64},
        "tokenizer": {"vocab": 300},
        "data": {"sources": {"words": {"path": [str(place / "words.jsonl")]}}, "context": 32, "validation": 0.1},
        "budget": {"steps": 20, "batch": 256, "micro_batch": 2}, "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 4}, "parallel": {"device": "cpu", "threads": 1},
    }  # fmt: skip
    for part, values in parts.items():
        data[part] = {**data[part], **values} if isinstance(values, dict) and part in data else values
    return RunSpec.model_validate(data)


@pytest.fixture(scope="session")
def tiny(place: Path) -> Callable[..., RunSpec]:
    """The tiny spec with some parts replaced."""
    return lambda **parts: make_spec(place, **parts)


@pytest.fixture(scope="session")
def resolved(place: Path) -> Callable[..., RunToEmit]:
    """The run of such a spec, decided."""
    return lambda processes=None, **parts: resolve(make_spec(place, **parts), Path("out"), processes)
