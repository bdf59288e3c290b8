"""Runs of Hugging Face's Trainer and of what is built on it (TRL, Axolotl, LLaMA-Factory): `trainer_state.json`.

The file holds every logged record with its step. The newest checkpoint of an output folder has the history of all
earlier ones. training_args.bin is a pickle and is never opened: settings come from the JSON and YAML files beside it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from bessemer.errors import UserError
from bessemer.observe.foreign.builder import RunBuilder
from bessemer.observe.foreign.names import SUMMARY_KEY
from bessemer.observe.foreign.series import ForeignRun
from bessemer.observe.foreign.tables import flat
from bessemer.run.journal import to_number

STATE = "trainer_state.json"
STATE_SETTINGS = (
    "logging_steps", "eval_steps", "save_steps", "num_train_epochs", "train_batch_size", "num_input_tokens_seen",
    "best_metric", "best_model_checkpoint",
)  # fmt: skip
CONFIGS = (
    "config.json",
    "adapter_config.json",
    "args.json",
    "training_args.json",
    "training_args.yaml",
    "hparams.yaml",
)
CARD_LINE = re.compile(r"^- ([a-z_0-9 ]+): (.+)$")
STEP_LINE = re.compile(rb'^ {6}"step": \d+,?\s*$')


def find_state(folder: Path) -> Path | None:
    """The newest trainer_state.json of an output or checkpoint folder."""
    checkpoints = [path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name[11:].isdecimal()]
    newest = max(checkpoints, key=lambda path: int(path.parent.name[11:]), default=None)
    own = folder / STATE
    return own if own.is_file() else newest


def read_trainer_state(path: Path) -> list[ForeignRun]:
    """The run of a trainer_state.json, with settings from the files beside it."""
    try:
        state = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); the save may have been cut off: try an older one"
        ) from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise UserError(f"{path}: no log_history; looked for the list that Trainer writes")
    folder = path.resolve().parent
    output = folder.parent if folder.name.startswith("checkpoint-") else folder
    builder = RunBuilder("hf_trainer", output.name, means=True)
    lines = _line_numbers(path, len(history))
    skipped = 0
    for record, line in zip(history, lines, strict=True):
        step = to_number(record.get("step")) if isinstance(record, dict) else None
        if step is None:
            skipped += 1
        elif SUMMARY_KEY in record:
            builder.settings |= {f"summary.{key}": value for key, value in record.items() if key != "step"}
        else:
            numbers = {key: number for key, item in record.items() if (number := to_number(item)) is not None}
            numbers.pop("step")
            builder.add_row(int(step), numbers, line)
    if skipped:
        builder.note(f"{skipped:,} records of log_history have no step and were skipped")
    if not builder:
        builder.note("log_history has no metrics; is logging_steps larger than the number of steps?")
    builder.total_steps = int(to_number(state.get("max_steps")) or 0) or None
    builder.settings |= {key: state[key] for key in STATE_SETTINGS if state.get(key) is not None}
    add_settings(builder, folder, output)
    if (folder / "training_args.bin").exists():
        builder.note("training_args.bin is a pickle and was not opened")
    return [builder.finish([path])]


def _line_numbers(path: Path, records: int) -> list[int]:
    with path.open("rb") as file:
        lines = [number for number, line in enumerate(file, 1) if STEP_LINE.match(line)]
    return lines if len(lines) == records else [-1] * records


def add_settings(builder: RunBuilder, *folders: Path) -> None:
    """Hyper-parameters from JSON and YAML files and the model card; the ones of the first folder win."""
    for folder in dict.fromkeys(folders):
        for path in (folder / name for name in CONFIGS):
            if path.is_file():
                try:
                    builder.settings = dict(_settings_of(path)) | builder.settings
                except (ValueError, yaml.YAMLError) as error:
                    builder.note(f"{path.name}: was not read: {str(error).splitlines()[0]}")
        card = folder / "README.md"
        if card.is_file():
            matches = [CARD_LINE.match(line) for line in card.read_text("utf-8", "replace").splitlines()]
            builder.settings = {match[1].strip(): _scalar(match[2]) for match in matches if match} | builder.settings


def _settings_of(path: Path) -> list[tuple[str, Any]]:
    """The scalar settings of a file; none if it is not a mapping."""
    content: Any = yaml.safe_load(path.read_bytes()) if path.suffix == ".yaml" else json.loads(path.read_bytes())
    if not isinstance(content, dict):
        return []
    return [(key, item) for key, item in flat(content) if isinstance(item, str | int | float | bool)]


def _scalar(text: str) -> Any:
    text = text.strip()
    number = to_number(text)
    return text if number is None else int(number) if text.isdecimal() else number
