"""What changed before a step, line by line."""

import pytest

from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.spec.mixture import quantise
from bessemer.trial.attribute import list_changes


@pytest.fixture
def quiet(stage):
    return stage(0, last=34)


def test_a_quiet_run_has_no_changes(quiet):
    job, scene, _ = quiet
    assert list_changes(job, scene) == []


def test_rates_batches_skips_phases_and_epochs(quiet):
    job, scene, _ = quiet
    rows = job.data.stream.sources["a"]
    sizes = {"a": rows.count, "b": rows.count}
    phases = [MixturePhase(0, quantise({"a": 1.0})), MixturePhase(200, quantise({"a": 0.5, "b": 0.5}))]
    steps = StepPositions([BatchPhase(0, 8), BatchPhase(26, 16)]).skip(28, 300)
    stream = BatchStream({"a": rows, "b": rows}, StreamOrder(phases, sizes, 0), 32, steps)
    job.data.stream = stream
    scene.history[20]["lr"] *= 10
    found = list_changes(job, scene)
    assert "step 25: data phase 2 begins (a 50.0%, b 50.0%)" in found
    assert "step 26: batch size 8 -> 16 sequences" in found
    assert "step 28: the data goes on at position 300 (a skip)" in found
    assert any(line.startswith("step 20: learning rate") and "schedule says" in line for line in found)
    assert found == sorted(found, key=lambda line: int(line.split()[1].rstrip(":")))


def test_a_new_epoch_is_told(quiet):
    job, scene, _ = quiet
    count = job.data.stream.sources["a"].count
    job.data.stream = job.data.stream.replace(StepPositions([BatchPhase(0, 8)]).skip(30, count - 20))
    assert "step 32: epoch 2 of source a begins" in list_changes(job, scene)


def test_events_of_the_window_are_told_and_older_ones_are_not(quiet):
    job, scene, _ = quiet
    machine = {"name": "old", "matmul": {"fp32": 1.0}}
    events = [
        {"kind": "started", "step": 0, "device": "cpu", "versions": {"torch": "1"}, "machine": machine},
        {"kind": "saved", "step": 20},
        {"kind": "spec_changed", "changes": {"optimizer.lr": [1e-3, 1e-2]}},
        {"kind": "lock_taken", "reason": "process 7 on node3 died without its last word"},
        {"kind": "started", "step": 20, "device": "cpu", "resumed_from": "step-20", "versions": {"torch": "2"},
         "machine": {"name": "new", "matmul": {"fp32": 2.0}}},
        {"kind": "veto", "step": 33},
    ]  # fmt: skip
    found = list_changes(job, scene, events, steps=20)
    assert found == [
        "step 20: the spec changed: optimizer.lr 0.001 -> 0.01",
        "step 20: lock taken: process 7 on node3 died without its last word",
        "step 20: started on cpu from step-20; torch 1 -> 2; name old -> new",
    ]
    assert list_changes(job, scene, events[:2], steps=10) == []
