"""A sweep of real runs, killed with SIGKILL while a trial trains."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.session.conftest import spec_data, write_corpus

from bessemer.run.directory import Run
from bessemer.sweep.record import Trials


def command(spec: Path) -> list[str]:
    return [sys.executable, "-m", "bessemer", "sweep", str(spec), "--json"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_killed_while_it_trains_gives_the_same_table_and_best_spec(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    ranges = {"optimizer.lr": {"min": 1e-3, "max": 3e-2, "log": True}, "schedule.kind": ["cosine", "wsd"]}
    corpus = write_corpus(tmp_path / "words.jsonl")

    def spec(name: str) -> Path:
        data = spec_data(name, corpus, tmp_path / "runs", budget={"steps": 120})
        data["sweep"] = {"strategy": "random", "trials": 2, "parameters": ranges}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    broken = spec("broken")
    child = subprocess.Popen(command(broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, give_up = Run(tmp_path / "runs" / "broken" / "trial-002"), time.monotonic() + 600
    try:
        while not (run.steps_path.exists() and len(list(run.metrics())) > 20):
            assert child.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    [begun] = Trials.read(tmp_path / "runs" / "broken").begun
    assert begun.name == "trial-002"
    assert len(list(run.metrics())) < 120
    while run.state == "running":  # the trial ends with its parent
        assert time.monotonic() < give_up
        time.sleep(0.05)

    tables: dict[str, Any] = {}
    for name in ("broken", "unbroken"):
        printed = subprocess.run(command(spec(name)), capture_output=True, text=True, check=True).stdout
        tables[name] = json.loads(printed)
    assert tables["broken"]["trials"] == tables["unbroken"]["trials"]
    assert tables["broken"]["best"] == tables["unbroken"]["best"]
    assert len(list(run.metrics())) == 120
