"""A started run continues with another optimizer, or with another schedule."""

from collections.abc import Callable

import pytest

from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec

Make = Callable[..., RunSpec]


@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(n, marks=pytest.mark.slow) for n in ("schedule_free", "soap", "sgd"))]
)
def test_the_optimizer_of_a_started_run_is_switched(make_spec: Make, name: str) -> None:
    """Its moments are new, which the learning rate takes into account, and the events say so."""
    constant = {"kind": "constant", "warmup": 2}
    first = make_spec(budget={"steps": 8}, schedule=constant)
    assert Session(first).train().kind == "finished"
    second = make_spec(budget={"steps": 16}, optimizer={"name": name, "lr": 1e-3}, schedule=constant)
    assert Session(second).train().kind == "finished"
    run = Run(run_folder(second))
    (event,) = run.events("optimizer_switched")
    assert event["step"] == 8 and event["reason"].startswith(f"adamw -> {name}: new moments")
    records = list(run.metrics())
    assert [record["step"] for record in records] == list(range(16))
    assert [record["lr"] for record in records[8:]] == pytest.approx([*[1e-3 / 9] * 5, *[2e-3 / 9] * 3])
    reopened = [e["reason"] for e in run.events("guard_reopened")]
    assert reopened == ["the optimizer was switched"]
    assert Session(second).train().kind == "finished", "nothing is switched twice"
    assert len(list(run.events("optimizer_switched"))) == 1


def test_decay_now(make_spec: Make) -> None:
    """A run at a constant rate is stopped and decays from there to zero; its window is reopened."""
    constant = {"kind": "constant", "warmup": 2}
    assert Session(make_spec(budget={"steps": 8}, schedule=constant)).train().kind == "finished"
    schedule = {**constant, "segments": [{"from_step": 8, "to": "0%"}]}
    spec = make_spec(budget={"steps": 13}, schedule=schedule)
    assert Session(spec).train().kind == "finished"
    run = Run(run_folder(spec))
    rates = [record["lr"] / spec.optimizer.lr for record in run.metrics()]  # type: ignore[operator]
    assert rates == pytest.approx([0.5, *[1.0] * 8, 0.75, 0.5, 0.25, 0.0])
    assert [event["step"] for event in run.events("guard_reopened")] == [8]
