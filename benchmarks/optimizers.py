"""Every optimizer on one small model and text: the training loss after equal steps at the best of three rates, and the
time of an update beside AdamW's.

A decoder of 37K parameters reads Python source for 200 steps with 10 steps of warm-up and a linear decay to zero. The
rates are a third, one and three times a usual one. So small and short a run ranks no optimizer for a long one: it shows
that each learns, at which rates, and what its step costs.

    python benchmarks/optimizers.py --write benchmarks/results/DATE-optimizers.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, WARMUP, LAST = 200, 10, 20
# Usual rates of each, for matrices of width 32.
RATES = {
    "adamw": 5e-3, "adam": 5e-3, "nadam": 5e-3, "radam": 5e-3, "adamax": 1e-2, "adagrad": 3e-2, "rmsprop": 3e-3,
    "sgd": 0.3, "lion": 1e-3, "adafactor": 3e-2, "muon": 1e-2, "lamb": 2e-2, "lars": 10.0, "sm3": 3e-2,
    "schedule_free": 1e-2, "soap": 5e-3, "ademamix": 5e-3, "mars": 5e-3,
}  # fmt: skip


def spec_of(name: str, folder: Path) -> Any:
    from bessemer.spec.schema import RunSpec

    library = [f"{sysconfig.get_paths()['stdlib']}/{part}" for part in ("asyncio", "email", "http", "json", "unittest")]
    source = {"path": library, "format": "source", "include": ["*.py"]}
    return RunSpec.model_validate({
        "name": name, "runs": str(folder), "model": {"width": 32, "layers": 2, "heads": 4},
        "tokenizer": {"vocab": 320, "sample": "2MB"},
        "data": {"sources": {"library": source}, "context": 64, "validation": 0.0},
        "budget": {"steps": STEPS, "batch": 1024}, "optimizer": {"name": name, "lr": 1e-3}, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1},
    })  # fmt: skip


def measure(name: str, rate: float, folder: Path) -> dict[str, Any]:
    from bessemer.diagnose.report import backward_step
    from bessemer.session.inspect import from_spec

    bench = from_spec(spec_of(name, folder))
    subject, losses, seconds = bench.subject(), list[float](), list[float]()
    for step in range(STEPS):
        losses.append(float(backward_step(subject, step)))
        began_s = time.perf_counter()
        bench.update(rate * min((step + 1) / WARMUP, 1 - step / STEPS))
        seconds.append(time.perf_counter() - began_s)
    update_ms = 1000 * statistics.median(seconds)
    return {
        "optimizer": name, "lr": rate, "loss": round(statistics.fmean(losses[-LAST:]), 4),
        "update_ms": round(update_ms, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=RATES, default=list(RATES))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    folder, runs = Path(tempfile.mkdtemp(prefix="optimizers-")), []
    for name in options.only:
        for factor in (1 / 3, 1, 3):
            runs.append(measure(name, RATES[name] * factor, folder))
            print(runs[-1], flush=True)
    best = {name: min((r for r in runs if r["optimizer"] == name), key=lambda r: r["loss"]) for name in options.only}
    result = {
        "command": "python benchmarks/optimizers.py",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread",
        "best": best, "runs": runs,
    }  # fmt: skip
    if options.write:
        options.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
