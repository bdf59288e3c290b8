"""What the machine says of itself, and where it says nothing."""

import multiprocessing
import time
from typing import Any

import pytest
import torch

from bessemer.train import rank_report as surroundings
from bessemer.train.rank_report import HostLoadProbe

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    """By this process's own clock, whatever else runs."""
    while time.process_time() < seconds:
        sum(range(1000))


def child(pipe: Any) -> None:
    spin(time.process_time() + 0.3)
    pipe.send("done")
    pipe.recv()


def test_work_of_children_is_our_own() -> None:
    before, (ours, theirs) = surroundings._own_seconds(), multiprocessing.Pipe()
    started = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    started.start()
    ours.recv()
    assert surroundings._own_seconds() - before >= 0.25
    ours.send("go")
    started.join()


def test_a_host_says_how_busy_others_are() -> None:
    found = HostLoadProbe(CPU)()
    assert found.others_busy is None or 0 <= found.others_busy <= 1
    assert found.retries is None and found.device_busy is None


def test_load_of_others_is_seen(monkeypatch: Any) -> None:
    """As if nothing of what keeps this machine busy were our own."""
    monkeypatch.setattr(surroundings, "_own_seconds", lambda: 0.0)
    around = HostLoadProbe(CPU)
    spin(time.process_time() + 0.3)
    assert (around().others_busy or 0.0) > 0.02


@pytest.mark.gpu
def test_a_gpu_tells_its_clock_and_memory() -> None:
    device = torch.device("cuda")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = HostLoadProbe(device)()
    assert found.clock is not None and 0 < found.clock <= 1 and found.device_busy is not None
    assert found.retries == 0 and found.others_bytes is not None
