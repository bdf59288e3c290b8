"""What do the readings of the machine cost a run?

    python benchmarks/readings.py --save

Reads what the thread of a run reads and writes, a few hundred times, in processor time of the thread: other work on the
machine does not change it. A run does this every five seconds, so the share of a step is at most that time over five
seconds, where the thread takes it from the training thread. With an NVIDIA GPU and nvidia-ml-py it is read too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from bessemer.run.directory import RunWriter
from bessemer.train.job import Recorder
from bessemer.train.readings import INTERVAL_S, SystemReadings, open_gpu


class NoView:
    """Shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-readings.json")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as name, RunWriter(Path(name) / "run") as run:
        readings = SystemReadings(Recorder(run, NoView(), 1, 1.0), device, ["host"], main=True)
        cpu_s = []
        for _ in range(arguments.rounds):
            began_s = time.thread_time()
            readings.read()
            cpu_s.append(time.thread_time() - began_s)
        bytes_a_reading = run.system_path.stat().st_size / arguments.rounds
    median_s, high_s = statistics.median(cpu_s), statistics.quantiles(cpu_s, n=100)[98]
    report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {device.type}, GPU read: {bool(open_gpu(device))}, "
        f"load {os.getloadavg()[0]:.1f} by other work",
        "versions": {"torch": torch.__version__, "psutil": psutil.__version__},
        "rounds": arguments.rounds, "cpu_s": {"median": round(median_s, 6), "99 %": round(high_s, 6)},
        "interval_s": INTERVAL_S, "share_of_a_step": round(median_s / INTERVAL_S, 6),
        "bytes_a_reading": round(bytes_a_reading),
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{report['date']}-readings.json"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
