"""Reinforcement learning teaches: right answers to held-out additions become the rule (a run of the benchmark)."""

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["grpo", "rloo", "ppo"])
def test_held_out_additions_become_right(tmp_path: Path, method: str) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "rl_addition.py"
    spec = importlib.util.spec_from_file_location("rl_addition", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = benchmark.one_run(tmp_path / "run", {"method": method, "seed": 3})
    assert result["outcome"] == "finished" and result["alarms"] == []
    assert 0.15 < result["start"] < 0.45
    assert result["end"] > 0.8
