"""The folder in which the commands of the documents are executed: files and tiny runs under the names that the pages
use. A published model's folder is a stand-in: the tiny model under its name."""

import gzip
import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from bessemer.checkpoint.tensors import SavedTensors
from bessemer.export.hf import open_native, to_hf
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import dump_spec, load_spec

ROOT = Path(__file__).parents[2]
WORDS = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "forge", "anvil"]
STEPS = 30
SPEC = {
    "model": {"width": 32, "layers": 1, "heads": 2}, "tokenizer": {"vocab": 300}, "optimizer": {"lr": 3e-3},
    "data": {"sources": {"text": "data/"}, "context": 32, "validation": "10%"},
    "budget": {"steps": STEPS, "batch": 256}, "precision": "fp32", "parallel": {"device": "cpu"},
    "lints": {"silence": ["data_repeated"]}, "checkpoint": {"every": 10, "keep_last": 3},
    "evaluate": {"every": 10, "tokens": 512},
}  # fmt: skip
SWEEP = {"strategy": "tpe", "trials": 2, "parameters": {"optimizer.lr": {"min": 1e-4, "max": 1e-2, "log": True}}}
# Specs of pages that are recipes here, of three steps: a name, its recipe, and what it starts from.
SHORT = {"sft": "sft", "lora": "lora", "dpo": "dpo", "reward": "reward", "grpo": "grpo", "sentiment": "classify",
         "student": "distill"}  # fmt: skip
TRAINED = ("sft", "lora", "dpo", "reward")
COPIES = {"finished": "my-run", "NAME": "my-run", "large": "sft", "other": "reward"}
BIG = {
    "model": "70b", "data": {"sources": {"text": "data/"}}, "budget": {"tokens": "1T", "batch": "256K"},
    "optimizer": {"lr": 3e-4}, "schedule": {"warmup": 0},
}  # fmt: skip
SCRIPT = "for x, y in loader:\n    loss = criterion(model(x), y)\n    loss.backward()\n    optimizer.step()\n"


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_files(home: Path) -> None:
    """Everything but trained models."""
    draw = random.Random(0)
    for folder, suffix in (("data", "txt"), ("notes", "txt")):
        (home / folder).mkdir()
        for number in range(20):
            lines = [" ".join(draw.choices(WORDS, k=30)) for _ in range(20)]
            (home / folder / f"{number}.{suffix}").write_text("\n".join(lines))
    for name in ("my-run", "demo", "run"):
        (home / f"{name}.yaml").write_text(json.dumps(SPEC, indent=1))
    (home / "my-sweep.yaml").write_text(json.dumps(SPEC | {"sweep": SWEEP}, indent=1))
    (home / "big.yaml").write_text(json.dumps(BIG))
    (home / "train.py").write_text(SCRIPT)
    (home / "src").mkdir()
    (home / "src" / "other.py").write_text("import torch\n")
    cells = [{"cell_type": "code", "source": SCRIPT.splitlines(keepends=True)}]
    (home / "train.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    write_logs(home)
    shutil.copytree(ROOT / "recipes", home / "recipes")
    (home / "benchmarks").symlink_to(ROOT / "benchmarks")
    rows = (ROOT / "benchmarks" / "data" / "planner" / "vtrain_multi.csv").read_text().splitlines()
    (home / "rows.csv").write_text("\n".join(rows[:6]) + "\n")
    (home / "scratch" / "runs").mkdir(parents=True)


def write_logs(home: Path) -> None:
    """Runs of other frameworks, and dumps of their collectives."""
    noise = random.Random(1)
    losses = [2.5 + 8 / (step + 1) + noise.gauss(0, 0.01) for step in range(200)]
    lines = [f"step {s} | loss {loss:.4f} | grad_norm 0.8 | lr 3.00e-04" for s, loss in enumerate(losses)]
    (home / "train.log").write_text("\n".join(lines))
    (home / "config.yaml").write_text("learning_rate: 3e-4\n")
    history = [{"step": s, "loss": loss, "learning_rate": 3e-4} for s, loss in enumerate(losses)]
    state = json.dumps({"log_history": history, "max_steps": 200, "logging_steps": 1})
    (home / "trainer_state.json").write_text(state)
    (home / "output").mkdir()
    (home / "output" / "trainer_state.json").write_text(state)
    for gpus, rate in ((1, 1000.0), (8, 3000.0)):
        (home / f"gpus-{gpus}").mkdir()
        (home / f"gpus-{gpus}" / "config.yaml").write_text(f"world_size: {gpus}\n")
        table = [f"{s},{loss:.4f},{rate * noise.uniform(0.98, 1.02):.1f}" for s, loss in enumerate(losses)]
        (home / f"gpus-{gpus}" / "metrics.csv").write_text("step,loss,tokens_per_sec\n" + "\n".join(table))
    entry = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "started", "input_sizes": [[8]],
             "process_group": ["0", "default_pg"], "is_p2p": False, "frames": []}  # fmt: skip
    for rank in range(2):
        dump = {"version": "2.10", "pg_config": {}, "entries": [entry] if rank else []}
        (home / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))


