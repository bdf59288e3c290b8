"""Saves of a job: what the manifest and the events say, and a disk that refuses."""

import errno
import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.remote import RemoteCheckpoints
from bessemer.checkpoint.store import CheckpointStore
from bessemer.parallel.world import World
from bessemer.plan.cost_model.goodput import mean_time_to_interruption, young_daly
from bessemer.spec.schema import CheckpointSpec
from bessemer.train.job import Progress
from bessemer.train.saver import CheckpointSaver, PendingSave, package_versions


@pytest.fixture
def job(store_of, stream_of):
    events, synced = [], []
    state = {"model.x": torch.arange(5.0), "optimizer.m": torch.ones(5)}
    run = SimpleNamespace(
        sync=lambda: synced.append(True),
        events=lambda: iter(()),
        unwritten="",
        snapshot=lambda: SimpleNamespace(pack=lambda: b"a copy"),
    )
    return SimpleNamespace(
        world=World(),
        spec=SimpleNamespace(
            checkpoint=CheckpointSpec(keep_last=2, keep_best=True), guard=SimpleNamespace(enabled=False)
        ),
        engine=SimpleNamespace(device=torch.device("cpu"), base=None),
        data=SimpleNamespace(stream=stream_of(store_of("a", [50]), 8, 2)),
        recorder=SimpleNamespace(
            run=run,
            progress=Progress(tokens=512, elapsed_s=1.5, best_validation=2.25),
            event=lambda kind, **details: events.append({"kind": kind, **details}),
        ),
        tensors=state,
        state=lambda: state,
        adjustments=(adjustments := {"steps": [1]}),
        guard_state=lambda: adjustments,
        events=events,
        synced=synced,
    )


@pytest.fixture
def saver(tmp_path):
    return CheckpointSaver(CheckpointStore(tmp_path / "checkpoints"), "spec-fingerprint")


@pytest.fixture
def held(saver, monkeypatch):
    """Writes stand still until they are let go, so that a test can look at a save in flight."""
    go, real = threading.Event(), saver.store.write

    def write(*arguments):
        assert go.wait(30)
        return real(*arguments)

    monkeypatch.setattr(saver.store, "write", write)
    return go


def kinds(job):
    return [event["kind"] for event in job.events]


def test_a_save_is_committed_with_all_that_a_resume_needs(job, saver):
    assert saver.save(job, 12, 2.25) == "step-00000012.a1"
    manifest = verify(saver.store.folder / "step-00000012.a1")
    assert (manifest.step, manifest.attempt, manifest.validation_loss) == (12, 1, 2.25)
    assert manifest.stream_fingerprint == job.data.stream.fingerprint and manifest.stream["sequence_length"] == 8
    assert manifest.spec_fingerprint == "spec-fingerprint"
    assert manifest.segments == [{"from_step": 0, "position": 0}]
    assert Progress(**manifest.progress) == job.recorder.progress
    assert manifest.versions == package_versions() and manifest.versions["torch"] == torch.__version__
    (event,) = job.events
    assert (event["kind"], event["step"], event["checkpoint"]) == ("saved", 12, "step-00000012.a1")
    assert "removed" not in event and event["seconds"] > 0 and event["stall_s"] >= event["seconds"] - 1e-3
    assert event["bytes"] == sum(about["bytes"] for about in manifest.files.values()) > 0
    assert manifest.guard == {"steps": [1]} and manifest.content == "full"
    assert (saver.store.folder / "step-00000012.a1" / "run.zip").read_bytes() == b"a copy"
    assert job.synced == [True], "the metrics are synced before the checkpoint that counts on them"


def test_old_ones_go_and_the_event_names_them(job, saver):
    for step, loss in ((1, 1.0), (2, None), (3, None), (4, None)):
        saver.save(job, step, loss)
    assert job.events[-1]["removed"] == ["step-00000002.a1"]
    assert sorted(os.listdir(saver.store.folder)) == [f"step-0000000{step}.a1" for step in (1, 3, 4)]


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
    assert os.listdir(saver.store.folder) == ["step-00000001.a1"]
    assert verify(saver.store.folder / "step-00000001.a1").step == 1
    assert saver.save(job, 3, None) == "step-00000003.a1", "it goes on when the disk does"


def test_metrics_that_cannot_be_synced_are_a_failed_save(job, saver):
    def refuse():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    job.recorder.run.sync = refuse
    assert saver.save(job, 1, None) is None
    assert job.events[-1]["kind"] == "save_failed" and os.listdir(saver.store.folder) == []
    assert not job.recorder.disk_full
    job.recorder.run.unwritten = "steps.jsonl: No space left on device"
    saver.save(job, 1, None)
    assert job.recorder.disk_full


