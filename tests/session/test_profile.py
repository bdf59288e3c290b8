"""`bessemer train --profile` for real: where the time of a small run's steps went, and a run that stays as it was."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.observe.profile import PARTS
from bessemer.observe.view import RunView
from bessemer.session.inspect import ProfileSession
from bessemer.session.session import Session
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job

from .conftest import Faults


class Heard(RunView):
    """Keeps the lines that a user would see."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.kinds: set[str] = set()

    def event(self, record: dict[str, Any]) -> None:
        self.kinds.add(record["kind"])
        super().event(record)

    def show(self, text: str) -> None:
        self.lines.append(text)


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "profile" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def profiled(spec: RunSpec, **options: Any) -> tuple[dict[str, Any], Heard]:
    heard = Heard()
    ProfileSession(spec, heard, **options).train()
    return json.loads((Path(spec.runs) / spec.name / "profile" / "profile.json").read_text()), heard


def test_a_profile_adds_up_and_leaves_no_run_behind(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("fresh")
    found, _ = profiled(spec, steps=2)
    folder = Path(spec.runs) / "fresh"
    assert {path.name for path in folder.rglob("*")} == {"profile", "trace.json.gz", "profile.json", "profile.txt"}
    parts = {row["part"]: row for row in found["parts"]}
    assert {*PARTS} - {*parts} <= {"copies", "communication", "other"}
    assert sum(row["ms"] for row in found["parts"]) == pytest.approx(found["profiled_step_ms"], rel=0.01)
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1.0, rel=0.01)
    assert found["tokens_per_step"] == 128 and found["steps"] == 2 and found["advice"]
    assert parts["matmul"]["rate"] > 0 and parts["matmul"]["of_ceiling"] > 0
    assert found["kernels"][0]["ms"] >= found["kernels"][1]["ms"]
    with gzip.open(folder / "profile" / "trace.json.gz", "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("bessemer.steps") == 1
    for span in ("data", "forward", "backward", "judge", "optimizer", "report"):
        assert names.count(f"bessemer.{span}") >= 2, span
    text = (folder / "profile" / "profile.txt").read_text()
    assert "what to do first" in text and "tokens/s" in text


class Leave(Faults):
    def before_step(self, job: Job, step: int) -> None:
        if step == 20:
            job.interrupt.signal = "SIGTERM"


@pytest.mark.slow
def test_a_run_under_way_is_looked_at_where_it_stands_and_not_changed(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("halfway")
    assert Session(spec, faults=Leave()).train().step == 20
    before = contents(Path(spec.runs) / "halfway")
    _, heard = profiled(spec, steps=1)
    assert any("resumed from step-00000020.a2 at step 20" in line for line in heard.lines)
    assert "saved" not in heard.kinds
    assert contents(Path(spec.runs) / "halfway") == before
    assert Session(spec).train().step == 40
    _, heard = profiled(spec, steps=1)  # a finished run has no step left: its first ones do as well
    assert not any("resumed" in line for line in heard.lines)


class Spoil(Faults):
    """A step whose gradients are not finite, while the profiler looks."""

    def after_backward(self, job: Job, step: int) -> None:
        if step == 6:
            job.engine.model.norm.weight.grad *= float("nan")  # type: ignore[operator,union-attr]


def test_a_vetoed_step_does_not_end_a_profile(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("vetoed")
    session = ProfileSession(spec, heard := Heard(), steps=3)
    session.faults = Spoil()
    session.train()
    assert any(line.startswith("veto  step 6") for line in heard.lines) and "what to do first" in session.text
    assert not (Path(spec.runs) / "vetoed" / "reports").exists()


@pytest.mark.parametrize(
    ("budget", "options", "words"),
    [
        ({"steps": 7}, {}, "--profile: needs 8 steps, the run has 7"),
        ({}, {"steps": 0}, "--profile-steps 0: write 1 or more"),
        ({}, {"nsight": True}, "--nsight: needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    make_spec: Callable[..., RunSpec], budget: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        profiled(make_spec("refused", budget=budget), **options)
