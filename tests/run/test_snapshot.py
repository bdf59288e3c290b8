"""What a checkpoint keeps of its run: damaged records are found by it and put back, later ones are cut."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.run.directory import RunReader, RunWriter
from bessemer.run.snapshot import NAME, read_snapshot

STEPS, FILES = 20, ("metrics/steps.jsonl", "metrics/validation.jsonl", "metrics/ranks.jsonl", "events.jsonl")
Damage = Callable[[Path], object]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def garble(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], b"\0" * 40 + b"\n", *lines[2:]]))


def drop_lines(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1::2]))


def flip_digit(path: Path) -> None:
    content = path.read_bytes()
    at = content.index(b"1")
    path.write_bytes(content[:at] + b"7" + content[at + 1 :])


def swap_lines(path: Path) -> None:
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([second, first, *rest]))


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, bytes]:
    """A run of 20 steps, whose checkpoint was saved when 15 were done."""
    with RunWriter(tmp_path / "run") as run:
        run.write_file("plan.json", "{}")
        run.event("started", step=0)
        for step in range(STEPS):
            run.step({"step": step, "loss": 4.25 - step / 8 if step else math.nan})
            if step % 4 == 0:
                run.validation({"step": step, "loss": 3.5})
                run.rank_record({"step": step, "own_s": [0.125, 0.125]})
                run.event("saved", step=step)
            if step == 14:
                snapshot = run.snapshot()
        run.sync()
        (tmp_path / NAME).write_bytes(snapshot.pack())
    return read_snapshot(tmp_path)


def test_the_copy_holds_what_there_was_at_the_save(tmp_path: Path, saved: dict[str, bytes]) -> None:
    assert set(saved) == {*FILES, "plan.json"}
    for name in FILES:
        assert (tmp_path / "run" / name).read_bytes().startswith(saved[name])
    assert [json.loads(line)["step"] for line in saved["metrics/steps.jsonl"].splitlines()] == list(range(15))
    assert read_snapshot(tmp_path / "elsewhere") == {}


def test_an_undamaged_run_is_only_cut(tmp_path: Path, saved: dict[str, bytes]) -> None:
    with RunWriter(tmp_path / "run") as run:
        assert run.go_back(15, saved) == []
        assert [event["steps"] for event in run.events("metrics_cut")] == [5]
        assert [record["step"] for record in run.validations()] == [0, 4, 8, 12]
        assert run.go_back(15, saved) == [] and len(list(run.events("metrics_cut"))) == 1


@pytest.mark.parametrize("damage", [truncate, garble, drop_lines, flip_digit, swap_lines, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_damaged_records_are_put_back_and_told(
    tmp_path: Path, saved: dict[str, bytes], name: str, damage: Damage
) -> None:
    path = tmp_path / "run" / name
    path.write_bytes(saved[name])  # as after a save, so that all damage is before it
    damage(path)
    with RunWriter(tmp_path / "run") as run:
        (event,) = run.go_back(15, saved)
        assert (event["kind"], event["file"]) == ("records_repaired", name) and str(path) in event["reason"]
        assert list(run.events())[-1] == event
    if name != "events.jsonl":
        assert path.read_bytes() == saved[name]
    else:
        assert path.read_bytes().startswith(saved[name])


def test_events_after_the_checkpoint_outlive_the_repair(tmp_path: Path, saved: dict[str, bytes]) -> None:
    path = tmp_path / "run" / "events.jsonl"
    later = [json.loads(line) for line in path.read_bytes()[len(saved["events.jsonl"]) :].splitlines()]
    garble(path)
    with RunWriter(tmp_path / "run") as run:
        run.go_back(15, saved)
        kinds = [event["kind"] for event in run.events()]
        assert later and all(event in list(run.events()) for event in later)
        assert kinds == ["started", *["saved"] * 5, "metrics_cut", "records_repaired"]


def test_without_a_copy_missing_steps_are_told(tmp_path: Path, saved: dict[str, bytes]) -> None:
    drop_lines(tmp_path / "run" / FILES[0])
    with RunWriter(tmp_path / "run") as run:
        (event,) = run.go_back(15, {})
        assert event["kind"] == "records_missing" and "8 of 15 steps" in event["reason"]


def test_a_journal_that_is_deleted_while_it_is_written_is_copied_whole(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as run:
        run.step({"step": 0})
        run.steps_path.unlink()
        run.step({"step": 1})
        (tmp_path / NAME).write_bytes(run.snapshot().pack())
    assert read_snapshot(tmp_path)[FILES[0]] == b'{"step": 0}\n{"step": 1}\n'


def test_other_processes_put_nothing_back(tmp_path: Path, saved: dict[str, bytes]) -> None:
    reader = RunReader(tmp_path / "run")
    assert reader.go_back(15, saved) == [] and not reader.snapshot().journals