def test_an_old_one_that_cannot_be_removed_does_not_undo_the_save(job, saver, monkeypatch):
    job.spec.checkpoint = CheckpointSpec(keep_last=1, keep_best=False)
    saver.save(job, 1, None)

    def refuse(path, *_, **__):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert saver.save(job, 2, None) == "step-00000002.a1"
    assert job.events[-1]["kind"] == "saved" and "step-00000001.a1" in job.events[-1]["not_removed"]
    assert [manifest.step for _, manifest in saver.store.committed()] == [2]
    assert saver.store.sweep() == ["step-00000001.a1"]


def test_training_goes_on_while_a_copy_of_the_state_is_written(job, saver, held):
    job.spec.checkpoint = CheckpointSpec(asynchronous=True)
    assert saver.save(job, 7, 2.0) == "step-00000007.a1"
    job.tensors["model.x"].add_(100)  # the optimizer does not wait
    job.adjustments["steps"].append(8)  # nor does the guard
    saver.poll(job)
    assert job.events == [] and saver.store.committed() == [], "not before it is committed"
    held.set()
    assert saver.wait(job)
    (event,) = job.events
    assert (event["kind"], event["step"], event["checkpoint"]) == ("saved", 7, "step-00000007.a1")
    assert event["seconds"] >= event["stall_s"]
    loaded = {"model.x": torch.zeros(5)}
    saver.store.load(saver.store.folder / "step-00000007.a1", loaded)
    assert torch.equal(loaded["model.x"], torch.arange(5.0)), "the state as it was at the save"
    assert verify(saver.store.folder / "step-00000007.a1").guard == {"steps": [1]}
    saver.poll(job)
    assert len(job.events) == 1 and saver.wait(job), "it is told once"


def test_a_save_waits_for_the_one_before(job, saver, held):
    job.spec.checkpoint = CheckpointSpec(asynchronous=True)
    saver.save(job, 1, None)
    threading.Timer(0.05, held.set).start()
    job.tensors["model.x"].fill_(1)
    saver.save(job, 2, None)
    assert kinds(job) == ["saved"] and job.events[0]["step"] == 1
    saver.wait(job)
    for step, value in ((1, torch.arange(5.0)), (2, torch.ones(5))):
        loaded = {"model.x": torch.zeros(5)}
        saver.store.load(saver.store.folder / f"step-0000000{step}.a1", loaded)
        assert torch.equal(loaded["model.x"], value)


