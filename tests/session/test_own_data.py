"""Runs on a caller's own datasets: map-style ones resume and repeat exactly, iterables go forward and say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, train
from bessemer.spec.guard import GuardSpec, LadderSpec
from bessemer.spec.schema import CheckpointSpec, RunSpec
from bessemer.train.job import Job

from .conftest import Faults

TEXTS = [f"Line {number} of a small text, with the number {number * 37 % 101} in it.\n" * 3 for number in range(64)]


class Lines:
    """A map-style dataset of texts."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> str:
        return TEXTS[index]


class Flow:
    """An iterable that remembers its place."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        while True:
            self.next += 1
            yield TEXTS[(self.next - 1) % len(TEXTS)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(TEXTS, 300).save(path)
    return path


def spec_of(folder: Path, tokenizer: Path, name: str, steps: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": name, "runs": str(folder), "model": {"width": 32, "layers": 1, "heads": 2},
            "tokenizer": {"path": str(tokenizer)},
            "data": {"sources": {"mine": "python"}, "context": 32, "validation": 0},
            "budget": {"steps": steps, "batch": 128}, "checkpoint": {"every": "3 steps"},
            "schedule": {"kind": "constant", "warmup": "1 steps"}, "optimizer": {"lr": 0.001},
            "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
        }
    )  # fmt: skip


def losses(folder: Path, name: str) -> list[float]:
    return [record["loss"] for record in Run(folder / name).metrics()]


@pytest.mark.parametrize("kind", [Lines, Flow])
def test_a_run_continued_is_the_run_unbroken(tmp_path: Path, tokenizer: Path, kind: type) -> None:
    train(spec_of(tmp_path, tokenizer, "whole", 9), datasets={"mine": kind()})
    train(spec_of(tmp_path, tokenizer, "parts", 6), datasets={"mine": kind()})
    train(spec_of(tmp_path, tokenizer, "parts", 9), datasets={"mine": kind()})
    whole = losses(tmp_path, "whole")
    assert len(whole) == 9 and losses(tmp_path, "parts") == whole
    said = [event["kind"] for event in Run(tmp_path / "whole").events()]
    assert ("not_replayable" in said) == (kind is Flow)


def test_an_iterable_without_a_state_cannot_be_continued(tmp_path: Path, tokenizer: Path) -> None:
    train(spec_of(tmp_path, tokenizer, "run", 3), datasets={"mine": iter(TEXTS)})
    with pytest.raises(UserError, match="state_dict"):
        train(spec_of(tmp_path, tokenizer, "run", 6), datasets={"mine": iter(TEXTS)})


def test_it_is_validated_on_its_own_dataset(tmp_path: Path, tokenizer: Path) -> None:
    spec = spec_of(tmp_path, tokenizer, "run", 4)
    train(spec, datasets={"mine": Lines(), "mine.validation": TEXTS[:8]})
    assert len(list(Run(tmp_path / "run").validations())) >= 1


@pytest.mark.parametrize(
    ("datasets", "words"),
    [
        ({}, r"bessemer\.train_run\(spec, datasets=\{'mine': \.\.\.\}\)"),
        ({"mine": Lines(), "other": Lines()}, "dataset 'other': the spec has no such source; it has mine"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, tokenizer: Path, datasets: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(spec_of(tmp_path, tokenizer, "run", 3), datasets=datasets)


class Wipe(Faults):
    """Weights become NaN before one step, once."""

    done = False

    def before_step(self, job: Job, step: int) -> None:
        if step == 44 and not self.done:
            self.done = True
            with torch.no_grad():
                job.engine.model.blocks[0].ffn.down.weight.fill_(float("nan"))


def endless() -> Any:
    """An iterable that remembers nothing."""
    return iter(Flow().__iter__())


@pytest.mark.parametrize(
    ("dataset", "copies"),
    [
        (endless, "auto"), pytest.param(Flow, "off", marks=pytest.mark.slow),
        pytest.param(endless, "off", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_iterable_is_read_on_after_a_rollback(tmp_path: Path, tokenizer: Path, dataset: Any, copies: str) -> None:
    """What has passed cannot be read again: the run goes back in its weights, and forward in its data."""
    guard = GuardSpec(
        warmup=8, window=32, copy_every="16 steps", max_vetoes=3, copies=copies, ladder=LadderSpec(careful=4)
    )
    update = {"guard": guard, "checkpoint": CheckpointSpec(every="10 steps")}
    spec = spec_of(tmp_path, tokenizer, "run", 72).model_copy(update=update)
    assert Session(spec, datasets={"mine": dataset()}, faults=Wipe()).train().kind == "finished"
    run = Run(tmp_path / "run")
    assert [record["step"] for record in run.metrics()] == list(range(72))
    (back,), (skip,) = run.events("rollback"), run.events("skip")
    assert back["to_step"] < 44 and skip["position"] == 47 * 4
    assert not list(run.events("trial"))
