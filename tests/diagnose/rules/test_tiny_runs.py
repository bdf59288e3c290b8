"""Real runs of the labelled library, written in its eight formats and read back: the same finding in each."""

import importlib
import json
import sys
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


def test_parts_are_trained_once(
    library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part trains its share, and the call without a part only judges."""
    monkeypatch.setattr(library, "FAULTS", {"corrupt batches": library.FAULTS["corrupt batches"]})
    seeds = ["--tuned", "0:1", "--held-out", "9:9", "--healthy", "3:4", "--keep", str(tmp_path)]
    for part in ("1/2", "2/2"):
        monkeypatch.setattr(sys, "argv", ["diagnose.py", *seeds, "--part", part])
        library.main()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert kept.keys() == {"corrupt_batches-0.json", "healthy-3.json"}
    assert capsys.readouterr().out.count("1 runs of part") == 2
    monkeypatch.setattr(library, "make_run", lambda *_: pytest.fail("a kept run is trained again"))
    monkeypatch.setattr(sys, "argv", ["diagnose.py", *seeds])
    library.main()
    result = json.loads(capsys.readouterr().out)
    assert (result["tuned"]["runs"], result["held_out"]["runs"], result["healthy"]["runs"]) == (1, 0, 1)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == kept
