"""Real runs of the labelled library, written in its eight formats and read back: the same finding in each."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("diagnose")


@pytest.mark.slow
def test_a_corrupt_batch_in_every_format(library: ModuleType) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = library.make_run("corrupt batches", 0)
    finally:
        torch.set_num_threads(threads)
    assert len(library.WRITERS) == 8
    steps = set()
    for format in library.WRITERS:
        (finding, *_) = library.judge_in_format(run, format)
        assert finding.rule == "bad_batch" and finding.severity == "warning", format
        steps.add(finding.step)
    worst = max(range(len(run.records) // 4, len(run.records)), key=lambda i: run.records[i]["loss"])
    assert all(step in (worst, worst + 1) for step in steps)  # Lightning counts from 0
