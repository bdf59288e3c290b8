"""Tiny chat models that a test trains on the spot: supervised fine-tuning from random weights, then DPO."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec

SHAPE = {"width": 64, "layers": 2, "heads": 4}


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*turns: str) -> dict[str, Any]:
    """A conversation that the user begins."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def _train(folder: Path, name: str, data: Path, context: int, **parts: Any) -> Path:
    spec = {
        "name": name, "model": SHAPE, "runs": str(folder / "runs"), "precision": "fp32", "parallel": {"device": "cpu"},
        "data": {"sources": {"rows": {"path": str(data)}}, "context": context, "validation": 0},
        "lints": {"silence": ["continued_at_the_peak"]}, **parts,
    }  # fmt: skip
    run = RunSpec.model_validate(spec)
    assert Session(run).train().kind == "finished"
    return run_folder(run)


def train_sft(folder: Path, rows: Iterable[Any], steps: int, context: int = 128, seed: int = 0) -> Path:
    """The run of a model that learned the conversations from random weights."""
    return train_on(folder, write_jsonl(folder / "sft.jsonl", rows), steps, context, seed)


def train_on(folder: Path, data: Path, steps: int, context: int, seed: int) -> Path:
    return _train(
        folder, "sft", data, context, objective="sft", tokenizer={"vocab": 512, "chat": "chatml"}, seed=seed,
        budget={"steps": steps, "batch": 16 * context}, optimizer={"lr": 3e-3},
    )  # fmt: skip


def train_dpo(folder: Path, name: str, start: Path, pairs: Path, context: int = 128, **dpo: Any) -> Path:
    """The run of the model of `start` after DPO on a file of pairs; `dpo` are settings of the loss."""
    checkpoint = next((start / "checkpoints").glob("step-*"))
    return _train(
        folder, name, pairs, context, objective="dpo", start_from=str(checkpoint), optimizer={"lr": 3e-4},
        tokenizer={"path": str(start / "tokenizer.json"), "chat": "chatml"},
        budget={"epochs": 4, "batch": 16 * context}, **({"dpo": dpo} if dpo else {}),
    )  # fmt: skip
