"""A live run obeys requests between two steps, and records what became of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import bessemer.run.control
import bessemer.train.control
from bessemer.errors import UserError
from bessemer.observe.profile import read_trace, step_time
from bessemer.observe.view import RunView
from bessemer.run.control import ControlRequest, RequestReader, answer_of, write_request
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.control import STOP


class Asking(RunView):
    """Makes requests when steps are recorded, and resumes a pause."""

    def __init__(self, run: Run, requests: dict[int, tuple[str, float | None]]) -> None:
        super().__init__()
        self.of, self.requests = run, dict(requests)

    def step(self, record: dict[str, Any]) -> None:
        super().step(record)
        if asked := self.requests.pop(record["step"], None):
            write_request(self.of, ControlRequest.make(*asked, who="a test"))

    def event(self, record: dict[str, Any]) -> None:
        super().event(record)
        if record["kind"] == "control" and record["action"] == "pause":
            for action in ("save", "resume"):
                write_request(self.of, ControlRequest.make(action, who="a test"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for requests at every step."""
    for module in (bessemer.run.control, bessemer.train.control):
        monkeypatch.setattr(module, "POLL_S", 0.0)


def train(spec: RunSpec, **requests: Any) -> tuple[Any, Run]:
    run = Run(run_folder(spec))
    asked = {int(step.removeprefix("at_")): request for step, request in requests.items()}
    return Session(spec, Asking(run, asked)).train(), run


def test_requests_are_obeyed_and_change_no_loss(make_spec: Callable[..., RunSpec]) -> None:
    _, plain = train(make_spec("plain"))
    spec = make_spec("asked")
    outcome, run = train(
        spec, at_3=("save", None), at_8=("pause", None), at_24=("rollback", 15), at_27=("evaluate", None),
        at_32=("stop", None),
    )  # fmt: skip
    assert outcome.kind == "interrupted" and outcome.reason == f"{STOP} by a test"
    events = {(event["action"], event["done"]): event for event in run.events("control")}
    assert list(events) == [
        ("save", True), ("pause", True), ("save", False), ("resume", True), ("rollback", True), ("evaluate", True),
        ("stop", True),
    ]  # fmt: skip
    assert all(event["who"] == "a test" and event["time"] >= event["asked"] for event in events.values())
    saved = [event["step"] for event in run.events("saved")]
    assert events["save", True]["step"] in saved and saved[-1] == outcome.step == events["stop", True]["step"]
    assert events["evaluate", True]["step"] in [record["step"] for record in run.validations()]
    assert events["rollback", True]["to_step"] <= 15 and "paused" in events["save", False]["reason"]
    assert not list((run.folder / "control").iterdir())
    again, run = train(spec)
    assert again.kind == "finished"
    assert [record["loss"] for record in run.metrics()] == [record["loss"] for record in plain.metrics()]


def test_the_learning_rate_is_scaled_from_the_next_step_on(make_spec: Callable[..., RunSpec]) -> None:
    _, plain = train(make_spec("plain"))
    _, run = train(make_spec("scaled"), at_9=("lr", 0.25), at_19=("lr", 0.5), at_29=("lr", 1))
    planned = [record["lr"] for record in plain.metrics()]
    factors = [record["lr"] / lr for record, lr in zip(run.metrics(), planned, strict=True)]
    first, second, third = (event["step"] for event in run.events("control"))
    assert 10 <= first <= 12 and 20 <= second <= 22 and 30 <= third <= 32
    expected = [1.0] * first + [0.25] * (second - first) + [0.5] * (third - second) + [1.0] * (40 - third)
    assert factors == pytest.approx(expected)


def test_steps_are_profiled_by_request_and_the_run_goes_on(make_spec: Callable[..., RunSpec]) -> None:
    _, plain = train(make_spec("plain"))
    outcome, run = train(
        make_spec("profiled", guard={"look_every": 8}), at_3=("profile", 4), at_6=("profile", None),
        at_24=("profile", 3), at_36=("profile", 9),
    )  # fmt: skip
    assert outcome.kind == "finished"
    assert [record["loss"] for record in run.metrics()] == [record["loss"] for record in plain.metrics()]
    answers = [(event["done"], event["reason"]) for event in run.events("control")]
    assert [done for done, _ in answers] == [True, False, True, False]
    assert "already" in answers[1][1] and "are left" in answers[3][1]
    first, second = run.events("profiled")
    assert first["steps"] == 4 and second["steps"] == 3 and first["who"] == "a test" and first["step_s"] > 0
    for event in (first, second):
        time = step_time(read_trace(run.profiles / event["traces"][0]))
        assert time.parts["matmul"] > 0 and sum(time.parts.values()) == pytest.approx(time.wall)
    steps = [json.loads(line)["step"] for line in run.layers_path.read_text().splitlines()]
    assert steps == [0, 8, 16, 24, 32]


def test_a_stop_ends_a_profile_without_a_trace(make_spec: Callable[..., RunSpec]) -> None:
    outcome, run = train(make_spec("stopped"), at_3=("profile", 20), at_12=("stop", None))
    assert outcome.kind == "interrupted" and not list(run.events("profiled")) and not list(run.profiles.iterdir())
    outcome, run = train(make_spec("stopped"), at_30=("profile", 2))
    assert outcome.kind == "finished" and len(list(run.events("profiled"))) == 1


def test_what_cannot_be_asked(make_spec: Callable[..., RunSpec], tmp_path: Any) -> None:
    for action, value, match in (
        ("jump", None, "no such action"), ("lr", None, "factor"), ("lr", 0, "factor"), ("lr", "x", "not a number"),
        ("save", 3, "takes no value"), ("profile", 0, "from 1 to"), ("profile", 2.5, "from 1 to"),
        ("rollback", -1, "not a number"), ("rollback", "inf", "not a number"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=match):
            ControlRequest.make(action, value)
    outcome, run = train(make_spec("done", budget={"steps": 4}))
    assert outcome.kind == "finished"
    with pytest.raises(UserError, match=r"not running \(finished\)"):
        write_request(run, ControlRequest.make("save"))
    assert answer_of(run, "nobody", 0.0) is None


def test_damaged_and_late_requests_are_removed_unread(tmp_path: Any) -> None:
    folder = tmp_path / "control"
    folder.mkdir()
    for i, content in enumerate(
        ("{", "[]", '{"action": "save"}', "x" * 5000, '{"action": "rm", "value": 1, "who": ""}')
    ):
        (folder / f"{i}.json").write_text(content)
    (folder / "9.json").write_text('{"id": "a", "action": "save", "value": null, "who": "me", "time": 5}')
    reader = RequestReader(tmp_path)
    assert reader.next() is None and not list(folder.iterdir())
    asked = ControlRequest.make("stop", who="a test")
    reader.put_back(asked)
    assert reader.next() == asked and reader.next() is None
