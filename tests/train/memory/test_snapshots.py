"""Two states in memory: exact, independent of what happens afterwards, and given up where there is no room."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from bessemer.guard.judge import Judge
from bessemer.parallel.world import World
from bessemer.spec.guard import GuardSpec
from bessemer.train.job import Guard, Progress
from bessemer.train.memory.snapshots import MemorySnapshots, fits_snapshots

CPU = torch.device("cpu")


class Small:
    """As much of a job as a copy needs: some weights, a judge, counters."""

    def __init__(self):
        self.recorder = SimpleNamespace(progress=Progress())
        self.weights = {"model.w": torch.zeros(3), "optimizer.w.step": torch.zeros(())}
        self.guard = Guard(Judge(GuardSpec(window=16, warmup=8), CPU), None, None, None)
        self.engine = SimpleNamespace(state=lambda: self.weights)

    def state(self):
        return self.weights | self.guard.tensors()

    snapshot_state = state

    def frozen_digest(self):
        return torch.zeros(())

    def train(self, steps):
        """Every step changes every tensor of the state, and the counters."""
        for _ in range(steps):
            for tensor in self.weights.values():
                tensor += 1
            self.guard.judge.judge(torch.tensor(4.0 + float(self.weights["model.w"][0])), torch.tensor(1.0))
            self.recorder.progress.tokens += 10


def frozen(job):
    return {name: tensor.clone() for name, tensor in job.state().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(-1), b[k].nan_to_num(-1)) for k in a)


def test_a_restored_state_is_the_copied_one_however_long_ago():
    job, copies, seen = Small(), MemorySnapshots(), {}
    for step in range(0, 40, 8):
        seen[step] = frozen(job), job.recorder.progress.tokens
        copies.take(job, step)
        job.train(8)
    assert [kept.step for kept in copies.held] == [24, 32]
    for kept in reversed(copies.held):
        kept.restore(job)
        assert equal(frozen(job), seen[kept.step][0]) and job.recorder.progress.tokens == seen[kept.step][1]


def test_a_copy_can_be_gone_back_to_twice():
    """What trains on after a rollback writes nothing into the copy: no weight, no window, no counter."""
    job, copies = Small(), MemorySnapshots()
    job.train(12)
    copies.take(job, 12)
    before = frozen(job)
    for _ in range(2):
        job.train(5)
        copies.held[0].restore(job)
        assert equal(frozen(job), before) and job.recorder.progress.tokens == 120


def test_the_memory_of_the_older_copy_is_used_again():
    job, copies = Small(), MemorySnapshots()
    places = set()
    for step in range(6):
        copies.take(job, step)
        places |= {kept.state["model.w"].data_ptr() for kept in copies.held}
        job.train(1)
    assert len(places) == 2 and len(copies.held) == 2


def test_after_a_rollback_the_copies_of_what_did_not_happen_are_dropped():
    job, copies = Small(), MemorySnapshots()
    copies.take(job, 32)
    job.train(32)
    copies.take(job, 64)
    copies.take(job, 48)  # the run went back to 32 and came to 48
    assert [kept.step for kept in copies.held] == [32, 48]
    copies.take(job, 32)  # and went back to the start of it all
    assert [kept.step for kept in copies.held] == [32]


@pytest.mark.parametrize(("free", "fits"), [(10**9, True), (4 * 1000, True), (4 * 1000 - 2, False), (0, False)])
def test_two_copies_must_fit_in_half_of_the_free_memory(monkeypatch, free, fits):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    state = {"a": torch.zeros(200), "b": torch.zeros(25, dtype=torch.int64)}
    assert fits_snapshots(state, CPU, World()) == (fits, 2000, free)
