"""The forwarder sends every record once or again, never not at all: after failures, kills and rollbacks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.observe.observers import follow_run, observers_of
from bessemer.observe.tail import JournalTail
from bessemer.observe.trackers import forward
from bessemer.observe.trackers.forward import Forwarder
from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker, make_row
from bessemer.run.journal import Journal
from bessemer.spec.schema import RunSpec

from .journals import loss_at, open_run, tracker, write_rest, write_steps


class Memory(Tracker):
    """Holds what it gets as a reader of the tracker would see it: a cut removes the steps from there on."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.opened, self.closed = failures, 0, ""
        self.values: dict[str, dict[int, float]] = {"train": {}, "validation": {}}
        self.times: dict[int, float] = {}
        self.texts: list[tuple[str, int, str]] = []
        self.files: list[str] = []

    def open(self, info: RunInfo) -> None:
        self.opened += 1
        self.id, self.config = info.id, info.config

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.values[row.prefix][row.step] = row.values["loss"]
            self.times[row.step] = row.time
        if self.failures:  # some were taken: the forwarder cannot know
            self.failures -= 1
            raise ConnectionError("the network is gone")

    def cut(self, step: int) -> None:
        for values in self.values.values():
            for old in [old for old in values if old >= step]:
                del values[old]

    def text(self, kind: str, step: int, text: str) -> None:
        self.texts.append((kind, step, text))

    def report(self, path: Path) -> None:
        self.files.append(path.name)

    def close(self, state: str) -> None:
        self.closed = state


def forwarder(run: Any, memory: Tracker) -> Forwarder:
    made = Forwarder(run, tracker(to="csv"), lambda _: memory)
    assert made.acquire()
    return made


def test_everything_of_a_run_arrives(tmp_path: Path) -> None:
    memory = Memory()
    with open_run(tmp_path / "demo") as run:
        following = forwarder(run, memory)
        write_steps(run, 0, 10)
        assert following.forward() == 10
        write_steps(run, 10, 20)
        write_rest(run, 20)
        assert following.forward() == 11
        assert following.forward() == 0
        following.finish("finished")
    assert memory.values == {"train": {step: loss_at(step) for step in range(20)}, "validation": {20: 2.5}}
    assert memory.config["model.preset"] == "10M" and memory.config["plan.optimizer.lr"] == 0.01
    assert ("sample", 20, "Once upon a time") in memory.texts and memory.files == ["anomaly-000003.md"]
    assert [step for kind, step, _ in memory.texts if kind == "checkpoint"] == [20]
    assert memory.opened == 1 and memory.closed == "finished"
    (started,) = run.events("started")
    assert memory.times[19] == pytest.approx(started["time"] + 20 * 0.5, abs=0.01)


def test_an_error_sends_again_and_skips_nothing(tmp_path: Path) -> None:
    memory = Memory(failures=2)
    with open_run(tmp_path / "demo") as run:
        following = forwarder(run, memory)
        write_steps(run, 0, 10)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                following.forward()
            following.fail()
        assert following.forward() == 10
    assert len(memory.values["train"]) == 10 and memory.opened == 3


def test_a_new_process_continues_under_the_same_id(tmp_path: Path) -> None:
    first, second = Memory(), Memory()
    with open_run(tmp_path / "demo") as run:
        following = forwarder(run, first)
        write_steps(run, 0, 10)
        following.forward()
        assert not Forwarder(run, tracker(to="csv")).acquire(), "two processes would send all of it twice"
        following.release()
        write_steps(run, 10, 15)
        assert forwarder(run, second).forward() == 5
    assert second.id == first.id and sorted(second.values["train"]) == list(range(10, 15))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=8), st.booleans())
def test_after_rollbacks_a_tracker_holds_what_the_run_holds(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int]], looks_between: bool
) -> None:
    memory, step = Memory(), 0
    with open_run(tmp_path_factory.mktemp("runs") / "demo") as run:
        following = forwarder(run, memory)
        for number, (steps, back) in enumerate(parts):
            write_steps(run, step, step + steps, offset=number)
            step += steps
            run.validation({"step": step, "loss": float(number)})
            if looks_between or number % 2:
                following.forward()
            if back and back < step:
                step -= back
                run.remove_metrics_from(step)
        following.forward()
        steps = {record["step"]: record["loss"] for record in run.metrics()}
        validations = {record["step"]: record["loss"] for record in run.validations()}
    assert memory.values == {"train": steps, "validation": validations}


