"""Evaluates one model: loads it, scores it on tasks and held-out text, and compares with what the run registered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bessemer.evaluate.contamination import mark_contaminated
from bessemer.evaluate.held_out import run_held_out, text_losses
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.registered import compare_registration
from bessemer.evaluate.results import Evaluation
from bessemer.evaluate.run_tasks import TaskList, TaskSettings, run_tasks
from bessemer.observe.progress import ProgressReport, silent
from bessemer.train.trained import find_model, load_model

EVALUATIONS = "evaluations"  # folder of a run


def evaluate_model(
    model: Path, settings: TaskSettings, tasks: TaskList, checkpoint: str = "last", device: str = "auto",
    texts: Sequence[str] = (), held_out: bool = False, contamination: bool = False,
    report: ProgressReport = silent,
) -> Evaluation:  # fmt: skip
    """Scores of a run, checkpoint or exported folder. On a GPU it computes in bf16."""
    place = find_model(model, checkpoint).place
    loaded = load_model(model, checkpoint, device)
    if loaded.model.head_weight.device.type == "cuda":
        loaded.model.to(torch.bfloat16)
    reader = LanguageModel(loaded, settings.chat, report, settings.seed)
    result = run_tasks(reader, settings, tasks)
    result.model = str(model)
    if held_out:
        result.held_out |= run_held_out(loaded, place)
    result.held_out |= text_losses(reader, texts)
    if contamination:
        result.settings["contamination"] = mark_contaminated(result, place, report)
    result.settings["checkpoint"] = checkpoint
    result.settings |= compare_registration(place, result.settings["registration"])
    return result


def results_folder(model: Path, checkpoint: str) -> Path | None:
    """Where the results of a run's checkpoint are stored; None for other models."""
    files = find_model(model, checkpoint)
    if files.checkpoint is None or not (files.place / "events.jsonl").exists():
        return None
    return files.place / EVALUATIONS / files.checkpoint.name
