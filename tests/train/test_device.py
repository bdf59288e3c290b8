"""The device that is chosen, what is said of it, and rates counted with a clock of our own."""

import os
import sys

import pytest
import torch

from bessemer.errors import UserError
from bessemer.plan.hardware import CeilingReading, Ceilings, store_ceilings
from bessemer.spec.schema import ParallelSpec
from bessemer.train import device as device_module
from bessemer.train import speed
from bessemer.train.compile import compute_in
from bessemer.train.device import (
    bench_file,
    matmul_rate,
    measure_machine,
    median_s,
    memory_in_use,
    pick_device,
    stored_ceilings,
)
from bessemer.train.speed import random_batch, training_rate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_bench(monkeypatch, tmp_path):
    """Whatever this machine's user has measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


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


def test_the_rate_of_a_product_is_that_of_the_median(monkeypatch):
    # Looks: start and end of a first run, 0.1 s, after which five fit in the budget; then the end of each.
    monkeypatch.setattr(device_module.time, "perf_counter", Clock(0, 0.1, 0, 9.0, 0.125, 0.5, 0.0625, 0.25))
    assert matmul_rate(CPU, torch.float32, 64, budget_s=0.55) == 2 * 64**3 / 0.25


@pytest.mark.parametrize(("budget_s", "count", "runs"), [(0.0, None, 3), (1e9, None, 200), (1e9, 7, 7)])
def test_a_run_is_repeated_three_times_at_least_and_two_hundred_at_most(budget_s, count, runs):
    made = []
    median_s(lambda: made.append(1), CPU, budget_s, count)
    assert len(made) == 2 + runs


def test_what_bench_kept_is_taken_instead_of_the_probe(monkeypatch):
    monkeypatch.setattr(device_module, "matmul_rate", lambda *_, **__: 1.0)
    assert stored_ceilings(CPU) is None and measure_machine(CPU).source == "measured at start"
    readings = [
        CeilingReading("matmul_fp32", "a", 5e9, "FLOP/s"), CeilingReading("matmul_fp32", "b", 7e9, "FLOP/s"),
        CeilingReading("matmul_fp8", "", None, "FLOP/s", "no"), CeilingReading("copy", "a", 3e9, "B/s"),
    ]  # fmt: skip
    kept = Ceilings("cpu", "x", 1, "2026-11-16T09:00:00+00:00", {}, tuple(readings))
    store_ceilings(kept, bench_file(CPU))
    assert stored_ceilings(CPU) == kept
    machine = measure_machine(CPU)
    assert machine.matmul == {"fp32": 7e9, "bf16": 0.0}
    assert machine.source == "measured on 2026-11-16 by bessemer bench"
    assert machine.peak("bf16") == (7e9, "fp32 matmul of this machine, measured on 2026-11-16 by bessemer bench")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # a CPU with other threads is another machine
    assert measure_machine(CPU).matmul == {"fp32": 1.0, "bf16": 1.0}


@pytest.mark.parametrize("text", ["", "{", "{}", '{"readings": 5}', '{"readings": [{"colour": 1}]}', "[]"])
def test_a_damaged_file_of_bench_is_told_of_and_keeps_no_run_from_starting(text):
    store_ceilings(Ceilings("cpu", "x", 1, "", {}), bench_file(CPU))
    bench_file(CPU).write_text(text)
    with pytest.warns(UserWarning, match="run bessemer bench again"):
        assert measure_machine(CPU).source == "measured at start"


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
    return measure_machine(CPU).matmul, asked


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
    measure_machine(CPU)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "fp32\nafter\n"
    assert not opened or len(os.listdir("/proc/self/fd")) == opened


def test_facts_of_the_machine():
    machine = measure_machine(CPU)
    assert machine.device == "cpu" and machine.threads == torch.get_num_threads()
    assert machine.matmul["fp32"] > 0 and machine.memory_bytes > 1e8
    before = memory_in_use(CPU)
    ballast = torch.ones(100_000_000)  # more than a long-lived process may have free
    assert memory_in_use(CPU) - before > 0.5 * ballast.numel() * 4


def test_precision_is_that_of_products_inside_the_block():
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    with compute_in("bf16", CPU):
        assert (a @ b).dtype == torch.bfloat16
    with compute_in("fp32", CPU):
        assert (a @ b).dtype == torch.float32
    assert (a @ b).dtype == torch.float32
