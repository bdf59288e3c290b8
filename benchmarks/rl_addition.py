"""Reinforcement learning on additions: exact match on held-out questions after SFT and after RL, over three seeds.

A character model (0.15M parameters) is fine-tuned on additions of two numbers below 50, "07+35=" to "42", until it
answers about 30 % of the held-out questions right. Then it is trained with the reward "the answer is right". A tenth of
the 2,500 questions is held out from both. Accuracy is that of the most likely answer. One run takes one thread:

    python benchmarks/rl_addition.py --method grpo --seed 0 --out grpo-0.json
    python benchmarks/rl_addition.py --all --jobs 2 --out benchmarks/results/DATE-rl-addition.json

`--all` runs the three methods with three seeds each, `--jobs` at a time, each pinned to two cores of its own. With
`--grid FILE` it runs the settings of a JSON file instead: [{"method": "grpo", "seed": 0, "lr": 1e-3}, ...].
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import torch

from bessemer.align.prompts import Prompt, hold_out, read_prompts
from bessemer.model.generate import Sampling
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.data import SourceSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.answers import AnswerSettings, answer_all
from bessemer.train.trained import load_model

MODEL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 256, "positions": "learned", "max_positions": 64}
BELOW = 50  # the numbers that are added
SFT: dict[str, Any] = {"steps": 500, "lr": 2e-3}
SFT_EVERY, SFT_ROWS, SFT_CONTEXT = 10, 32, 36  # four examples in a row
START = 0.3  # share of right answers at which RL begins, about
TOKENS = 4  # longest answer: two digits and the end are three
CONTEXT = 32
# Of each method: its settings, learning rate and steps.
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"rl": {"prompts": 64, "samples": 16}, "lr": 5e-4, "steps": 300},
    "rloo": {"rl": {"prompts": 64, "samples": 16}, "lr": 5e-4, "steps": 300},
    "ppo": {"rl": {"prompts": 256, "samples": 4, "minibatches": 2}, "lr": 5e-4, "steps": 300},
}
SEEDS = (3, 4, 5)  # not those that settings were tried on


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spec_of(folder: Path, name: str, seed: int, **parts: Any) -> RunSpec:
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "seed": seed, "model": MODEL, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1}, **parts,
    })  # fmt: skip


def right_answers(checkpoint: Path, questions: list[Prompt]) -> float:
    """The share of questions that a checkpoint answers exactly, with the most likely tokens."""
    loaded = load_model(checkpoint, device="cpu")
    settings = AnswerSettings(max_tokens=TOKENS, sampling=Sampling(0.0))
    answers = answer_all(loaded, [str(question.content) for question in questions], settings)
    pairs = zip(answers, questions, strict=True)
    return sum(answer["samples"][0]["text"] == question.columns["answer"] for answer, question in pairs) / len(
        questions
    )


def interval(share: float, count: int) -> list[float]:
    """Wilson's interval of 95 %."""
    z = 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return [round(centre - half, 4), round(centre + half, 4)]


