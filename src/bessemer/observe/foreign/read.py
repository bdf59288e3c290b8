"""Reads a run that another framework wrote, whatever its format: `read(path)`.

    trainer_state.json, or a checkpoint or output folder of Hugging Face's Trainer
    CSV with a step column: Lightning's CSVLogger, exports of W&B and TensorBoard, any other
    JSON lines with a step: LLaMA-Factory, ms-swift, verl, any other
    plain logs, recognised by the shape of their lines, see log_shapes.py
    run folders of Bessemer
    event files of TensorBoard, offline files of Weights & Biases, MLflow's folders and databases

Every reader makes one pass over its file. Nothing is unpickled or executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bessemer.errors import UserError
from bessemer.observe.foreign.hf_trainer import STATE, find_state, read_trainer_state
from bessemer.observe.foreign.journals import is_run_folder, read_run_folder
from bessemer.observe.foreign.logs import LOG_FORMATS, log_format, read_log
from bessemer.observe.foreign.mlflow import is_run_of_store, is_store, read_run_of_store, read_store
from bessemer.observe.foreign.names import step_column
from bessemer.observe.foreign.series import ForeignRun
from bessemer.observe.foreign.tables import csv_header, read_csv, read_jsonl, record_step
from bessemer.observe.foreign.tensorboard import MARK, is_event_file, read_event_files
from bessemer.observe.foreign.wandb import is_wandb_file, read_wandb_file

Reader = Callable[[Path], list[ForeignRun]]
FORMATS = (
    STATE, "TensorBoard event files", "offline files of Weights & Biases", "MLflow stores", "CSV with a step column",
    "JSON lines with a step", "a Bessemer run folder",
)  # fmt: skip
LOOKED_FOR = f"{', '.join(FORMATS)}, or a log of {', '.join(LOG_FORMATS)}"
HEAD_BYTES = 1 << 16
LOG_SUFFIXES = {".log", ".txt", ".out", ".err", ""}
MOST_FILES = 2000
DEPTH = 4


def recognise(path: Path) -> str | None:
    """The format of a file or folder; None for an unknown one. Reads a log until it has seen enough of its lines."""
    reader = _reader(path)
    return reader[0] if reader else None


def read(path: Path) -> list[ForeignRun]:
    """The runs in a file or folder. UserError names what was looked for if there is none."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    try:
        reader = _reader(path)
        runs = reader[1](path) if reader else []
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    if not runs:
        raise UserError(f"{path}: not a run in a known format; looked for {LOOKED_FOR}")
    return runs


def _reader(path: Path) -> tuple[str, Reader] | None:
    return _folder_reader(path) if path.is_dir() else _file_reader(path)


def _folder_reader(path: Path) -> tuple[str, Reader] | None:
    own = _own_part(path)
    if own:
        return own[1], lambda _: own[2](own[0])
    parts = list(_parts(path, DEPTH))
    if not parts:
        return None
    formats = {format for _, format, _ in parts}
    # The same numbers often lie there twice: tables and states are exact, logs are rounded.
    is_exact = any(format not in LOG_FORMATS for format in formats)
    parts = [part for part in parts if not is_exact or part[1] not in LOG_FORMATS]
    return "+".join(sorted({format for _, format, _ in parts})), lambda _: [
        run for part, _, reader in parts for run in reader(part)
    ]


def _own_part(folder: Path) -> tuple[Path, str, Reader] | None:
    """The run that a folder is, as opposed to runs in it."""
    if is_run_folder(folder):
        return folder, "bessemer", read_run_folder
    if is_run_of_store(folder):
        return folder, "mlflow", read_run_of_store
    state = find_state(folder)
    return (state, "hf_trainer", read_trainer_state) if state else None


def _parts(folder: Path, depth: int) -> list[tuple[Path, str, Reader]]:
    """The runs of a folder's files and folders."""
    parts: list[tuple[Path, str, Reader]] = []
    has_events = False
    for path in sorted(folder.iterdir())[:MOST_FILES]:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.is_symlink():
                continue
            own = _own_part(path)
            parts += [own] if own else _parts(path, depth - 1) if depth else []
        elif not path.is_file():  # a pipe or a socket
            continue
        elif MARK in path.name:
            has_events = has_events or is_event_file(path)
        elif reader := _file_reader(path):
            parts.append((path, *reader))
    return [*parts, (folder, "tensorboard", read_event_files)] if has_events else parts


def _file_reader(path: Path) -> tuple[str, Reader] | None:
    if path.name == STATE:
        return "hf_trainer", read_trainer_state
    if is_event_file(path):
        return "tensorboard", read_event_files
    if is_wandb_file(path):
        return "wandb", read_wandb_file
    if is_store(path):
        return "mlflow", read_store
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        header = csv_header(path)
        return ("csv", read_csv) if header and step_column(header[0]) else None
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if suffix == ".json":
        return ("hf_trainer", read_trainer_state) if b'"log_history"' in head or _has_history(path) else None
    if (suffix in (".jsonl", ".ndjson") or head[:1] == b"{") and _has_step_records(head):
        return "jsonl", read_jsonl
    if suffix in LOG_SUFFIXES and b"\0" not in head[:1024]:
        format = log_format(path)
        if format:
            return format, lambda log: read_log(log, format)
        header = csv_header(path)
        return ("csv", read_csv) if header and step_column(header[0]) else None
    return None


def _has_history(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - HEAD_BYTES))
        return b'"log_history"' in file.read()


def _has_step_records(head: bytes) -> bool:
    """Whether one of the first JSON lines has a step."""
    for line in head.split(b"\n")[:200]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record_step(record):
            return True
    return False