def write_short(name: str, recipe: str, *settings: str) -> Path:
    """A recipe with three steps, as NAME.yaml."""
    spec = load_spec(Path(f"recipes/{recipe}.yaml"), [f"name={name}", "parallel.device=cpu", *settings])
    update = {
        "budget": spec.budget.model_copy(update={"steps": 3, "epochs": None}),
        "schedule": spec.schedule.model_copy(update={"warmup": "auto"}),
        "lints": spec.lints.model_copy(update={"silence": [*spec.lints.silence, "data_repeated"]}),
    }
    path = Path(f"{name}.yaml")
    path.write_text(dump_spec(spec.model_copy(update=update)))
    return path


def train(path: Path) -> Path:
    spec = load_spec(path)
    assert Session(spec).train().kind == "finished", path
    return run_folder(spec)


def write_recipe_data(exercises: int) -> None:
    spec = importlib.util.spec_from_file_location("make_data", "recipes/make_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(Path("recipes/data"), exercises)


def train_models() -> None:
    """Trains the runs that the pages name, in the current folder, which holds the files."""
    for name in ("demo", "my-run", "run"):
        train(Path(f"{name}.yaml"))
    write_recipe_data(600)
    exported = Path("runs/tiny-base/export/hf")
    to_hf(open_native(train(write_short("tiny-base", "tiny-base", "data.context=160"))), exported)
    for published in ("Qwen3-0.6B", "Mixtral-8x7B", "SmolLM2-135M-Instruct"):
        shutil.copytree(exported, published)
    shutil.copytree(exported, "runs/sft/export/hf")  # where other recipes look for the model of sft
    for name, recipe in SHORT.items():
        path = write_short(name, recipe)
        if name in TRAINED:
            train(path)
    for alias, run in COPIES.items():
        shutil.copytree(f"runs/{run}", f"runs/{alias}")
    write_inputs()


def write_inputs() -> None:
    """Prompts, pairs, questions and answers, from the data of the recipes."""
    data = Path("recipes/data")
    prompts = [json.loads(line) for line in (data / "prompts.jsonl").read_text().splitlines()[:2]]
    write_jsonl(Path("prompts.jsonl"), prompts)
    shutil.copy("prompts.jsonl", "questions.jsonl")
    for name in ("prompts", "test", "attacks", "benign"):
        Path(f"{name}.txt").write_text("Review the film.\nJudge the story.\n")
    Path("FILE").write_text("rubbish\nawful\n")
    pairs = (data / "preferences.jsonl").read_text().splitlines()[:4]
    Path("pairs.jsonl").write_text("\n".join(pairs) + "\n")
    Path("held-out.jsonl").write_text("\n".join((data / "compared_reviews.jsonl").read_text().splitlines()[:4]) + "\n")
    shutil.copy("recipes/constitutional/principles.yaml", "principles.yaml")
    Path("crawl").mkdir()
    with gzip.open("crawl/0.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "the steel was poured into the mould"}) + "\n")
    (checkpoint, *_) = sorted(Path("runs/demo/checkpoints").glob("step-*"))
    torch.save({n.removeprefix("model."): t for n, t in SavedTensors(checkpoint).items() if "model." in n}, "model.pt")
    write_jsonl(Path("notes.jsonl"), [{"text": path.read_text()} for path in sorted(Path("notes").glob("*.txt"))])
