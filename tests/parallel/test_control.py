"""Requests to a run of two processes: both obey after the same step, and compute what a run without requests does."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

import bessemer.run.control
import bessemer.train.control
from bessemer.observe.profile import read_trace, step_time
from bessemer.observe.view import RunView
from bessemer.run.control import ControlRequest, write_request
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train import readings
from bessemer.train.profile import WARMUP
from bessemer.train.readings import RANK_READINGS

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
REQUESTS = {2: ("lr", 0.5), 4: ("profile", 3), 6: ("profile", None), 14: ("save", None), 17: ("pause", None)}


class Asking(RunView):
    """Makes requests on rank 0 when steps are recorded, and resumes a pause; remembers the rates of its rank."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.of, self.rates = run, list[float]()
        self.main = os.environ["RANK"] == "0"

    def step(self, record: dict[str, Any]) -> None:
        super().step(record)
        self.rates.append(record["lr"])
        time.sleep(0.01)  # for a reading
        if self.main and (request := REQUESTS.get(record["step"])):
            write_request(self.of, ControlRequest.make(*request, who="a test"))

    def event(self, record: dict[str, Any]) -> None:
        super().event(record)
        if self.main and record["kind"] == "control" and record["action"] == "pause":
            write_request(self.of, ControlRequest.make("resume", who="a test"))


def test_both_ranks_obey_and_profile_the_same_steps(
    ranks: Ranks, tiny_spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bessemer.run.control, bessemer.train.control):
        monkeypatch.setattr(module, "POLL_S", 0.0)  # look at every step
    monkeypatch.setattr(readings, "INTERVAL_S", 0.02)
    spec = tiny_spec("two", guard={"look_every": 4})

    def work() -> tuple[str, list[float]]:
        view = Asking(Run(run_folder(spec)))
        return Session(spec, view).train().kind, view.rates

    (first, first_lr), (second, second_lr) = ranks(2, work)
    assert first == second == "finished" and first_lr == second_lr and len(first_lr) == 24

    run = Run(run_folder(spec))
    control = [(event["action"], event["done"]) for event in run.events("control")]
    assert control == [("lr", True), ("profile", True), ("profile", False), ("save", True), ("pause", True),
                       ("resume", True)]  # fmt: skip
    changed = next(event["step"] for event in run.events("control"))
    planned = [record["lr"] for record in run.metrics()]
    assert planned[changed] == pytest.approx(0.5 * 0.01) and planned[changed - 1] == pytest.approx(0.01)
    (profiled,) = run.events("profiled")
    asked = next(event["step"] for event in run.events("control") if event["action"] == "profile")
    assert profiled["step"] == asked + WARMUP + 3 and profiled["steps"] == 3 and len(profiled["traces"]) == 2
    for name in profiled["traces"]:
        assert step_time(read_trace(run.profiles / name)).wall > 0
    ranked = list(run.ranks())
    assert ranked and any(len(record.get("cpu_busy_share", [])) == 2 for record in ranked)
    assert not any("gpu_power_w" in record for record in ranked) and "nan" not in json.dumps(ranked)
    assert set(RANK_READINGS) & set(ranked[-1]) <= {"cpu_busy_share"}
    layers = [json.loads(line) for line in run.layers_path.read_text().splitlines()]
    assert layers and set(layers[0]["grad_norm"]) > {"embedding", "blocks.0", "blocks.1"}
    assert all(value > 0 for record in layers for value in record["update_ratio"].values())
