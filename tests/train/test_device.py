"""The device that is chosen, what is said of it, and rates counted with a clock of our own."""

import os
import sys

import pytest
import torch

from bessemer.errors import UserError
from bessemer.spec.schema import ParallelSpec
from bessemer.train import device as device_module
from bessemer.train import speed
from bessemer.train.device import matmul_rate, measure, memory_in_use, pick_device
from bessemer.train.precision import compute_in
from bessemer.train.speed import random_batch, training_rate

CPU = torch.device("cpu")


def machine_with(monkeypatch, *kinds):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)


@pytest.mark.parametrize(
    ("present", "chosen"), [((), "cpu"), (("mps",), "mps"), (("cuda",), "cuda"), (("cuda", "mps"), "cuda")]
)
def test_auto_takes_the_best_that_is_there(monkeypatch, present, chosen):
    machine_with(monkeypatch, *present)
    assert pick_device(ParallelSpec()).type == chosen
    assert pick_device(ParallelSpec(device="cpu")).type == "cpu"


@pytest.mark.parametrize(("asked", "present", "here"), [("cuda", (), "cpu"), ("mps", ("cuda",), "cuda, cpu")])
def test_a_device_that_is_not_there_is_refused_with_what_is(monkeypatch, asked, present, here):
    machine_with(monkeypatch, *present)
    with pytest.raises(UserError) as error:
        pick_device(ParallelSpec(device=asked))
    message = str(error.value)
    assert message.startswith(f"parallel.device: {asked} is not available")
    assert f"(there is {here})" in message and message.endswith("write device: auto")


class Clock:
    """Each look at it takes a quarter of a second, unless told otherwise."""

    def __init__(self, *steps):
        self.now, self.steps = 0.0, list(steps)

    def __call__(self):
        self.now += self.steps.pop(0) if self.steps else 0.25
        return self.now


def test_the_rate_of_a_product_is_that_of_the_fastest(monkeypatch):
    # Looks: end, then start and stop of each product: 0.25, 0.125 and 0.5 s.
    monkeypatch.setattr(device_module.time, "perf_counter", Clock(0, 0, 0.25, 0, 0.125, 0, 0.5))
    assert matmul_rate(CPU, torch.float32, 64, budget_s=0.5) == 2 * 64**3 / 0.125


def test_the_rate_of_training_is_tokens_over_the_median_step(monkeypatch, shape):
    # Looks: start and end of each step; the first, of 9 s, is not counted.
    monkeypatch.setattr(speed.time, "perf_counter", Clock(0, 9.0, 0, 0.5, 0, 0.25, 0, 0.125, 0, 5.0))
    assert training_rate(shape, context=8, rows=3, precision="fp32", device=CPU, budget_s=1.0) == 24 / 0.375


def test_a_random_batch_is_shifted_by_one_and_reproduces():
    batch, again, other = random_batch(50, 3, 10), random_batch(50, 3, 10), random_batch(50, 3, 10, seed=1)
    assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all() and batch.count == 30
    assert (batch.tokens == again.tokens).all() and (batch.tokens != other.tokens).any()
    assert batch.single_document and batch.tokens.max() < 50


def rates_of(monkeypatch, bf16, small):
    """A machine whose fp32 rate is 100 and whose bf16 rate is as given, small products apart."""
    asked = []

    def rate(device, dtype, size, budget_s=0.2):
        asked.append((dtype, size))
        if dtype == torch.bfloat16 and isinstance(bf16, Exception):
            raise bf16
        return 100.0 if dtype == torch.float32 else small if size == 128 else bf16

    monkeypatch.setattr(device_module, "matmul_rate", rate)
    return measure(CPU).matmul, asked


def test_bf16_is_measured_in_full_only_where_it_is_not_hopeless(monkeypatch):
    matmul, asked = rates_of(monkeypatch, bf16=300.0, small=50.0)
    assert matmul == {"fp32": 100.0, "bf16": 300.0}
    matmul, asked = rates_of(monkeypatch, bf16=300.0, small=10.0)
    assert matmul == {"fp32": 100.0, "bf16": 10.0} and (torch.bfloat16, 512) not in asked
    matmul, _ = rates_of(monkeypatch, bf16=RuntimeError("no bf16 here"), small=0.0)
    assert matmul == {"fp32": 100.0, "bf16": 0.0}


def test_standard_error_is_back_after_the_probe(monkeypatch, capfd):
    def rate(device, dtype, size, budget_s=0.2):
        os.write(2, b"a long native stack trace\n" if dtype == torch.bfloat16 else b"fp32\n")
        return 1.0

    monkeypatch.setattr(device_module, "matmul_rate", rate)
    opened = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    measure(CPU)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "fp32\nafter\n"
    assert not opened or len(os.listdir("/proc/self/fd")) == opened


def test_facts_of_the_machine():
    machine = measure(CPU)
    assert machine.device == "cpu" and machine.threads == torch.get_num_threads()
    assert machine.matmul["fp32"] > 0 and machine.memory_bytes > 1e8
    before = memory_in_use(CPU)
    ballast = torch.ones(16_000_000)
    assert memory_in_use(CPU) - before > 0.5 * ballast.numel() * 4


def test_precision_is_that_of_products_inside_the_block():
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    with compute_in("bf16", CPU):
        assert (a @ b).dtype == torch.bfloat16
    with compute_in("fp32", CPU):
        assert (a @ b).dtype == torch.float32
    assert (a @ b).dtype == torch.float32
