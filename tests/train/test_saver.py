"""Saves of a job: what the manifest and the events say, and a disk that refuses."""

import errno
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.shelf import Shelf
from bessemer.spec.schema import CheckpointSpec
from bessemer.train.job import Progress
from bessemer.train.saver import CheckpointSaver, package_versions


@pytest.fixture
def job(store_of, stream_of):
    events, synced = [], []
    return SimpleNamespace(
        spec=SimpleNamespace(checkpoint=CheckpointSpec(keep_last=2, keep_best=True)),
        stream=stream_of(store_of("a", [50]), 8, 2),
        progress=Progress(tokens=512, elapsed_s=1.5, best_validation=2.25),
        device=torch.device("cpu"),
        run=SimpleNamespace(sync=lambda: synced.append(True)),
        state=lambda: {"x": torch.arange(5.0)},
        events=events,
        synced=synced,
        event=lambda kind, **details: events.append({"kind": kind, **details}),
    )


@pytest.fixture
def saver(tmp_path):
    return CheckpointSaver(Shelf(tmp_path / "checkpoints"), "spec-fingerprint")


def test_a_save_is_committed_with_all_that_a_resume_needs(job, saver):
    assert saver.save(job, 12, 2.25) == "step-00000012.a1"
    manifest = verify(saver.shelf.folder / "step-00000012.a1")
    assert (manifest.step, manifest.attempt, manifest.validation_loss) == (12, 1, 2.25)
    assert manifest.stream_fingerprint == job.stream.fingerprint and manifest.stream["sequence_length"] == 8
    assert manifest.spec_fingerprint == "spec-fingerprint"
    assert manifest.segments == [{"from_step": 0, "position": 0}]
    assert Progress(**manifest.progress) == job.progress
    assert manifest.versions == package_versions() and manifest.versions["torch"] == torch.__version__
    (event,) = job.events
    assert (event["kind"], event["step"], event["checkpoint"]) == ("saved", 12, "step-00000012.a1")
    assert "removed" not in event and event["seconds"] >= 0
    assert job.synced == [True], "the metrics are synced before the checkpoint that counts on them"


def test_old_ones_go_and_the_event_names_them(job, saver):
    for step, loss in ((1, 1.0), (2, None), (3, None), (4, None)):
        saver.save(job, step, loss)
    assert job.events[-1]["removed"] == ["step-00000002.a1"]
    assert sorted(os.listdir(saver.shelf.folder)) == [f"step-0000000{step}.a1" for step in (1, 3, 4)]


def test_a_disk_that_refuses_is_an_event_and_the_older_checkpoints_stand(job, saver, monkeypatch):
    saver.save(job, 1, None)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert saver.save(job, 2, None) is None
    event = job.events[-1]
    assert (event["kind"], event["step"]) == ("save_failed", 2)
    assert "step-00000002.a1" in event["reason"] and "No space left on device" in event["reason"]
    assert os.listdir(saver.shelf.folder) == ["step-00000001.a1"]
    assert verify(saver.shelf.folder / "step-00000001.a1").step == 1
    assert saver.save(job, 3, None) == "step-00000003.a1", "it goes on when the disk does"


def test_metrics_that_cannot_be_synced_are_a_failed_save(job, saver):
    def refuse():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    job.run.sync = refuse
    assert saver.save(job, 1, None) is None
    assert job.events[-1]["kind"] == "save_failed" and os.listdir(saver.shelf.folder) == []


def test_an_old_one_that_cannot_be_removed_does_not_undo_the_save(job, saver, monkeypatch):
    job.spec.checkpoint = CheckpointSpec(keep_last=1, keep_best=False)
    saver.save(job, 1, None)

    def refuse(path, *_, **__):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert saver.save(job, 2, None) == "step-00000002.a1"
    assert job.events[-1]["kind"] == "saved" and "step-00000001.a1" in job.events[-1]["not_removed"]
    assert [manifest.step for _, manifest in saver.shelf.committed()] == [2]
    assert saver.shelf.sweep() == ["step-00000001.a1"]