def test_a_failure_behind_the_loops_back_is_an_event_at_the_next_poll(job, saver, monkeypatch):
    job.spec.checkpoint = CheckpointSpec(asynchronous=True)
    saver.save(job, 1, None)
    assert saver.wait(job)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert saver.save(job, 2, None) == "step-00000002.a1", "the name it would have had"
        while len(job.events) < 2:
            saver.poll(job)
    assert job.events[1]["kind"] == "save_failed" and "No space left on device" in job.events[1]["reason"]
    assert os.listdir(saver.store.folder) == ["step-00000001.a1"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        saver.save(job, 3, None)
        assert not saver.wait(job), "whoever leaves knows that the last state is not saved"
    saver.save(job, 4, None)
    assert saver.wait(job) and kinds(job) == ["saved", "save_failed", "save_failed", "saved"]


def test_a_fault_of_our_own_is_not_taken_for_a_full_disk(job, saver, monkeypatch):
    job.spec.checkpoint = CheckpointSpec(asynchronous=True)
    monkeypatch.setattr(saver.store, "write", lambda *_: 1 / 0)
    saver.save(job, 1, None)
    with pytest.raises(ZeroDivisionError):
        saver.wait(job)


def test_under_auto_a_cpu_stages_when_saves_have_become_slow(job, saver, monkeypatch):
    assert saver.save(job, 1, None) and kinds(job) == ["saved"], "told at once: it was synchronous"
    monkeypatch.setattr("bessemer.train.saver.WORTH_STAGING_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=79))  # the state has 40 bytes
        saver.save(job, 2, None)
        assert len(job.events) == 2, "no room for a copy"
    saver.save(job, 3, None)
    assert len(job.events) == 2, "it is under way"
    assert saver.wait(job) and job.events[2]["step"] == 3


def test_where_there_is_no_memory_for_a_copy_the_save_still_happens(job, saver, monkeypatch):
    job.spec.checkpoint = CheckpointSpec(asynchronous=True)

    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore")

    monkeypatch.setattr("bessemer.checkpoint.dcp.torch.empty", refuse)
    assert saver.save(job, 1, None) == "step-00000001.a1"
    assert kinds(job) == ["staging_failed", "saved"]
    assert "can't allocate memory: the save is synchronous" in job.events[0]["reason"]


def test_archives_of_the_weights_alone(job, saver):
    job.spec.checkpoint = CheckpointSpec(keep_last=1, keep_every=10, archive_model_only=True)
    for step in range(4, 40, 4):
        saver.save(job, step, None)
    names = sorted(os.listdir(saver.store.folder))
    assert names == [f"model-000000{step}.a1" for step in (12, 20, 32)] + ["step-00000036.a1"]
    manifest = verify(saver.store.folder / "model-00000020.a1")
    assert manifest.content == "model" and manifest.bytes < job.events[0]["bytes"]


def test_uploads_follow_commits_and_the_newest_goes_next(job, tmp_path):
    remote = RemoteCheckpoints(f"file://{tmp_path}/durable/run")
    saver = CheckpointSaver(CheckpointStore(tmp_path / "run" / "checkpoints"), "s", remote)
    go, real, sent = threading.Event(), remote.upload, []

    def upload(folder):
        sent.append(folder.name)
        assert go.wait(30)
        return real(folder)

    remote.upload = upload
    job.spec.checkpoint = CheckpointSpec(keep_last=1)
    for step in (1, 2, 3):  # the storage is slower than the run
        saver.save(job, step, None)
        saver.poll(job)
    assert kinds(job) == ["saved"] * 3
    here = sorted(path.name for path, _ in saver.store.committed())
    assert here == [f"step-0000000{k}.a1" for k in (1, 2, 3)], "what is or was next to be uploaded is not deleted"
    go.set()
    assert saver.wait(job, uploads=True)
    assert sent == ["step-00000001.a1", "step-00000003.a1"]
    assert kinds(job)[3:] == ["uploaded", "uploaded"] and job.events[4]["removed"] == ["step-00000001.a1"]
    assert list(remote.committed()) == ["step-00000003.a1"]


def test_a_storage_that_fails_is_an_event_and_the_run_goes_on(job, tmp_path):
    remote = RemoteCheckpoints(f"file://{tmp_path}/durable/run", attempts=2, pause_s=0.001)
    saver = CheckpointSaver(CheckpointStore(tmp_path / "run" / "checkpoints"), "s", remote)
    (tmp_path / "durable").write_text("a file where a folder should be")
    saver.save(job, 1, None)
    assert saver.wait(job, uploads=True), "the local one stands"
    assert kinds(job) == ["saved", "upload_failed"] and "failed 2 times" in job.events[1]["reason"]
    (tmp_path / "durable").unlink()
    saver.save(job, 2, None)
    saver.wait(job, uploads=True)
    assert kinds(job)[2:] == ["saved", "uploaded"] and list(remote.committed()) == ["step-00000002.a1"]


def test_what_a_rollback_leaves_behind_is_deleted_in_both_tiers(job, tmp_path):
    remote = RemoteCheckpoints(f"file://{tmp_path}/durable/run")
    saver = CheckpointSaver(CheckpointStore(tmp_path / "run" / "checkpoints"), "s", remote)
    job.spec.checkpoint = CheckpointSpec(keep_last=5, asynchronous=True)
    for step in (10, 20, 30):
        saver.save(job, step, None)
    assert saver.abandon(job, 15) == ["step-00000020.a1", "step-00000030.a1"]
    assert [manifest.step for _, manifest in saver.store.committed()] == [10]
    assert all(manifest.step == 10 for manifest in remote.committed().values())


def test_the_interval_follows_the_measured_stall_and_the_runs_own_failures(job, saver):
    first = saver.interval_s(job)
    assert first == 600.0, "nothing is measured yet"
    saver._last = PendingSave(1, saver.store.folder, 0.0, stall_s=0.02, seconds=0.02)
    calm = saver.interval_s(job)
    assert calm == pytest.approx(young_daly(0.02, mean_time_to_interruption(1, 0, 1.5)))
    failing = CheckpointSaver(saver.store, "s")
    failing._last = saver._last
    job.recorder.run.events = lambda: iter([{"kind": "started"}] * 10)
    assert failing.interval_s(job) == pytest.approx(calm / 10**0.5, rel=1e-3), "nine kills: ten times the rate"
    job.spec.checkpoint = CheckpointSpec(every="50 steps")
    assert saver.interval_s(job) is None
