"""Tables of metrics: CSV files, and JSON lines with a step in each record. Both are read in one pass, a row at a time,
at about 1 µs a cell."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.observe.foreign.builder import RunBuilder, StepCounter
from bessemer.observe.foreign.names import STEP_KEYS, step_column
from bessemer.observe.foreign.series import ForeignRun
from bessemer.run.journal import Record, to_number

HEAD_BYTES = 1 << 16
COUNTED_ON = "the steps begin again in each epoch; they were counted on"
NOT_METRICS = {"wall time", "_timestamp", "timestamp", "time"}
EXPORTED = re.compile(r"^(.*) - (.*?)(__MIN|__MAX)?$")  # a column of a chart that W&B exported


def csv_header(path: Path) -> tuple[list[str], str] | None:
    """The columns and the delimiter of a CSV file; None if its first line is not a header."""
    with path.open("rb") as file:
        line = file.read(HEAD_BYTES).split(b"\n", 1)[0].decode("utf-8-sig", "replace").strip()
    delimiter = "\t" if "\t" in line else ";" if ";" in line and "," not in line else ","
    columns = next(csv.reader([line], delimiter=delimiter), [])
    if len(columns) < 2 or any(to_number(column) is not None or not column for column in columns[1:]):
        return None
    return [column.strip() for column in columns], delimiter


def read_csv(path: Path) -> list[ForeignRun]:
    """The run of a CSV file with a step column; of a chart that W&B exported, all its runs. Empty cells are skipped."""
    header = csv_header(path)
    step_name = step_column(header[0]) if header else None
    if header is None or step_name is None:
        present = ", ".join(header[0][:12]) if header else "no header"
        raise UserError(f"{path}: no step column among {present}; looked for one of {', '.join(STEP_KEYS[:8])}")
    columns, delimiter = header
    step_at = columns.index(step_name)
    builders, targets = _csv_targets(path, columns, step_at)
    rejected, counter = 0, StepCounter()
    epoch_at = next((i for i, column in enumerate(columns) if column.lower() == "epoch"), -1)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader((line.replace("\0", "") for line in file), delimiter=delimiter)
        next(reader)
        for cells in reader:
            step = to_number(cells[step_at]) if len(cells) > step_at else None
            if step is None or step != step or abs(step) > 2**53:
                rejected += bool(cells)
                continue
            place = counter(to_number(cells[epoch_at]) if 0 <= epoch_at < len(cells) else None, int(step))
            for i, builder, key in targets:
                if i < len(cells) and cells[i] and (value := to_number(cells[i])) is not None:
                    builder.add(key, place, value, reader.line_num)
    runs = []
    for builder in builders:
        if counter.counts_on:
            builder.note(COUNTED_ON)
        if rejected:
            builder.note(f"{rejected:,} rows without a step were skipped")
        if builder:
            runs.append(builder.finish([path]))
    return runs


def _csv_targets(
    path: Path, columns: list[str], step_at: int
) -> tuple[list[RunBuilder], list[tuple[int, RunBuilder, str]]]:
    """For each column with metrics its index, run and key."""
    keys = [column.lower() for column in columns]
    if keys == ["wall time", "step", "value"]:  # one tag that TensorBoard exported
        tag = re.sub(r"^run-.*-tag-", "", path.stem)
        builder = RunBuilder("tensorboard_csv", path.stem)
        return [builder], [(2, builder, tag)]
    others = [(i, column) for i, column in enumerate(columns) if i != step_at and keys[i] not in NOT_METRICS]
    exported = [(i, match) for i, column in others if (match := EXPORTED.match(column))]
    if exported and keys[step_at] == "step" and len(exported) == len(others):
        runs: dict[str, RunBuilder] = {}
        targets = []
        for i, match in exported:
            if not match[3]:
                builder = runs.setdefault(match[1], RunBuilder("wandb_csv", match[1]))
                targets.append((i, builder, match[2]))
        return list(runs.values()), targets
    lightning = path.name == "metrics.csv" and "epoch" in keys
    format = "lightning_csv" if lightning else "wandb_csv" if "_runtime" in keys else "csv"
    named_by_folder = path.name in ("metrics.csv", "log.csv")
    builder = RunBuilder(format, path.resolve().parent.name if named_by_folder else path.stem)
    return [builder], [(i, builder, column) for i, column in others]


def flat(record: Record, prefix: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Fields of nested mappings under names with slashes."""
    for key, value in record.items():
        if isinstance(value, dict) and depth:
            yield from flat(value, f"{prefix}{key}/", depth - 1)
        else:
            yield f"{prefix}{key}", value


def record_step(record: Record) -> tuple[str, int] | None:
    """The key of a record that counts steps, and its value."""
    for key in STEP_KEYS:
        step = to_number(record.get(key))
        if step is not None and step == step and abs(step) < 2**53:
            return key, int(step)
    ratio = record.get("global_step/max_steps")  # ms-swift
    if isinstance(ratio, str) and ratio.partition("/")[0].isdecimal():
        return "global_step/max_steps", int(ratio.partition("/")[0])
    return None


def read_jsonl(path: Path) -> list[ForeignRun]:
    """The run of a file of JSON records with a step: LLaMA-Factory's trainer_log.jsonl, verl's file logger, others."""
    of_trainer = path.name in ("trainer_log.jsonl", "logging.jsonl")
    format = {"trainer_log.jsonl": "llama_factory", "logging.jsonl": "ms_swift"}.get(path.name, "jsonl")
    generic = path.stem.lower() in ("trainer_log", "logging", "metrics", "log", "steps", "train", "history")
    builder = RunBuilder(format, path.resolve().parent.name if generic else path.stem, means=of_trainer)
    skipped = add_records(builder, path)
    if skipped:
        builder.note(f"{path.name}: {skipped:,} lines are not records with a step and were skipped")
    if not builder:
        raise UserError(f"{path}: no record with a step and a number; looked for one of {', '.join(STEP_KEYS[:8])}")
    return [builder.finish([path])]


def add_records(builder: RunBuilder, path: Path, rename: dict[str, str] | None = None) -> int:
    """Add the numbers of all records with a step; the number of other lines."""
    skipped, counter = 0, StepCounter()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            place = record_step(record) if isinstance(record, dict) else None
            if place is None:
                skipped += 1
                continue
            step = counter(to_number(record.get("epoch")), place[1])
            for total in ("total_steps", "max_steps"):
                if total in record and (count := to_number(record[total])):
                    builder.total_steps = int(count)
            for key, value in flat(record):
                if key != place[0] and key not in ("total_steps", "max_steps") and not isinstance(value, bool):
                    metric = to_number(value) if key.lower() not in NOT_METRICS else None
                    if metric is not None:
                        key = key.removeprefix("data/")  # verl's file logger
                        builder.add((rename or {}).get(key, key), step, metric, number)
    if counter.counts_on:
        builder.note(COUNTED_ON)
    return skipped
