"""What is measured: the right work over the right time, on inputs that are random, and words where it cannot be."""

import os
import time
from pathlib import Path

import pytest
import torch

from bessemer.bench import ceilings
from bessemer.bench.ceilings import (
    all_reduce_rate,
    make_attention,
    make_matmul,
    measure_attention,
    measure_ceilings,
    measure_copies,
    measure_disk,
    measure_matmul,
    measure_rate,
)
from bessemer.model.attention import KERNELS
from bessemer.plan.hardware import CeilingReading

CPU = torch.device("cpu")


@pytest.fixture
def one_second(monkeypatch):
    """Everything takes a second, so that rates are the work itself; the last run's result is kept."""
    results = []

    def taken(run, device, budget_s=0.2, count=None):
        results.append(run())
        return 1.0

    monkeypatch.setattr(ceilings, "median_s", taken)
    monkeypatch.setattr(ceilings, "CPU_SHAPES", ((24, 16, 40), (8, 8, 8)))
    monkeypatch.setattr(ceilings, "HEADS", ((2, 8), (3, 16)))
    monkeypatch.setattr(ceilings, "MOVED", 1 << 10)
    return results


def test_flops_of_a_product(one_second):
    found = list(measure_matmul(CPU, 0.1))
    assert [reading.key for reading in found] == [f"matmul_{p}" for p in ("fp32", "bf16", "fp16") for _ in range(2)]
    assert found[0] == CeilingReading("matmul_fp32", "24x16x40", 2.0 * 24 * 16 * 40, "FLOP/s")
    assert one_second[0].shape == (24, 40) and one_second[0].dtype == torch.float32
    assert {x.dtype for x in one_second} == {torch.float32, torch.bfloat16, torch.float16}
    assert all(float(x.float().std()) > 0.5 for x in one_second)  # of random numbers
    assert len(list(measure_matmul(CPU, 0.1, quick=True))) == 3


def test_a_type_that_is_hopeless_on_a_cpu_is_given_up_after_a_small_product(monkeypatch):
    asked = []

    def taken(run, device, budget_s=0.2, count=None):
        made = run()
        asked.append((made.dtype, made.shape[0]))
        return 1.0 if made.dtype == torch.float32 else 6.0

    monkeypatch.setattr(ceilings, "median_s", taken)
    monkeypatch.setattr(ceilings, "CPU_SHAPES", ((64, 64, 64),))
    found = list(measure_matmul(CPU, 0.1))
    assert [(reading.key, reading.size) for reading in found[1:]] == [
        ("matmul_bf16", "256x256x256"), ("matmul_fp16", "256x256x256"),
    ]  # fmt: skip
    assert found[1].rate == 2 * 256**3 / 6 and found[1].note == "too slow on this CPU for larger sizes"
    assert (torch.bfloat16, 64) not in asked


def test_flops_of_attention(one_second):
    found = list(measure_attention(CPU, 0.1))
    assert [(reading.key, reading.note) for reading in found] == [
        (f"attention_{what}_{size}", "sdpa") for size in (8, 16) for what in ("forward", "both")
    ]
    forward = 4 * 1 * 2 * 1024 * 1024 * 8 / 2  # two products over half of the square
    assert found[0].rate == forward and found[1].rate == 3.5 * forward
    assert found[2].rate == 3 * forward and found[2].size == "1x1024x3x16"
    assert one_second[0].shape == (1, 1024, 2, 8) and not one_second[0].requires_grad
    assert [x.shape for x in one_second[1]] == [(1, 1024, 2, 8)] * 3  # the gradients of q, k and v


def test_attention_is_causal():
    torch.manual_seed(0)
    run = make_attention(CPU, torch.float32, (1, 16, 2, 8), "sdpa", backward=False)
    torch.manual_seed(0)
    value = [torch.randn(1, 16, 2, 8) for _ in range(4)][2]
    assert torch.allclose(run()[:, 0], value[:, 0], atol=1e-6)  # the first position sees itself alone


def test_bytes_of_a_copy(one_second):
    found = list(measure_copies(CPU, 0.1))
    assert found == [CeilingReading("copy", "0 MiB", 2.0 * (1 << 10), "B/s", "read and written")]
    assert one_second[0].nbytes == 1 << 10 and float(one_second[0].std()) > 0.2


def test_what_a_device_cannot_do_is_said(capfd):
    def broken():
        os.write(2, b"a native trace\n")
        raise RuntimeError("no such kernel\nand a long trace")

    assert measure_rate("copy", "1", "B/s", 1.0, broken, CPU, 0.1, "flash") == CeilingReading(
        "copy", "1", None, "B/s", "flash: no such kernel"
    )
    assert capfd.readouterr().err == ""


def test_a_product_in_fp8_multiplies():
    torch.manual_seed(0)
    run = make_matmul(CPU, "fp8", 32, 64, 48)
    torch.manual_seed(0)
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    assert float((run().float() - x @ w.t()).norm() / (x @ w.t()).norm()) < 0.05


