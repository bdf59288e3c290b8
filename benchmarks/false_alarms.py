"""False alarms of the guard on clean data: live runs of small models, naturally noisy ones among them, and recorded or
synthetic traces through the same judge and detectors.

    python benchmarks/false_alarms.py --steps 300000 --jobs 2 --save
    python benchmarks/false_alarms.py --trace FILE.npz ...     arrays `loss` and `norm`, one value a step

A false alarm is a veto, a convicted document, a rollback, a window that gave way, or an alarm above a note, in a run
where nothing was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# name: (rows, context, learning rate, warm-up, width, layers, share of the steps)
CONFIGURATIONS: dict[str, tuple[int, int, float, str, int, int, float]] = {
    "usual": (8, 32, 3e-3, "2%", 32, 1, 0.35),
    "small batch": (2, 32, 1e-3, "2%", 32, 1, 0.25),
    "one row": (1, 64, 1e-3, "2%", 32, 1, 0.1),
    "high learning rate": (8, 32, 1.5e-2, "2%", 32, 1, 0.15),
    "long warm-up": (8, 32, 3e-3, "30%", 32, 1, 0.1),
    "two layers": (8, 64, 3e-3, "2%", 64, 2, 0.05),
}
SIGNS = ("veto", "exclude", "rollback", "guard_gave_way", "guard_reopened", "hang")


def spec_of(name: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    rows, context, lr, warmup, width, layers, _ = CONFIGURATIONS[name]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [str(path) for path in sorted(stdlib.glob("*.py"))] + [str(stdlib / "test")]
    return {
        "name": f"{name.replace(' ', '-')}-{seed}", "runs": str(folder), "seed": seed,
        "model": {"width": width, "layers": layers, "heads": 2}, "tokenizer": {"vocab": 512},
        "data": {"context": context, "sources": {"code": {"path": files, "format": "source"}}},
        "budget": {"steps": steps, "batch": rows * context}, "optimizer": {"lr": lr}, "schedule": {"warmup": warmup},
        "precision": "fp32", "parallel": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 10_000}, "evaluate": {"every": 10_000, "tokens": "16K"},
    }  # fmt: skip


def live(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run in a process of its own; what its events say."""
    from bessemer.run.directory import Run

    path = folder / f"{spec['name']}.json"
    path.write_text(json.dumps(spec))
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bessemer", "train", str(path), "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    run = Run(Path(spec["runs"]) / spec["name"])
    if done.returncode:
        raise SystemExit(f"{spec['name']}: {done.stderr[-500:]}{done.stdout[-500:]}")
    events = list(run.events())
    alarms = [event for event in events if event["kind"] == "alarm"]
    loud = [event for event in alarms if event["severity"] != "note"]
    signs = [event for event in events if event["kind"] in SIGNS]
    return {
        "run": spec["name"], "steps": sum(1 for _ in run.metrics()), "seconds": round(time.monotonic() - began, 1),
        "false_alarms": len(signs) + len(loud),
        "what": [f"{e['kind']} {e.get('alarm', '')} step {e.get('step')}: {e.get('reason', '')}" for e in signs + loud],
        "notes": sorted({event["alarm"] for event in alarms if event["severity"] == "note"}),
    }  # fmt: skip


def trace(path: str) -> dict[str, Any]:
    """A recorded curve through the judge and the detectors."""
    import numpy as np
    import torch

    from bessemer.guard.detectors import Detectors
    from bessemer.guard.judge import REASONS, Judge
    from bessemer.spec.guard import GuardSpec

    torch.set_num_threads(1)
    found = np.load(path)
    judge = Judge(GuardSpec(), torch.device("cpu"))
    losses, norms = found["loss"].astype(np.float32), found["norm"].astype(np.float32)
    watch, what = Detectors(GuardSpec(), None, len(losses)), []
    for step, (loss, norm) in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        code = int(judge.judge(torch.tensor(loss), torch.tensor(norm)).read()["code"])
        record = {
            "step": step, "loss": loss, "grad_norm": norm, "lr": 1e-3, "veto": REASONS.get(code), "tokens_per_s": 1.0,
            "step_s": 1.0, "data_wait_s": 0.0, "memory_bytes": 0, "accuracy": math.nan, "clipped": False, "mfu": 0.0,
        }  # fmt: skip
        what += [f"veto step {step}"] * bool(code)
        what += [f"{alarm.kind} step {step}" for alarm in watch.step(record) if alarm.severity != "note"]
    return {"trace": Path(path).name, "steps": len(losses), "false_alarms": len(what), "what": what}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300_000, help="live steps in all")
    parser.add_argument("--length", type=int, default=20_000, help="steps of one run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trace", nargs="*", default=[])
    parser.add_argument("--out", help="write the result here")
    options = parser.parse_args()
    result: dict[str, Any] = {"command": " ".join(["python", "benchmarks/false_alarms.py", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        specs = []
        for name, settings in CONFIGURATIONS.items():
            steps = int(options.steps * settings[-1])
            for seed in range(-(-steps // options.length) if steps else 0):
                specs.append(spec_of(name, folder, min(options.length, steps - seed * options.length), seed))
        if specs:
            live({**specs[0], "name": "first", "budget": {"steps": 2, "batch": specs[0]["budget"]["batch"]}}, folder)
        with ThreadPoolExecutor(max_workers=options.jobs) as pool:
            result["live"] = list(pool.map(lambda spec: live(spec, folder), specs))
    result["traces"] = [trace(path) for path in options.trace]
    for part in ("live", "traces"):
        steps, alarms = (sum(entry[key] for entry in result[part]) for key in ("steps", "false_alarms"))
        result[f"{part}_steps"], result[f"{part}_false_alarms"] = steps, alarms
        print(f"{part}: {alarms} false alarms in {steps:,} steps")
        for entry in result[part]:
            for line in entry["what"]:
                print(f"  {entry.get('run', entry.get('trace'))}: {line}")
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
