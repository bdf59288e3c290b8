"""Journals of a run as training writes them, for the tests of what follows runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.run.directory import RunWriter
from bessemer.spec.observers import TrackerSpec


def open_run(folder: Path, extra: str = "") -> RunWriter:
    """A run that has started; `extra` are further lines of its spec."""
    run = RunWriter(folder)
    run.write_file("spec.yaml", f"name: demo\nmodel: 10M\ndata: {{sources: {{words: words.jsonl}}}}\n{extra}")
    run.write_file("plan.json", '{"decisions": [{"key": "optimizer.lr", "value": 0.01}]}')
    run.event("started", step=0, total_steps=100)
    return run


def loss_at(step: int, offset: float = 0.0) -> float:
    return 3.0 - step / 64 + offset  # exact in float32


def write_steps(run: RunWriter, start: int, stop: int, offset: float = 0.0, **more: Any) -> None:
    for step in range(start, stop):
        run.step({"step": step, "loss": loss_at(step, offset), "grad_norm": 1.0, "lr": 1e-3, "veto": None,
                  "tokens": 128 * (step + 1), "tokens_per_s": 100.0, "step_s": 0.5, **more})  # fmt: skip


def write_rest(run: RunWriter, step: int) -> None:
    """An evaluation, a sample, a report, a checkpoint and the end."""
    run.validation({"step": step, "loss": 2.5, "per_source": {"words": 2.5}})
    run.event("samples", step=step, prompt="Once upon", text=" a time")
    (run.folder / "reports" / "anomaly-000003.md").write_text("# Step 3")
    run.event("report", step=3, file="anomaly-000003.md", reason="not finite")
    run.event("saved", step=step, checkpoint="step-00000020.a1", stall_s=0.1, seconds=0.2)
    run.event("finished", step=step, reason="the budget is spent")


def tracker(**settings: Any) -> TrackerSpec:
    return TrackerSpec.model_validate(settings)