def test_the_disk_is_measured_and_left_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "BLOCK", 1 << 16)
    write, read = measure_disk(tmp_path / "runs" / "not yet there", quick=True)
    assert (write.key, read.key) == ("disk_write", "disk_read") and write.size == read.size
    assert write.rate > 0 and read.rate > 0 and str(tmp_path) in write.note and "cache" in read.note
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_slow_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "BLOCK", 1 << 12)
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    write, _ = measure_disk(tmp_path)
    # Looks, each a second after the last: the start, one before each portion, the end.
    assert write.rate == (3 - 1) * 4 * (1 << 12) / 4


def test_a_file_system_without_direct_reads(monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 5000)
    opened = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    rate, how = ceilings.read_rate(str(tmp_path / "file"))
    assert rate > 0 and how == "may be from the system's cache"


def test_a_folder_that_cannot_be_written_is_a_row_of_the_table(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ceilings.tempfile, "NamedTemporaryFile", refuse)
    assert list(measure_disk(tmp_path)) == [
        CeilingReading("disk_write", "", None, "B/s", f"{tmp_path}: No space left on device")
    ]


def test_everything_on_a_cpu(one_second, monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "BLOCK", 1 << 16)
    lines = []
    found = measure_ceilings(CPU, tmp_path, quick=True, tell=lines.append)
    assert lines == [found.line(reading) for reading in found.readings]
    assert {"matmul_fp32", "attention_both_8", "copy", "disk_write", "disk_read"} <= found.best().keys()
    assert found.count == torch.get_num_threads() and "torch" in found.versions and "T" in found.date
    assert not any(reading.key == "all_reduce" for reading in found.readings)


@pytest.fixture
def gpu(monkeypatch, one_second):
    """A GPU as far as rows of the table go, with the capability that is asked for."""
    for name in ("make_matmul", "make_attention", "make_copy"):
        monkeypatch.setattr(ceilings, name, lambda *_: lambda: None)

    def with_capability(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return with_capability


def test_the_rows_of_a_gpu(gpu):
    hopper = gpu(9, 0)
    found = list(measure_matmul(hopper, 0.1))
    assert [reading.key for reading in found[::4]] == [f"matmul_{p}" for p in ("fp32", "tf32", "bf16", "fp16", "fp8")]
    assert [reading.size for reading in found[:4]] == ["x".join(map(str, shape)) for shape in ceilings.GPU_SHAPES]
    assert {reading.note for reading in measure_attention(hopper, 0.1)} == set(KERNELS)
    assert [reading.key for reading in measure_copies(hopper, 0.1)] == [
        "copy", "to_device_pinned", "to_device_unpinned", "from_device_pinned", "from_device_unpinned",
    ]  # fmt: skip
    older = {reading.key: reading for reading in measure_matmul(gpu(7, 5), 0.1)}
    assert older["matmul_tf32"].note == "needs compute capability 8.0" and older["matmul_fp8"].rate is None
    assert older["matmul_fp16"].rate == 2.0 * 16384 * 4096 * 14336


def test_links_are_measured_where_there_is_more_than_one_gpu(monkeypatch, gpu):
    monkeypatch.setattr(ceilings, "all_reduce_rate", lambda backend, count, size: 5.0 * count)
    device = gpu(9, 0)
    (alone,), (four,) = ceilings.measure_links(device, 1), ceilings.measure_links(device, 4)
    assert alone.rate is None and "one GPU" in alone.note and four.rate == 20.0

    def broken(*_):
        raise RuntimeError("link down")

    monkeypatch.setattr(ceilings, "all_reduce_rate", broken)
    (down,) = ceilings.measure_links(device, 4)
    assert down.rate is None and down.note == "link down" and not list(ceilings.measure_links(CPU, 4))


@pytest.mark.slow
@pytest.mark.distributed
def test_an_exchange_between_processes():
    assert all_reduce_rate("gloo", 2, 1 << 16) > 0
    with pytest.raises(RuntimeError, match="no-such-backend"):
        all_reduce_rate("no-such-backend", 2, 1 << 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path):
    device = torch.device("cuda")
    found = measure_ceilings(device, tmp_path, quick=True, tell=print)
    best = found.best()
    assert best["matmul_bf16"] > best["matmul_fp32"] and best["to_device_pinned"] < best["copy"]
    if torch.cuda.get_device_capability() >= (8, 9):
        assert best["matmul_fp8"] > best["matmul_bf16"]
    notes = [reading.note for reading in found.readings if reading.key == "attention_both_64" and reading.rate]
    assert set(notes) <= set(KERNELS) and "flash" in notes
    assert any(reading.key == "all_reduce" for reading in found.readings)
    # The clock of the device and that of the host agree on something long.
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    spent = ceilings.median_s(lambda: [x @ x for _ in range(20)], device, count=5)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
    assert spent == pytest.approx(time.perf_counter() - began, rel=0.2)
