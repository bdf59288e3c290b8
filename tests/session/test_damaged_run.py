"""Runs whose folder was damaged, or whose disk is full: they resume exactly, or are refused by name."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.manifest import NAME
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.run.journal import Journal
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec

from .conftest import spec_data, train_until
from .test_train import events, losses, train

Make = Callable[..., RunSpec]
Losses = list[tuple[int, float]]
REFUSAL = r"No checkpoint verifies. Refusing to start over; pass --restart to begin from step 0."


# 16 steps, saved and validated after every 4, with a learning rate that is the planner's.
SHORT: dict[str, Any] = {
    "budget": {"steps": 16}, "checkpoint": {"every": 4}, "evaluate": {"every": 4}, "optimizer": {"lr": "auto"},
}  # fmt: skip


@pytest.fixture
def short(make_spec: Make) -> Make:
    return lambda name="run", **parts: make_spec(name, **SHORT | parts)


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Of a run that was never stopped."""
    spec = RunSpec.model_validate(spec_data("whole", corpus, tmp_path_factory.mktemp("whole"), **SHORT))
    train(spec)
    return losses(spec)


def checkpoints(spec: RunSpec) -> list[str]:
    return sorted(path.name for path in (run_folder(spec) / "checkpoints").glob("step-*"))


def test_what_a_resume_reads_of_a_run_is_put_back_from_the_checkpoint(short: Make, unbroken: Losses) -> None:
    broken = short("broken")
    train_until(broken, 9)
    folder = run_folder(broken)
    for name in ("metrics/steps.jsonl", "events.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[4:-1], lines[-1][:-7]]))
    (folder / "metrics" / "validation.jsonl").unlink()
    (folder / "spec.yaml").write_text("model: [")
    (folder / "plan.json").write_text((folder / "plan.json").read_text().replace("0.0", "0.1"))
    assert train(broken).kind == "finished"
    assert losses(broken) == unbroken
    assert [r["step"] for r in Run(folder).validations()] == [0, 4, 8, 12, 16]
    repaired = {event["file"] for event in events(broken, "records_repaired")}
    assert repaired == {"metrics/steps.jsonl", "metrics/validation.jsonl", "events.jsonl"}
    assert len(events(broken, "started")) == 2


def test_a_run_without_its_checkpoints_starts_over_only_if_asked(short: Make) -> None:
    spec = short()
    train_until(spec, 9)
    before = losses(spec)
    shutil.rmtree(run_folder(spec) / "checkpoints")
    for _ in range(2):
        with pytest.raises(UserError, match=r"step-00000011.a1: missing, but the events list it. " + REFUSAL):
            train(spec)
    assert losses(spec) == before
    assert Session(spec, restart=True).train().kind == "finished"
    assert events(spec, "metrics_cut")[-1]["from_step"] == 0
    assert len(events(spec, "restarted")) == 1
    assert losses(spec)[:11] == before and len(losses(spec)) == 16
    assert train(spec).kind == "finished"  # and is not started over again


def test_a_restart_sets_the_old_checkpoints_aside(short: Make) -> None:
    spec = short()
    train_until(spec, 9)
    old = checkpoints(spec)
    session = Session(short(seed=1), restart=True)
    assert session.train().kind == "finished"
    assert sorted(p.name for p in (run_folder(spec) / "checkpoints" / "abandoned").iterdir()) == old
    assert [record["step"] for record in Run(run_folder(spec)).validations()] == [0, 4, 8, 12, 16]


def test_without_events_and_checkpoints_the_metrics_are_evidence(short: Make) -> None:
    spec = short()
    train_until(spec, 5)
    shutil.rmtree(run_folder(spec) / "checkpoints")
    (run_folder(spec) / "events.jsonl").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=REFUSAL):
            train(spec)


def test_a_lost_manifest_costs_no_shards(short: Make) -> None:
    spec = short()
    train_until(spec, 9)
    folders = [run_folder(spec) / "checkpoints" / name for name in checkpoints(spec)]
    for folder in folders:
        (folder / NAME).unlink()
    with pytest.raises(UserError, match=rf"{NAME}: missing. {REFUSAL}"):
        train(spec)
    assert all(list(folder.glob("*.distcp")) for folder in folders)


