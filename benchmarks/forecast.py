"""How near a forecast at 30 % of a run comes to its final loss, on tiny runs that nothing was fitted to.

Ten runs of two schedules (cosine to 10 %, WSD with a decay of 20 %) train models of 15K to 50K parameters on Python
source, with other widths, learning rates, lengths and batches. Each is cut at 30 % of its steps and forecast from there
with its schedule; the error is that of the mean loss of the last 32 steps. The prior of the annealing term was chosen
on the runs of `--tune`, which are others.

    python benchmarks/forecast.py --write benchmarks/results/DATE-forecast.json
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import platform
import statistics
import subprocess
import sysconfig
import tempfile
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


def judge(run_folder: Path) -> dict[str, Any]:
    """The forecast of a finished run at 30 %, beside how it ended."""
    from bessemer.plan.run_forecast import forecast_run
    from bessemer.run.directory import Run

    result = forecast_run(Run(run_folder), SEEN)
    now, final = result.forecast, result.final
    assert final is not None
    return {
        "run": result.run, "parameters": result.parameters, "tokens": round(result.tokens), "steps": result.total,
        "final": round(final, 4), "forecast": round(now.final, 4), "low": round(now.low, 4), "high": round(now.high, 4),
        "error": round(now.final / final - 1, 5), "inside": now.low <= final <= now.high,
    }  # fmt: skip


def judge_published(folder: Path) -> list[dict[str, Any]]:
    """The same for csv files of step, lr and loss (github.com/thu-yao-01-luo/MultiPowerLaw, loss_curve_repo): models of
    25M to 400M whose warm-up of 2,160 steps is not in them. Three numbers of the prior were fitted to these curves by
    their authors, to whole curves."""
    from bessemer.plan.forecast import forecast

    results = []
    for path in sorted(folder.rglob("*.csv")):
        rows = [tuple(map(float, line.split(","))) for line in path.read_text().splitlines()[1:]]
        steps, total, warmup = [int(row[0]) for row in rows], int(rows[-1][0]) + 1, 2160
        rates = [row[1] for row in rows]

        def rate(step: int, steps: list[int] = steps, rates: list[float] = rates) -> float:
            if step < steps[0]:
                return rates[0] * min(1.0, (step + 1) / 2160)
            i = min(bisect.bisect_right(steps, step) - 1, len(steps) - 2)
            share = (step - steps[i]) / (steps[i + 1] - steps[i])
            return rates[i] + share * (rates[i + 1] - rates[i])

        now = forecast([(int(r[0]), r[2]) for r in rows if r[0] < SEEN * total], rate, total, warmup)
        if now is None:
            continue  # too few points before 30 %
        final = statistics.fmean(row[2] for row in rows[-3:])
        results.append({
            "curve": "/".join(path.parts[-2:]), "final": round(final, 4), "forecast": round(now.final, 4),
            "error": round(now.final / final - 1, 5), "inside": now.low <= final <= now.high,
        })  # fmt: skip
    return results


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "curves": len(rows), "mean_error": round(statistics.fmean(errors), 5), "worst_error": max(errors),
        "within_2_percent": sum(error <= AIM for error in errors), "inside_interval": sum(row["inside"] for row in rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the other settings, on which the prior was chosen")
    parser.add_argument("--runs", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--published", type=Path, help="folder with published curves, forecast too")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    folder, rows = options.runs or Path(tempfile.mkdtemp(prefix="forecast-")), []
    for setting in TUNE if options.tune else HELD_OUT:
        for schedule in SCHEDULES:
            rows.append(judge(train_run(folder, setting, schedule)))
            print(rows[-1], flush=True)
    published = judge_published(options.published) if options.published else []
    result = {
        "command": f"python benchmarks/forecast.py{' --published FOLDER' if published else ''}",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread a run",
        "seen": SEEN, "aim": AIM, "held_out": summary(rows), "runs": rows,
        **({"published": summary(published), "published_curves": published} if published else {}),
    }  # fmt: skip
    print(json.dumps({key: result[key] for key in ("held_out", "published") if key in result}))
    if options.write:
        options.write.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
