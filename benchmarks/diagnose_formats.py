"""Writes a run's records as frameworks do: the shapes of their lines, with the digits that they print.

The numbers are those of a real run; the lines are written here, by the shape that each framework's source has.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from diagnose_runs import Record, TinyRun


def write_nanogpt(run: TinyRun, path: Path) -> None:
    lines = []
    for record in run.records:
        if "validation_loss" in record:
            lines.append(
                f"step {record['step']}: train loss {record['loss']:.4f}, val loss {record['validation_loss']:.4f}"
            )
        lines.append(
            f"iter {record['step']}: loss {record['loss']:.4f}, time {1000 * record['step_s']:.2f}ms, mfu 0.01%"
        )
    path.write_text("\n".join(lines) + "\n")


def write_megatron(run: TinyRun, path: Path) -> None:
    """With the list of arguments, and without the loss where it is not a number, as Megatron does."""
    lines = [f"  {name} {'.' * max(2, 40 - len(name))} {value}" for name, value in run.settings.items()]
    for record in run.records:
        loss = f" lm loss: {record['loss']:.6E} |" if record["loss"] == record["loss"] else ""
        lines.append(
            f" [2026-11-19 10:00:00.000] iteration {record['step']:8d}/{run.total:8d} |"
            f" consumed samples: {16 * record['step']:12d} |"
            f" elapsed time per iteration (ms): {1000 * record['step_s']:.1f} | learning rate: {record['lr']:.6E} |"
            f" global batch size: {16:5d} |{loss} loss scale: {record.get('loss_scale', 1.0):.1f} |"
            f" grad norm: {record['grad_norm']:.3f} | number of skipped iterations: {0:3d} | number of nan iterations:"
            f" {int(record['loss'] != record['loss']):3d} |"
        )
        if "validation_loss" in record:
            lines.append(
                f" validation loss at iteration {record['step']} | lm loss value: {record['validation_loss']:.6E} |"
            )
    path.write_text("\n".join(lines) + "\n")


def write_torchtitan(run: TinyRun, path: Path) -> None:
    lines = []
    for record in run.records:
        memory, tps = record.get("memory_bytes", 2**30) / 2**30, 512 / record["step_s"]
        lines.append(
            f"[titan] 2026-11-19 10:00:00,000 - root - INFO - step: {record['step']:2d}  "
            f"loss: {record['loss']:8.5f}  grad_norm: {record['grad_norm']:8.4f}  memory: {memory:6.3f}GiB({memory:.2f}%)  "
            f"tps: {tps:,.0f}  tflops: 0.01  mfu: 0.01%"
        )
    path.write_text("\n".join(lines) + "\n")


def write_nanochat(run: TinyRun, path: Path) -> None:
    lines = []
    for record in run.records:
        if "validation_loss" in record:
            lines.append(f"Step {record['step']:05d} | Validation loss: {record['validation_loss']:.6f}")
        share, factor = 100 * record["step"] / run.total, record["lr"] / run.settings["learning_rate"]
        lines.append(
            f"step {record['step']:05d}/{run.total:05d} ({share:.2f}%) | loss: {record['loss']:.6f} | "
            f"lrm: {factor:.4f} | dt: {1000 * record['step_s']:.2f}ms | tok/sec: {512 / record['step_s']:,.0f} | mfu: 0.01"
        )
    path.write_text("\n".join(lines) + "\n")


def write_deepspeed(run: TinyRun, path: Path) -> None:
    """The pipeline engine's lines and the monitor's."""
    lines = []
    for record in run.records:
        lines.append(
            f"steps: {record['step']} loss: {record['loss']:0.4f} iter time (s): {record['step_s']:0.3f} "
            f"samples/sec: {16 / record['step_s']:0.3f}"
        )
        skipped = int(record.get("skipped_steps", 0))
        lines.append(
            f"[2026-11-19 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step={record['step']}, "
            f"skipped={skipped}, lr=[{record['lr']}], mom=[(0.9, 0.95)]"
        )
    path.write_text("\n".join(lines) + "\n")


def write_lightning(run: TinyRun, path: Path) -> None:
    """metrics.csv of CSVLogger: training and validation on separate rows, steps from 0."""
    names = sorted({name for record in run.records for name in record} - {"step", "validation_loss", "loss"})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", *[n for n in names if n != "epoch"], "step", "train_loss", "val_loss"])
        writer.writeheader()
        for record in run.records:
            row = {name: record[name] for name in names if name in record} | {"epoch": int(record["epoch"])}
            writer.writerow(row | {"step": record["step"] - 1, "train_loss": record["loss"]})
            if "validation_loss" in record:
                writer.writerow(
                    {"epoch": int(record["epoch"]), "step": record["step"] - 1, "val_loss": record["validation_loss"]}
                )


def write_jsonl(run: TinyRun, path: Path) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in run.records))


def write_trainer_state(run: TinyRun, path: Path) -> None:
    """log_history, with Trainer's names; its NaN filter hides NaN as 0."""
    names = {"loss": "loss", "lr": "learning_rate", "grad_norm": "grad_norm", "epoch": "epoch"}
    history = []
    for record in run.records:
        row: Record = {names[name]: record[name] for name in names}
        if row["loss"] != row["loss"]:
            row["loss"] = 0.0
        extra = {
            name: record[name]
            for name in ("step_s", "data_wait_s", "memory_bytes", "loss_scale", "skipped_steps")
            if name in record
        }
        history.append(row | extra | {"step": record["step"]})
        if "validation_loss" in record:
            history.append({"eval_loss": record["validation_loss"], "epoch": record["epoch"], "step": record["step"]})
    path.write_text(json.dumps({"log_history": history, "max_steps": run.total, "logging_steps": 1}, indent=2))
    (path.parent / "config.json").write_text(json.dumps(run.settings))


WRITERS: dict[str, tuple[str, Callable[[TinyRun, Path], None]]] = {
    "nanogpt": ("train.log", write_nanogpt), "megatron": ("megatron.log", write_megatron),
    "torchtitan": ("titan.log", write_torchtitan), "nanochat": ("base_train.log", write_nanochat),
    "deepspeed": ("deepspeed.log", write_deepspeed), "lightning": ("metrics.csv", write_lightning),
    "jsonl": ("metrics.jsonl", write_jsonl), "hf_trainer": ("trainer_state.json", write_trainer_state),
}  # fmt: skip
# Metrics that a format carries, beside the loss and the step.
CARRIES = {
    "nanogpt": {"step_s", "validation_loss"}, "nanochat": {"step_s", "validation_loss"},
    "megatron": {"step_s", "lr", "grad_norm", "validation_loss", "loss_scale", "settings"},
    "torchtitan": {"grad_norm", "step_s", "memory_bytes"}, "deepspeed": {"step_s", "lr", "skipped_steps"},
    "lightning": {"lr", "grad_norm", "step_s", "data_wait_s", "validation_loss", "memory_bytes", "loss_scale", "epoch"},
    "jsonl": {"lr", "grad_norm", "step_s", "data_wait_s", "validation_loss", "memory_bytes", "loss_scale", "epoch"},
    "hf_trainer": {
        "lr", "grad_norm", "step_s", "data_wait_s", "validation_loss", "memory_bytes", "loss_scale", "epoch", "settings",
    },
}  # fmt: skip
