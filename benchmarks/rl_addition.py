"""Reinforcement learning on small additions: exact match on held-out questions after SFT and after RL.

A character model is fine-tuned on some additions of two numbers below 50, too briefly to know them well; then it is
trained with the reward "the answer is right" on questions of which 5 % are held out. One process, two threads:

    python benchmarks/rl_addition.py --objective grpo --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

MODEL = {"width": 128, "layers": 3, "heads": 4, "kv_heads": 4, "ffn": 384}
RL: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {},
    "reinforce": {},
    "ppo": {"minibatches": 2},
    "raft": {"raft": {"top": 2, "least": 1.0}},
}


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def spec_of(folder: Path, name: str, seed: int, **parts: Any) -> RunSpec:
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "seed": seed, "model": MODEL, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 2}, **parts,
    })  # fmt: skip


def one_seed(folder: Path, objective: str, seed: int, steps: int, sft_steps: int, lr: float) -> dict[str, Any]:
    draw = random.Random(seed)
    questions = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(50) for b in range(50)]
    draw.shuffle(questions)
    shown = [{"prompt": row["question"], "completion": row["answer"]} for row in questions[:1500]]
    sft = spec_of(
        folder, f"sft-{seed}", seed, objective="sft", tokenizer={"kind": "char", "chat": "none"},
        data={"sources": {"shown": {"path": [write_rows(folder / f"sft-{seed}.jsonl", shown)]}}, "context": 64},
        budget={"steps": sft_steps, "batch": 64 * 32}, optimizer={"lr": 2e-3}, checkpoint={"every": sft_steps},
    )  # fmt: skip
    train(sft)
    (checkpoint,) = (run_folder(sft) / "checkpoints").glob(f"step-{sft_steps:08}*")
    source = {"path": [write_rows(folder / f"prompts-{seed}.jsonl", questions)], "columns": {"prompt": "question"}}
    rl = spec_of(
        folder, f"{objective}-{seed}", seed, objective=objective, start_from=str(checkpoint),
        rl={"prompts": 32, "samples": 16, "max_tokens": 4, "rewards": {"right": "exact"}, "slots": 512,
            "keep": 2, **RL[objective]},
        data={"sources": {"sums": source}, "context": 64, "validation": 0.05}, budget={"steps": steps},
        optimizer={"lr": lr}, schedule={"kind": "constant", "warmup": 10},
        evaluate={"every": max(10, steps // 10), "tokens": 125 * 64}, checkpoint={"every": steps},
    )  # fmt: skip
    began_s = time.time()
    train(rl)
    seconds = time.time() - began_s
    run = Run.existing(run_folder(rl))
    curve = {record["step"]: record["accuracy"] for record in run.validations()}
    last = list(run.metrics())[-1]
    split = {
        key: sum(r.get(key, 0.0) for r in run.metrics()) for key in ("generate_s", "reward_s", "score_s", "step_s")
    }
    return {"seed": seed, "accuracy": curve, "seconds": round(seconds, 1), "split": split, "last": last}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objective", default="grpo", choices=sorted(RL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rl-addition"))
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = [
        one_seed(options.folder, options.objective, seed, options.steps, options.sft_steps, options.lr)
        for seed in options.seeds
    ]
    for seed in seeds:
        print(options.objective, seed["seed"], seed["accuracy"], f"{seed['seconds']:.0f} s")
    if options.result:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        machine = f"{psutil.cpu_count(logical=False)} cores, {platform.machine()}"
        options.result.write_text(json.dumps({
            "date": datetime.now(UTC).date().isoformat(), "command": " ".join(["python", *sys.argv]), "commit": commit,
            "hardware": machine, "torch": torch.__version__, "objective": options.objective, "seeds": seeds,
        }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
