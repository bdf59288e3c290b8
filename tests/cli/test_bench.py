"""`bessemer bench` as a user meets it; what it measures is stood in for, but for one call in full."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from bessemer.bench import ceilings
from bessemer.cli.bench import bench
from bessemer.errors import UserError
from bessemer.plan.hardware import CeilingReading, Ceilings
from bessemer.train.device import bench_file, stored_ceilings

CPU = torch.device("cpu")
FOUND = Ceilings("cpu", "x", 1, "2026-11-16T09:00:00+00:00", {}, (CeilingReading("copy", "1 MiB", 5e9, "B/s"),))


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(bench)
    return lambda *arguments: CliRunner().invoke(app, ["--device", "cpu", *arguments])


@pytest.fixture
def measured(monkeypatch):
    def stand_in(device, folder, quick=False, tell=lambda line: None):
        tell(FOUND.line(FOUND.readings[0]))
        return FOUND

    monkeypatch.setattr(ceilings, "measure_ceilings", stand_in)


@pytest.mark.parametrize(
    ("arguments", "kept"), [((), True), (("--no-save",), False), (("--quick",), False), (("--quick", "--save"), True)]
)
def test_numbers_are_printed_and_kept(call, measured, arguments, kept):
    said = call(*arguments)
    assert said.exit_code == 0 and "copy" in said.output and "5 GB/s" in said.output
    assert stored_ceilings(CPU) == (FOUND if kept else None)
    assert (str(bench_file(CPU)) in said.output.replace("\n", "")) == kept


def test_as_json(call, measured):
    said = call("--json")
    assert Ceilings.from_json(said.output) == FOUND == stored_ceilings(CPU)


def test_a_device_that_does_not_exist(call, measured):
    said = call("--device", "tpu")
    assert isinstance(said.exception, UserError) and str(said.exception) == "--device tpu: write auto, cpu, cuda or mps"


@pytest.mark.slow
def test_in_full(call):
    said = call("--quick", "--json", "--folder", "runs")
    keys = {reading["key"] for reading in json.loads(said.output)["readings"] if reading["rate"]}
    assert {"matmul_fp32", "attention_forward_64", "attention_both_128", "copy", "disk_write", "disk_read"} <= keys
    assert not Path("runs").exists()