def fine_tune(
    folder: Path, seed: int, training: list[Prompt], held_out: list[Prompt], steps: int, lr: float
) -> tuple[Path, dict[str, float]]:
    """A checkpoint that answers about START of the held-out questions, and the shares of all that were looked at."""
    shown = [{"prompt": str(p.content), "completion": p.columns["answer"]} for p in training for _ in range(6)]
    random.Random(seed).shuffle(shown)
    source = {"path": [write_rows(folder / "shown.jsonl", shown)]}
    spec = spec_of(
        folder, "sft", seed, objective="sft", tokenizer={"kind": "char", "chat": "none"},
        data={"sources": {"shown": source}, "context": SFT_CONTEXT, "validation": 0},
        budget={"steps": steps, "batch": SFT_CONTEXT * SFT_ROWS}, optimizer={"lr": lr},
        schedule={"kind": "constant", "warmup": 50}, guard={"enabled": False},
        checkpoint={"every": SFT_EVERY, "keep_last": steps // SFT_EVERY}, lints={"silence": ["short_answers"]},
    )  # fmt: skip
    train(spec)
    shares: dict[str, float] = {}

    def share(checkpoint: Path) -> float:
        shares[checkpoint.name] = right_answers(checkpoint, held_out)
        return shares[checkpoint.name]

    checkpoints = sorted((run_folder(spec) / "checkpoints").glob("step-*"))
    bisect.bisect_left(checkpoints, START, key=share)
    nearest = min(shares, key=lambda name: abs(shares[name] - START))
    return run_folder(spec) / "checkpoints" / nearest, dict(sorted(shares.items()))


def one_run(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Fine-tunes and trains with one method and seed; its scores."""
    method, seed = options["method"], options["seed"]
    usual = METHODS[method]
    lr, steps = options.get("lr", usual["lr"]), options.get("steps", usual["steps"])
    folder.mkdir(parents=True)
    questions = [{"question": f"{a:02}+{b:02}=", "answer": f"{a + b:02}"} for a in range(BELOW) for b in range(BELOW)]
    source = {"path": [write_rows(folder / "prompts.jsonl", questions)], "columns": {"prompt": "question"}}
    training, held_out = hold_out(list(read_prompts("sums", SourceSpec.model_validate(source), 0.0)), 0.1, seed)
    began_s = time.time()
    checkpoint, shares = fine_tune(folder, seed, training, held_out, **{**SFT, **options.get("sft", {})})
    sft_s = time.time() - began_s
    rl = spec_of(
        folder, method, seed, objective=method, start_from=str(checkpoint),
        rl={"max_tokens": TOKENS, "rewards": {"right": "exact"}, "slots": 1024, "keep": 2, **usual["rl"],
            **options.get("rl", {})},
        data={"sources": {"sums": source}, "context": CONTEXT, "validation": 0.1}, budget={"steps": steps},
        optimizer={"lr": lr, **options.get("optimizer", {})}, schedule={"kind": "constant", "warmup": 5},
        evaluate={"every": max(5, steps // 15), "tokens": len(held_out) * CONTEXT}, checkpoint={"every": steps},
    )  # fmt: skip
    began_s = time.time()
    outcome = train(rl)
    rl_s = time.time() - began_s
    run = Run.existing(run_folder(rl))
    curve = {record["step"]: record["accuracy"] for record in run.validations()}
    records = list(run.metrics())
    window = max(1, len(records) // 20)
    last = curve[max(curve)]
    return {
        **options, "lr": lr, "steps": len(records), "held_out_questions": len(held_out),
        "start": curve[0], "start_interval": interval(curve[0], len(held_out)),
        "end": last, "end_interval": interval(last, len(held_out)),
        "sft_seconds": round(sft_s, 1), "rl_seconds": round(rl_s, 1), "outcome": outcome.kind, "sft": shares,
        "held_out": curve,
        "training_reward": {
            r["step"]: round(sum(each["reward"] for each in records[n : n + window]) / window, 4)
            for n, r in enumerate(records) if n % window == 0 and n + window <= len(records)
        },
        "split": {k: round(sum(r.get(k, 0.0) for r in records), 1) for k in ("generate_s", "score_s", "step_s")},
        "alarms": sorted({event["alarm"] for event in run.events() if event["kind"] == "alarm"}),
    }  # fmt: skip


def run_all(
    runs: list[dict[str, Any]], jobs: int, folder: Path, finish: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Each run in a process of its own, pinned to two cores. `finish` gets the results so far after each."""
    cores = sorted(os.sched_getaffinity(0))
    pairs: Queue[list[int]] = Queue()
    for job in range(jobs):
        pairs.put([cores[(2 * job + k) % len(cores)] for k in range(2)])
    folder.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    lock = threading.Lock()

    def one(number: int) -> dict[str, Any]:
        own, log = pairs.get(), folder / f"run-{number}.log"
        out = folder / f"run-{number}.json"
        command = [sys.executable, __file__, "--run", json.dumps(runs[number]), "--folder", str(folder / f"{number}")]
        try:
            with log.open("w") as output:
                process = subprocess.Popen([*command, "--out", str(out)], stdout=output, stderr=output)
                psutil.Process(process.pid).cpu_affinity(own)
                failed = process.wait()
        finally:
            pairs.put(own)
        if failed:
            print(f"{runs[number]}: ended with {failed}: {log}", flush=True)
            return {**runs[number], "failed": failed}
        result = json.loads(out.read_text())["runs"][0]
        print(line(result), flush=True)
        with lock:
            results.append(result)
            finish(results)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, range(len(runs))))


def line(run: dict[str, Any]) -> str:
    extra = {key: run[key] for key in ("rl", "optimizer", "sft") if key in run}
    low, high = run["end_interval"]
    return (
        f"{run['method']:5} seed {run['seed']}  {run['start']:6.1%} -> {run['end']:6.1%} ({low:.1%} to {high:.1%})  "
        f"{run['steps']} steps, lr {run['lr']:g}, SFT {run['sft_seconds']:.0f} s, RL {run['rl_seconds']:.0f} s  "
        f"{extra or ''}"
    )


def write_result(path: Path, runs: list[dict[str, Any]], wall_s: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = f"{psutil.cpu_count(logical=False)} cores, {platform.machine()}; two cores and one thread a run"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "date": datetime.now(UTC).date().isoformat(), "command": " ".join(["python", *sys.argv]), "commit": commit,
        "hardware": machine, "torch": torch.__version__, "python": platform.python_version(),
        "seconds": round(wall_s, 1), "model": MODEL, "numbers_below": BELOW, "methods": METHODS, "runs": runs,
    }, indent=1) + "\n")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="grpo", choices=sorted(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--run", help="the settings of one run as JSON, as in the file of --grid")
    parser.add_argument("--all", action="store_true", help="three methods with three seeds each")
    parser.add_argument("--grid", type=Path, help="a JSON list of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--folder", type=Path, help="for data and runs (default: a new one in /tmp)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(f"/tmp/rl-addition-{os.getpid()}")
    began_s = time.time()

    def finish(results: list[dict[str, Any]]) -> None:
        if options.out:
            write_result(options.out, results, time.time() - began_s)

    if options.all or options.grid:
        every = [{"method": method, "seed": seed} for method in METHODS for seed in SEEDS]
        runs = json.loads(options.grid.read_text()) if options.grid else every
        results = run_all(runs, options.jobs, folder, finish)
    else:
        own = {"method": options.method, "seed": options.seed, "lr": options.lr, "steps": options.steps}
        run = json.loads(options.run) if options.run else {k: v for k, v in own.items() if v is not None}
        results = [one_run(folder, run)]
    for result in results:
        print(line(result) if "failed" not in result else result)
    finish(results)


if __name__ == "__main__":
    main()
