"""What the planner says a run takes on the card, beside peaks that `gpu/memory_peaks.py` and `gpu/compare.py` measured.

    python benchmarks/planner_memory.py                    the table of all measured peaks (part of make bench-planner)
    python benchmarks/planner_memory.py --collect FILE...  take peaks from result files into the table

Peaks are `torch.cuda.max_memory_allocated` in the first steps, without the guard's copies, which only take what is
free. Nothing is fitted to them but two counts: what torch keeps under fp8, and of the block under way.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

PEAKS = Path(__file__).parent / "data" / "planner" / "h200_peaks.csv"
FIELDS = ("model", "width", "layers", "heads", "kv_heads", "ffn", "vocab", "tied", "context", "rows", "precision",
          "settings", "peak_gib", "source")  # fmt: skip
MEAN, WORST = 0.04, 0.10  # bounds


def estimated_gib(row: dict[str, Any]) -> float:
    """By the configuration alone: settings are keys of a spec, KEY=VALUE with spaces between."""
    from bessemer.plan.cost_model.memory import Passes, estimate_memory
    from bessemer.spec.model import model_shape
    from bessemer.spec.schema import RunSpec

    said = dict(setting.split("=", 1) for setting in row["settings"].split())
    memory: dict[str, Any] = {
        key.removeprefix("memory."): value == "true" if value in ("true", "false") else value
        for key, value in said.items()
        if key.startswith("memory.")
    }
    optimizer, precision = said.get("optimizer.name", "adamw"), said.get("precision", row["precision"])
    if optimizer == "adamw" and precision in ("bf16", "fp8", "fp8_rowwise"):
        memory.setdefault("weights", "kahan")  # what a run decides by itself
    model = {key: int(row[key]) for key in ("width", "layers", "heads", "kv_heads", "ffn")}
    spec = RunSpec.model_validate(
        {
            "model": {**model, "tied": str(row["tied"]) == "True"}, "data": {"sources": {"random": "x"}},
            "optimizer": {"name": optimizer}, "memory": memory,
        }
    )  # fmt: skip
    how, rows, context = memory.get("activations", "none"), int(row["rows"]), int(row["context"])
    several = int(said.get("budget.batch", 0)) > rows * context
    passes = Passes(
        context, rows, precision, how if how.isalpha() else float(how), said.get("compile") != "off", "cuda", several,
    )  # fmt: skip
    return estimate_memory(spec, model_shape(spec.model, int(row["vocab"])), passes).total / 2**30


def read_peaks(path: Path = PEAKS) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return [row | {"peak_gib": float(row["peak_gib"])} for row in csv.DictReader(file)]


def collect(paths: list[Path]) -> None:
    """Add what the files have; a configuration that is measured again takes the place of the old one."""
    found = {_key(row): row for row in (read_peaks() if PEAKS.exists() else [])}
    for path in paths:
        for result in json.loads(path.read_text())["results"]:
            settings = result["settings"]
            if "error" in result or result["system"] != "bessemer" or "guard.copies=off" not in settings:
                continue
            if any(setting.startswith("parallel.") for setting in settings):
                continue  # another process's share, which `plan/cost_model/memory.py` estimates
            row = {"model": result["model"], **result["shape"], "precision": result["precision"],
                   "settings": " ".join(setting for setting in settings if setting != "guard.copies=off"),
                   "peak_gib": result["peak_gib"], "source": path.name}  # fmt: skip
            found[_key(row)] = row
    with PEAKS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found.values())
    print(f"{len(found)} peaks in {PEAKS}")


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[key]) for key in FIELDS[:-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.collect:
        return collect(options.collect)
    rows = read_peaks()
    errors = [estimated_gib(row) / row["peak_gib"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        what = f"{row['model']} {row['context']} x {row['rows']} {row['precision']} {row['settings']}"
        print(f"{row['peak_gib'] * (1 + error):7.1f} {row['peak_gib']:7.1f} GiB {error:+7.1%}  {what}")
    mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
    print(
        f"memory of {len(rows)} runs on an H200: off by {mean:.2%} on average (at most {MEAN:.0%}), worst {worst:+.1%}"
    )
    sys.exit(mean > MEAN or abs(worst) > WORST)


if __name__ == "__main__":
    main()