def test_a_position_survives_a_cut_past_many_marks(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    journal, tail = Journal(path), JournalTail(path)
    for step in range(2000):
        journal.append({"step": step})
        assert [record["step"] for record in tail.read()] == [step]
        tail.advance()
    assert len(tail.marks) <= 256
    journal.cut(lambda record: record["step"] < 500)
    journal.append({"step": 500, "new": True})
    assert tail.was_cut() and tail.steps <= 500
    assert [record["step"] for record in tail.read()] == list(range(tail.steps, 501))


def test_a_torn_last_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step"')
    tail = JournalTail(path)
    assert [record["step"] for record in tail.read()] == [0]
    tail.advance()
    assert tail.read() == [] and not tail.was_cut()


def test_a_row_has_every_number_of_a_record() -> None:
    row = make_row({"step": 3, "loss": "nan", "veto": "not finite", "per_source": {"a": 1}, "clipped": True,
                    "rank_step_s": [1.0, 2.0], "note": "text", "time": 7.0}, "train", 1.0)  # fmt: skip
    assert row and row.time == 7.0 and row.named.pop("train/loss") != row.values["loss"]
    del row.values["loss"]
    assert row.values == {"vetoed": 1.0, "per_source/a": 1.0, "clipped": 1.0, "rank_step_s/0": 1.0, "rank_step_s/1": 2.0}


def test_a_tracker_that_stays_away_gives_up_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "RETRY_S", 0.01)
    lines: list[str] = []
    with open_run(tmp_path / "demo") as run:
        write_steps(run, 0, 5)
        run.event("finished", step=5, reason="done")
    away, present = Memory(failures=1 << 30), Memory()
    following = Forwarder(run, tracker(to="csv"), lambda _: away)
    results = follow_run(run, [following], lines.append, patience_s=0.05)
    assert "the network is gone; nothing is lost" in results["csv"].error
    assert lines == ["csv: ConnectionError: the network is gone; trying again"]
    later = Forwarder(run, tracker(to="csv"), lambda _: present)
    assert follow_run(run, [later], lines.append)["csv"].sent == 5 and present.closed == "finished"


def test_a_live_run_is_followed_to_its_end(tmp_path: Path) -> None:
    memory = Memory()
    with open_run(tmp_path / "demo") as run:
        following = Forwarder(run, tracker(to="csv", every="0.1s"), lambda _: memory)
        thread = threading.Thread(target=follow_run, args=(run, [following], print))
        thread.start()
        write_steps(run, 0, 30)
        run.event("finished", step=30, reason="done")
    thread.join(60)
    assert len(memory.values["train"]) == 30 and memory.closed == "finished"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"wandb": {"api_key": "x"}}, "api_key is a secret: remove it, and set WANDB_API_KEY in the environment"),
        ("wanb", "no tracker 'wanb'"),
        ({"to": "wandb", "port": 4}, "wandb has no port"),
        ("prometheus", "prometheus needs either a port"),
        ("otel", "otel needs url"),
        ({"mlflow": {"url": "http://me:secret@host"}}, "the URL contains a password"),
    ],
)
def test_wrong_trackers_are_refused(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        RunSpec.model_validate({"model": "10M", "data": {"sources": {"a": "b"}}, "trackers": [entry]})
    assert "me:secret" not in str(error.value).split("input_value")[0]


def test_the_command_forwards_after_the_run(tmp_path: Path) -> None:
    with open_run(tmp_path / "demo", "trackers: [csv]\n") as run:
        write_steps(run, 0, 5)
        write_rest(run, 5)
    result = CliRunner().invoke(app, ["watch", "forward", str(run.folder)])
    assert result.exit_code == 0 and result.output == "csv: 6 rows delivered\n"
    assert len((run.folder / "trackers/csv/train-00000.csv").read_text().splitlines()) == 6
    with pytest.raises(UserError, match="--to wanb: no such tracker"):
        observers_of(run, ["wanb"])
