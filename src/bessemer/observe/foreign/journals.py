"""Bessemer's own run folders as ForeignRun, so that one set of rules judges all runs."""

from __future__ import annotations

from pathlib import Path

import yaml

from bessemer.errors import UserError
from bessemer.observe.foreign.builder import RunBuilder
from bessemer.observe.foreign.series import ForeignRun
from bessemer.observe.foreign.tables import add_records, flat
from bessemer.run.directory import Run
from bessemer.run.journal import to_number


def is_run_folder(path: Path) -> bool:
    return (path / "events.jsonl").is_file() and (path / "metrics").is_dir()


def read_run_folder(path: Path) -> list[ForeignRun]:
    """The run of a folder: its journals, its spec, and its starts."""
    run = Run(path)
    builder = RunBuilder("bessemer", path.resolve().name)
    paths = [journal for journal in (run.steps_path, run.validation_path) if journal.exists()]
    if run.steps_path.exists():
        add_records(builder, run.steps_path)
    if run.validation_path.exists():
        add_records(builder, run.validation_path, {"loss": "validation_loss", "accuracy": "validation_accuracy"})
    if not builder:
        raise UserError(f"{path}: the run has no metrics yet")
    for event in run.events():
        builder.total_steps = int(to_number(event.get("total_steps")) or 0) or builder.total_steps
        step = to_number(event.get("step"))
        if event.get("kind") == "started" and step:
            builder.starts.append(int(step))
    spec = path / "spec.yaml"
    if spec.is_file():
        content = yaml.safe_load(spec.read_bytes())
        builder.settings |= dict(flat(content)) if isinstance(content, dict) else {}
    return [builder.finish(paths)]
