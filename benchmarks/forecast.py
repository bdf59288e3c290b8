"""How near a forecast at 30 % of a run comes to its final loss, on tiny runs that nothing was fitted to.

Ten runs of two schedules (cosine to 10 %, WSD with a decay of 20 %) train models of 15K to 50K parameters on Python
source, with other widths, learning rates, lengths and batches. Each is cut at 30 % of its steps and forecast from there
with its schedule; the error is that of the mean loss of the last 32 steps. The prior of the annealing term was chosen
on the runs of `--tune`, which are others.

    python benchmarks/forecast.py --write benchmarks/results/DATE-forecast.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

SEEN = 0.3
AIM = 0.02
FOLDERS = ("asyncio", "email", "http", "json", "multiprocessing", "unittest", "xml")  # of Python's library
# width, layers, peak rate, steps, tokens of a step, seed; about 20 tokens a parameter
HELD_OUT = [
    (24, 1, 8e-3, 900, 512, 1), (32, 1, 5e-3, 1000, 640, 2), (16, 2, 1e-2, 900, 512, 3), (32, 2, 4e-3, 1100, 768, 4),
    (24, 2, 1.2e-2, 1000, 640, 5),
]  # fmt: skip
TUNE = [(32, 1, 6e-3, 900, 640, 11)]
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"kind": "cosine", "warmup": "5%", "floor": "10%"},
    "wsd": {"kind": "wsd", "warmup": "5%", "decay": "20%", "floor": "0%"},
}


def train_run(folder: Path, setting: tuple[Any, ...], schedule: str) -> Path:
    """The folder of a finished run."""
    from bessemer.session.session import run_folder, train
    from bessemer.spec.schema import RunSpec

    width, layers, lr, steps, batch, seed = setting
    spec = RunSpec.model_validate(
        {
            "name": f"{schedule}-{seed}", "runs": str(folder), "seed": seed,
            "model": {"width": width, "layers": layers, "heads": width // 8},
            "tokenizer": {"vocab": 320, "sample": "2MB"},
            "data": {
                "sources": {"library": {"path": [sysconfig.get_paths()["stdlib"] + f"/{name}" for name in FOLDERS],
                                        "format": "source", "include": ["*.py"]}},
                "context": 64, "validation": 0.0,
            },
            "budget": {"steps": steps, "batch": batch}, "optimizer": {"lr": lr},
            "schedule": SCHEDULES[schedule], "precision": "fp32", "parallel": {"device": "cpu"},
            "checkpoint": {"every": 100_000, "keep_best": False},
        }
    )  # fmt: skip
    assert train(spec).kind == "finished"
    return run_folder(spec)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the other settings, on which the prior was chosen")
    parser.add_argument("--runs", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    folder = options.runs or Path(tempfile.mkdtemp(prefix="forecast-"))
    for setting in TUNE if options.tune else HELD_OUT:
        for schedule in SCHEDULES:
            began = time.monotonic()
            run = train_run(folder, setting, schedule)
            print(run.name, round(time.monotonic() - began, 1), "s", flush=True)


if __name__ == "__main__":
    main()
