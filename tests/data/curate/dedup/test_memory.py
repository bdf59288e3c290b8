"""The memory of resolving does not grow with the corpus."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "dedup.py"


def peak_mb(documents: int) -> float:
    command = [sys.executable, str(BENCHMARK), "--child", "stages", str(documents)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(json.loads(out.splitlines()[-1])["peak_rss_anon_mb"])


@pytest.mark.slow
def test_three_times_the_documents_take_the_same_memory() -> None:
    few, many = peak_mb(290_000), peak_mb(870_000)
    assert many < 1.1 * few
