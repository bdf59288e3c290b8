"""Reinforcement learning on small additions: exact match on held-out questions after SFT and after RL.

A character model is fine-tuned on additions of two numbers below 20 until it answers a quarter of all questions right;
then it is trained with the reward "the answer is right". A tenth of the questions is held out from both. One thread:

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

from bessemer.align.prompts import hold_out, read_prompts
from bessemer.model.generate import Sampling
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.data import SourceSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.answers import AnswerSettings, answer_all
from bessemer.train.trained import load_model

MODEL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 256}
START = 0.25  # share of right answers at which RL begins
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
        "parallel": {"device": "cpu", "threads": 1}, **parts,
    })  # fmt: skip


def right_answers(checkpoint: Path, questions: list[dict[str, str]]) -> float:
    """The share of questions that a checkpoint answers exactly, with the most likely tokens."""
    loaded = load_model(checkpoint, device="cpu")
    settings = AnswerSettings(max_tokens=4, sampling=Sampling(0.0))
    answers = answer_all(loaded, [row["question"] for row in questions], settings)
    pairs = zip(answers, questions, strict=True)
    return sum(answer["samples"][0]["text"] == row["answer"] for answer, row in pairs) / len(questions)


def one_seed(folder: Path, objective: str, seed: int, steps: int, lr: float) -> dict[str, Any]:
    draw = random.Random(seed)
    questions = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
    source = {"path": [write_rows(folder / f"prompts-{seed}.jsonl", questions)], "columns": {"prompt": "question"}}
    prompts = read_prompts("sums", SourceSpec(path=source["path"], columns={"prompt": "question"}), 0.0)
    training, held_out = hold_out(list(prompts), 0.1, seed)
    shown = [{"prompt": str(p.content), "completion": p.columns["answer"]} for p in training for _ in range(4)]
    draw.shuffle(shown)
    every = 20
    sft = spec_of(
        folder, f"sft-{seed}", seed, objective="sft", tokenizer={"kind": "char", "chat": "none"},
        data={"sources": {"shown": {"path": [write_rows(folder / f"sft-{seed}.jsonl", shown)]}}, "context": 16},
        budget={"steps": 300, "batch": 16 * 32}, optimizer={"lr": 2e-3}, guard={"enabled": False},
        checkpoint={"every": every, "keep_last": 20}, evaluate={"every": 300},
    )  # fmt: skip
    train(sft)
    asked = [{"question": str(p.content), "answer": p.columns["answer"]} for p in (*training[::4], *held_out)]
    shares = {}
    for checkpoint in sorted((run_folder(sft) / "checkpoints").glob("step-*")):
        shares[checkpoint.name] = right_answers(checkpoint, asked)
        if shares[checkpoint.name] >= START:
            break
    rl = spec_of(
        folder, f"{objective}-{seed}", seed, objective=objective, start_from=str(checkpoint),
        rl={"prompts": 32, "samples": 8, "max_tokens": 4, "rewards": {"right": "exact"}, "slots": 256, "keep": 2,
            **RL[objective]},
        data={"sources": {"sums": source}, "context": 48, "validation": 0.1}, budget={"steps": steps},
        optimizer={"lr": lr}, schedule={"kind": "constant", "warmup": 5},
        evaluate={"every": max(5, steps // 10), "tokens": len(held_out) * 48}, checkpoint={"every": steps},
    )  # fmt: skip
    began_s = time.time()
    train(rl)
    run = Run.existing(run_folder(rl))
    curve = {record["step"]: record["accuracy"] for record in run.validations()}
    records = list(run.metrics())
    split = {key: round(sum(r.get(key, 0.0) for r in records), 1) for key in ("generate_s", "score_s", "step_s")}
    rewards = {record["step"]: record["reward"] for record in records[:: max(1, steps // 20)]}
    return {
        "seed": seed, "sft": shares, "held_out": curve, "training_reward": rewards, "held_out_prompts": len(held_out),
        "seconds": round(time.time() - began_s, 1), "split": split,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objective", default="grpo", choices=sorted(RL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rl-addition"))
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = [one_seed(options.folder, options.objective, seed, options.steps, options.lr) for seed in options.seeds]
    for seed in seeds:
        print(options.objective, seed["seed"], seed["held_out"], f"{seed['seconds']:.0f} s")
    if options.result:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        machine = f"{psutil.cpu_count(logical=False)} cores, {platform.machine()}"
        options.result.write_text(json.dumps({
            "date": datetime.now(UTC).date().isoformat(), "command": " ".join(["python", *sys.argv]), "commit": commit,
            "hardware": machine, "torch": torch.__version__, "objective": options.objective, "seeds": seeds,
        }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
