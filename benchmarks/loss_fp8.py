"""The loss of the same run in two precisions: what fp8 costs in quality, beside bf16, on real text.

Every run is `bessemer train` in a fresh process, with the same seed and so the same batches in the same order; only the
precision differs. The first one named is the reference. Naming it twice shows how far two equal runs are apart, which
on a GPU is not zero: a difference below that means nothing.

    python benchmarks/loss_fp8.py --model 350M --steps 2000 --context 1024 --rows 32 --text FOLDER
        [--precisions bf16,bf16,fp8] [--micro 32] [--lr 6e-4] [--vocab 32K] [--device cuda] [--write FILE]

What is done so far is in the file after each run. `--at-once` starts all of them together, for losses alone: their
rates then say nothing, and the disk has to hold the last states of all.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

POINTS = 200  # of a written curve; each is the mean of the steps between
LAST = 0.05  # share of the steps whose mean is the final training loss


def make_spec(options: argparse.Namespace, precision: str, name: str) -> Any:
    from bessemer.spec.schema import RunSpec

    source = {"path": [str(Path(options.text).resolve())]} | ({"format": options.format} if options.format else {})
    budget = {"steps": options.steps, "batch": options.rows * options.context, "micro_batch": options.micro}
    return RunSpec.model_validate(
        {
            "name": name, "runs": options.folder, "model": options.model, "precision": precision,
            "tokenizer": {"vocab": options.vocab},
            "data": {"sources": {"text": source}, "context": options.context, "validation": 0.02},
            "budget": {key: value for key, value in budget.items() if value},
            "optimizer": {"lr": options.lr} if options.lr else {},
            "parallel": {"device": options.device},
            "evaluate": {"every": max(1, options.steps // 10)},
            "checkpoint": {"every": options.steps + 1, "keep_best": False},
            "guard": {"copies": "off"},  # runs that share a card would take the room from each other
        }
    )  # fmt: skip


def prepare(options: argparse.Namespace) -> None:
    """Tokens first, once for all runs."""
    from bessemer.plan.decision import Plan
    from bessemer.session.data import prepare_data

    prepare_data(make_spec(options, "bf16", "data"), Plan())


def run_one(options: argparse.Namespace, precision: str, name: str) -> dict[str, Any]:
    """Train, and read the run's own records."""
    from bessemer.run.directory import Run
    from bessemer.session.session import Session, run_folder

    spec = make_spec(options, precision, name)
    outcome = Session(spec).train()
    run = Run.existing(run_folder(spec))
    shutil.rmtree(run.checkpoints)  # the last state, which nobody reads: 14 GB at 1B
    records, validations = list(run.metrics()), list(run.validations())
    losses = [float(record["loss"]) for record in records]
    last = losses[-max(1, round(LAST * len(losses))) :]
    width = -(-len(losses) // POINTS)
    middle = [record["tokens_per_s"] for record in records[len(records) // 2 :]]
    return {
        "precision": precision, "outcome": outcome.kind, "steps": len(losses), "tokens": records[-1]["tokens"],
        "train_loss": sum(last) / len(last), "validation_loss": validations[-1]["loss"],
        "vetoes": sum(record["veto"] is not None for record in records),
        "tokens_per_s": sorted(middle)[len(middle) // 2], "memory_bytes": max(r["memory_bytes"] for r in records),
        "curve": [
            [start, round(sum(part) / len(part), 5)]
            for start in range(0, len(losses), width)
            for part in [losses[start : start + width]]
        ],
        "validations": [[one["step"], round(one["loss"], 5)] for one in validations],
    }  # fmt: skip


def machine() -> dict[str, Any]:
    import torch

    git = shutil.which("git")
    commit = subprocess.run([git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout if git else ""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit.strip(), "device": name, "torch": torch.__version__}


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each run after the first: how much higher its losses are than the first one's, as a share."""
    first = runs[0]
    return [
        {"precision": run["precision"]}
        | {key: round(run[key] / first[key] - 1, 6) for key in ("train_loss", "validation_loss")}
        for run in runs[1:]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="125M")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32, help="sequences in a step")
    parser.add_argument("--micro", type=int, default=0, help="sequences in a pass; the planner's choice if not given")
    parser.add_argument("--text", required=True, help="folder of text")
    parser.add_argument("--format", default="", help="of the text where its names do not say: source, jsonl, ...")
    parser.add_argument("--precisions", default="bf16,fp8")
    parser.add_argument("--vocab", default="auto")
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", default="", help="for runs and data; a temporary one if not given")
    parser.add_argument("--write", default=f"benchmarks/results/{time.strftime('%Y-%m-%d')}-fp8-loss.json")
    parser.add_argument("--at-once", action="store_true", help="all runs together")
    parser.add_argument("--only", nargs=2, metavar=("PRECISION", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = options.folder or tempfile.mkdtemp(prefix="loss-fp8-")
    if options.only:
        (Path(options.folder) / f"{options.only[1]}.json").write_text(json.dumps(run_one(options, *options.only)))
        return
    result: dict[str, Any] = {"machine": machine(), "command": " ".join(["python", *sys.argv]), "runs": []}
    prepare(options)
    precisions, started = options.precisions.split(","), list[subprocess.Popen[bytes]]()
    for i, precision in enumerate(precisions):
        name = f"{i}-{precision}"
        for j, other in enumerate(precisions):
            if j == len(started) and (options.at_once or j == i):
                only = ["--folder", options.folder, "--only", other, f"{j}-{other}"]
                started.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *only]))
        if started[i].wait():
            sys.exit(f"{precision} failed")
        result["runs"].append(json.loads((Path(options.folder) / f"{name}.json").read_text()))
        result["above_first"] = compare(result["runs"])
        Path(options.write).parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"\[[-\d.e,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(result, indent=1))
        Path(options.write).write_text(text + "\n")
        told = {key: value for key, value in result["runs"][-1].items() if not isinstance(value, list)}
        print(json.dumps({**told, "above_first": result["above_first"][-1:]}), flush=True)


if __name__ == "__main__":
    main()