def test_a_refused_new_run_leaves_no_folder(short: Make) -> None:
    train(short("good", budget={"steps": 2}))
    spec = short("bad", guard={"forget": {"sources": ["other"]}})
    with pytest.raises(UserError, match="other"):  # found when the loop begins
        train(spec)
    assert not run_folder(spec).exists() and run_folder(short("good")).exists()
    with pytest.raises(UserError):
        train(short("good", seed=1))
    assert run_folder(short("good")).exists()


def refuse_records(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """Writes of records are refused from the `first` to the `last`."""
    real, calls = Journal._write, [0]

    def write(journal: Journal, data: bytes) -> None:
        calls[0] += 1
        if first <= calls[0] <= last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(journal, data)

    monkeypatch.setattr(Journal, "_write", write)


def test_a_disk_that_is_full_for_a_while_costs_nothing(short: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_records(monkeypatch, 8, 12)
    spec = short()
    assert train(spec).kind == "finished"
    assert [step for step, _ in losses(spec)] == list(range(16))
    (event,) = events(spec, "write_failed")
    assert "steps.jsonl: No space left on device; records wait in memory" in event["reason"]


def test_a_disk_that_stays_full_ends_the_run_and_the_resume_is_exact(
    short: Make, unbroken: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = short("broken")
    with monkeypatch.context() as patch:
        refuse_records(patch, 16, 10**6)
        outcome = train(broken)
    assert outcome.kind == "failed" and outcome.step < 16
    assert "could not be saved" in outcome.reason and "steps.jsonl: No space left on device" in outcome.reason
    assert train(broken).kind == "finished"
    assert losses(broken) == unbroken


def test_an_old_run_with_missing_records_says_so(short: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = short()
    with monkeypatch.context() as patch:  # as earlier versions saved
        patch.setattr("bessemer.train.saver.RUN_COPY", "other.zip")
        train_until(spec, 9)
    path: Path = Run(run_folder(spec)).steps_path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[5:]))
    assert train(spec).kind == "finished"
    assert "2 of 11 steps have no record" in events(spec, "records_missing")[0]["reason"]


def test_a_lost_disk_costs_neither_the_plan_nor_the_metrics(short: Make, unbroken: Losses, tmp_path: Path) -> None:
    spec = short(checkpoint={"every": 4, "remote": f"file://{tmp_path}/remote"})
    train_until(spec, 9)
    shutil.rmtree(run_folder(spec))
    with pytest.raises(UserError, match=r"--restart: .* holds 3 checkpoints of this run"):
        Session(spec, restart=True).train()
    assert train(spec).kind == "finished"
    assert losses(spec) == unbroken
    assert [event["checkpoint"] for event in events(spec, "fetched")] == ["step-00000011.a1"]
    assert {event["file"] for event in events(spec, "records_repaired")} >= {"metrics/steps.jsonl"}


def test_a_damaged_lineage_is_renamed_and_the_run_goes_on(short: Make) -> None:
    spec = short()
    train_until(spec, 5)
    path = run_folder(spec) / "checkpoints" / "lineage.json"
    path.write_text("garbage")
    assert train(spec).kind == "finished"
    (repair,) = events(spec, "records_repaired")
    assert repair["file"] == "checkpoints/lineage.json" and "renamed to lineage.json.damaged" in repair["reason"]
    assert path.with_name("lineage.json.damaged").read_text() == "garbage"
    assert len(json.loads(path.read_text())) == 1


def test_a_resume_on_other_files_names_them(short: Make, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("gone", "edited", "same"):
        (folder / f"{name}.txt").write_text(f"{name} steel " * 400)
    spec = short(data={"sources": {"words": {"path": [str(folder)]}}, "context": 32, "validation": 0})
    train_until(spec, 5)
    (folder / "gone.txt").unlink()
    (folder / "edited.txt").write_text("other iron " * 400)
    (folder / "added.txt").write_text("more coke " * 400)
    with pytest.raises(UserError, match="another data stream") as refusal:
        train(spec)
    changes = f"missing: {folder}/gone.txt; new: {folder}/added.txt; changed: {folder}/edited.txt"
    assert f"data files {changes}; " in str(refusal.value)
    assert changes in events(spec, "data_note")[0]["reason"]
