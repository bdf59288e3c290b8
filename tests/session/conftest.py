"""A tiny corpus and a spec over it: a run of 40 steps takes about a second."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.observe.view import RunView
from bessemer.session.session import Session
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job, Outcome

WORDS = [
    "steel",
    "iron",
    "blast",
    "flame",
    "ore",
    "coke",
    "slag",
    "heat",
    "pour",
    "mould",
    "ingot",
    "forge",
    "anvil",
    "hammer",
    "tongs",
    "bellows",
]


def write_corpus(path: Path, documents: int = 120, seed: int = 0) -> Path:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(20, 120)))}) + "\n")
    return path


class Faults:
    """Faults put into a run through the protocol that `bessemer chaos` uses; none by itself."""

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        job.faults = self

    def before_step(self, job: Job, step: int) -> None: ...
    def after_backward(self, job: Job, step: int) -> None: ...
    def lr(self, step: int, planned: float) -> float:
        return planned


class StopAfter(RunView):
    """Asks a session to stop after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step
        self.session: Session | None = None

    def step(self, record: dict[str, Any]) -> None:
        super().step(record)
        if record["step"] == self.at and self.session:
            self.session.interrupt.signal = "SIGTERM"


def train_until(spec: RunSpec, step: int) -> Outcome:
    """Train until that step has ended, then stop as a signal would."""
    view = StopAfter(step)
    view.session = Session(spec, view)
    return view.session.train()


@pytest.fixture(scope="module", autouse=True)
def measured_once(one_probe: None) -> None:
    """See `one_probe`."""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "words.jsonl")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prepared data that runs of `make_spec` share."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def make_spec(corpus: Path, prepared: Path, tmp_path: Path) -> Callable[..., RunSpec]:
    """A spec with overrides: make_spec("name", budget={"steps": 10}). Equal data is prepared once for all tests."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / ".data").symlink_to(prepared)

    def make(name: str = "run", **parts: Any) -> RunSpec:
        return RunSpec.model_validate(spec_data(name, corpus, runs, **parts))

    return make


def spec_data(name: str, corpus: Path, runs: Path, **parts: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": name,
        "runs": str(runs),
        "model": {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64},
        "tokenizer": {"vocab": 300},
        "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
        "budget": {"steps": 40, "batch": 128},
        "optimizer": {"lr": 0.01},
        "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1},
        "guard": {"warmup": 8, "window": 32},
        "checkpoint": {"every": 10},
        "evaluate": {"every": 10, "tokens": 512},
    }
    for part, values in parts.items():
        data[part] = {**data[part], **values} if isinstance(values, dict) and part in data else values
    return data
