"""A run's directory: what is written is read, the state follows from what happened, damage hides no other run."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.run.directory import Run, RunWriter, list_runs, summarize
from bessemer.run.finding import Finding
from bessemer.run.lock import Owner


def write_run(folder: Path, *kinds: str, steps: int = 0) -> Run:
    with RunWriter(folder) as run:
        for kind in kinds:
            run.event(kind, reason=f"because {kind}", total_steps=10)
        for step in range(steps):
            run.step({"step": step, "loss": 4.0 - step})
    return Run(folder)


def leave_dead_owner(folder: Path) -> None:
    """As a kill leaves it: the owner file stays, its process is gone."""
    dead = Owner(Owner.this_process().host, 2**22 + 1, 1.0, time.time())
    (folder / "owner.json").write_text(json.dumps(asdict(dead)))


def test_records_and_events_are_read_back(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as run:
        run.step({"step": 0, "loss": math.nan})
        run.validation({"step": 1, "loss": 2.0})
        event = run.event("veto", step=0, reason="loss outlier")
        run.event("saved", step=1)
        run.write_file("plan.json", "{}")
        run.sync()
        assert list(Run(tmp_path / "a").metrics()) == [{"step": 0, "loss": "nan"}]  # while it is being written
    run = Run.existing(tmp_path / "a")
    assert list(run.validations()) == [{"step": 1, "loss": 2.0}]
    assert [found["kind"] for found in run.events()] == ["veto", "saved"]
    assert list(run.events("veto")) == [event]
    assert abs(event["time"] - time.time()) < 3600
    assert (run.folder / "plan.json").read_text() == "{}"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run \(no events.jsonl\)"):
        Run.existing(tmp_path)


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    with RunWriter(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} on"):
        RunWriter(tmp_path)
    RunWriter(tmp_path).close()


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ((), "new"),
        (("swept",), "new"),
        (("started", "finished"), "finished"),
        (("started", "veto", "failed"), "failed"),
        (("started", "interrupted"), "interrupted"),
        (("started", "stopped"), "stopped"),
        (("started", "interrupted", "started", "finished"), "finished"),
        (("started", "saved"), "interrupted"),  # no last word: it was killed
    ],
)
def test_the_state_of_a_run_that_nobody_writes(tmp_path: Path, kinds: tuple[str, ...], state: str) -> None:
    assert write_run(tmp_path, *kinds).state == state


def test_the_state_while_it_is_written(tmp_path: Path) -> None:
    write_run(tmp_path, "started", "interrupted")
    time.sleep(0.01)  # the next start is later than the last word of the one before
    with RunWriter(tmp_path) as run:
        assert run.state == "running"  # preparing its data, though the last word is "interrupted"
        run.event("started")
        assert run.state == "running"
        run.event("finished")
        assert run.state == "finished"


def test_a_killed_process_leaves_an_interrupted_run(tmp_path: Path) -> None:
    code = (
        "import sys; from bessemer.run.directory import RunWriter\n"
        "run = RunWriter(sys.argv[1])\n"
        "for word in sys.stdin:\n"
        "    if word != 'wait\\n': run.event(word.strip())\n"
        "    print('done', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    states = []
    for word in ("wait", "started"):
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        process.stdout.readline()
        states.append(Run(tmp_path).state)
    process.kill()
    process.communicate()
    assert [*states, Run(tmp_path).state] == ["running", "running", "interrupted"]
    with RunWriter(tmp_path) as run:
        assert run.lock.previous_owner is not None and run.lock.previous_owner.pid == process.pid


def test_killed_before_its_first_word(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    leave_dead_owner(tmp_path)
    assert run.state == "interrupted"


def test_a_resume_cuts_what_the_checkpoint_does_not_hold_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, steps=6)
    with RunWriter(tmp_path) as run:
        for step in (0, 2, 4, 6):
            run.validation({"step": step, "loss": 1.0})
        assert run.remove_metrics_from(4) == 2
        assert [record["step"] for record in run.metrics()] == [0, 1, 2, 3]
        assert [record["step"] for record in run.validations()] == [0, 2, 4]
        (event,) = run.events("metrics_cut")
        assert (event["from_step"], event["steps"]) == (4, 2)
        assert run.remove_metrics_from(4) == 0
        assert len(list(run.events("metrics_cut"))) == 1
        assert run.remove_metrics_from(0) == 4


def test_a_folder_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: Not a directory; set `runs`"):
        RunWriter(tmp_path / "file" / "run")


def test_a_failed_open_gives_the_lock_back(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"events.jsonl: is a folder"):
        RunWriter(tmp_path)
    (tmp_path / "events.jsonl").rmdir()
    RunWriter(tmp_path).close()


def test_a_summary(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as run:
        run.event("started", total_steps=100)
        run.step({"step": 41, "loss": 2.5})
        run.validation({"step": 40, "loss": 3})
        run.event("failed", reason="out of luck")
    found = summarize(Run(tmp_path / "a"))
    assert (found.name, found.state, found.reason) == ("a", "failed", "out of luck")
    assert (found.step, found.total_steps, found.loss, found.validation_loss) == (42, 100, 2.5, 3.0)
    assert 0 <= found.age_s < 3600


def damage(run: Run, file: str, content: bytes) -> None:
    path = run.folder / file
    if path.is_dir():
        path.rmdir()
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("events.jsonl", b""),
        ("events.jsonl", b"{"),
        ("events.jsonl", b"\0\0\0\n"),
        ("events.jsonl", b'{"time": "x"}\n{"kind": 5}\n{"kind": ["a"]}\n[]\n'),
        ("events.jsonl", b'{"kind": "started", "time": "nan", "total_steps": "many", "reason": null}\n'),
        ("metrics/steps.jsonl", b""),
        ("metrics/steps.jsonl", b'{"step": 3'),
        ("metrics/steps.jsonl", b'{"step": 3, "loss": "nan"}\n'),
        ("metrics/steps.jsonl", b'{"step": "inf"}\n'),
        ("metrics/steps.jsonl", b'{"loss": null}\n'),
        ("metrics/validation.jsonl", b'{"step": 3, "loss": "nan"}\n'),
        ("metrics/validation.jsonl", b'{"loss": {}}\n'),
        ("owner.json", b"{"),
    ],
)
def test_a_damaged_run_is_listed_beside_the_others(tmp_path: Path, file: str, content: bytes) -> None:
    write_run(tmp_path / "good", "started", "finished", steps=2)
    damage(write_run(tmp_path / "bad", "started", steps=1), file, content)
    found = {run.name: run for run in list_runs(tmp_path)}
    assert found.keys() == {"good", "bad"}
    assert (found["good"].state, found["good"].step, found["good"].loss) == ("finished", 2, 3.0)
    assert found["bad"].state in ("new", "interrupted")


def test_a_loss_that_is_no_number_is_not_hidden(tmp_path: Path) -> None:
    damage(write_run(tmp_path / "a", "started"), "metrics/steps.jsonl", b'{"step": 3, "loss": "nan"}\n')
    (found,) = list_runs(tmp_path)
    assert found.step == 4 and found.loss is not None and math.isnan(found.loss)


def test_a_run_that_cannot_be_read_is_listed_as_such(tmp_path: Path) -> None:
    write_run(tmp_path / "good", "started")
    (tmp_path / "bad" / "events.jsonl").mkdir(parents=True)
    found = list_runs(tmp_path)
    assert [(run.name, run.state) for run in found] == [("good", "interrupted"), ("bad", "unreadable")]
    assert "directory" in found[1].reason


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    now = time.time()
    for age, name in ((300, "old"), (100, "young"), (200, "middle")):
        run = write_run(tmp_path / name)
        record = json.dumps({"kind": "started", "time": now - age}) + "\n"
        damage(run, "events.jsonl", record.encode())
        os.utime(run.steps_path, (now - age, now - age))
    (tmp_path / "not-a-run").mkdir()
    found = list_runs(tmp_path)
    assert [run.name for run in found] == ["young", "middle", "old"]
    assert [round(run.age_s, -2) for run in found] == [100, 200, 300]
    assert list_runs(tmp_path / "none") == []


def test_a_finding_is_plain_data() -> None:
    finding = Finding("loss is NaN", {"step": 5}, fix="lower the learning rate")
    data: dict[str, Any] = finding.to_json()
    assert Finding(**json.loads(json.dumps(data))) == finding
    assert (data["cause"], data["confidence"]) == ("", 0.0)


def test_a_folder_in_the_place_of_a_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics" / "steps.jsonl").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"metrics/steps.jsonl: is a folder, but the run needs a file of this name; move it away"
    ):
        RunWriter(tmp_path)
