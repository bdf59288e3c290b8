"""Imports runs of other frameworks: each becomes a run folder with journals, so that everything that reads run folders
shows it: the page, its export, `bessemer runs`, `bessemer report`.

Writing takes about 10 s for a million steps of ten metrics. Steps are those of the source.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from bessemer.errors import UserError
from bessemer.observe.foreign import ForeignRun, Series, read
from bessemer.run.directory import Run
from bessemer.run.journal import Record, json_ready

ROWS = 20_000  # records that are built at once
VALIDATION = re.compile(r"^(eval|valid|validation|val|test)[_/ ]")
IMPORTED = "imported"  # kind of the first event of an imported run


@dataclass(frozen=True)
class ImportedRun:
    name: str
    format: str
    metrics: tuple[str, ...]
    points: int
    notes: tuple[str, ...]


def import_runs(paths: Sequence[Path], runs: Path) -> list[ImportedRun]:
    """Read the runs in all paths and write them into the folder `runs`. An earlier import of a name is replaced; a run
    that was not imported is never touched."""
    foreign = [(path, run) for path in paths for run in read(path)]
    names = _names([run.name for _, run in foreign])
    for name in names:
        if (runs / name).exists() and not _was_imported(runs / name):
            raise UserError(f"{runs / name}: exists and was not imported; name another folder for the imported runs")
    return [_write_run(run, path, runs / name) for (path, run), name in zip(foreign, names, strict=True)]


def _names(wanted: list[str]) -> list[str]:
    """Names of folders, each once."""
    names: list[str] = []
    for name in wanted:
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
        count = 1
        while (unique := plain if count == 1 else f"{plain}-{count}") in names:
            count += 1
        names.append(unique)
    return names


def _was_imported(folder: Path) -> bool:
    return next(Run(folder).events(), {}).get("kind") == IMPORTED


def _write_run(run: ForeignRun, path: Path, folder: Path) -> ImportedRun:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "metrics").mkdir(parents=True)
        validation = {_validation_key(name): s for name, s in run.series.items() if VALIDATION.match(name)}
        training = {name: series for name, series in run.series.items() if not VALIDATION.match(name)}
        _write_lines(partial / "metrics" / "steps.jsonl", _records(training))
        _write_lines(partial / "metrics" / "validation.jsonl", _records(validation))
        _write_lines(partial / "events.jsonl", iter(_events(run, path)))
        header = f"# Settings that {run.format} wrote. This is not a spec of Bessemer.\n"
        text = yaml.safe_dump(run.settings, allow_unicode=True, sort_keys=False) if run.settings else ""
        (partial / "spec.yaml").write_text(header + text, "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    points = sum(len(series) for series in run.series.values())
    return ImportedRun(folder.name, run.format, tuple(run.series), points, tuple(run.notes))


def _validation_key(name: str) -> str:
    return VALIDATION.sub("", name)


def _write_lines(path: Path, records: Iterator[Record]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(json_ready(record), ensure_ascii=False) + "\n")


def _records(series: dict[str, Series]) -> Iterator[Record]:
    """One record for each step at which a metric has a value."""
    if not series:
        return
    steps = np.unique(np.concatenate([metric.steps for metric in series.values()]))
    for start in range(0, len(steps), ROWS):
        part = steps[start : start + ROWS]
        rows: list[Record] = [{"step": step} for step in part.tolist()]
        for name, metric in series.items():
            first, last = np.searchsorted(metric.steps, [part[0], part[-1] + 1])
            places = np.searchsorted(part, metric.steps[first:last])
            for place, value in zip(places.tolist(), metric.values[first:last].tolist(), strict=True):
                rows[place][name] = value
        yield from rows


def _events(run: ForeignRun, path: Path) -> list[Record]:
    time = max((source.stat().st_mtime for source in run.paths if source.exists()), default=0.0)
    total = {"total_steps": run.total_steps} if run.total_steps else {}
    events: list[Record] = [{"kind": IMPORTED, "format": run.format, "reason": f"from {path}"}]
    events += [{"kind": IMPORTED, "reason": note} for note in run.notes]
    events += [{"kind": "started", "step": step, **total} for step in [0, *run.restarts]]
    last = max((int(metric.steps[-1]) for metric in run.series.values() if len(metric)), default=0)
    events.append({"kind": "finished", "step": last, "reason": f"imported from {path}"})
    return [{"time": round(time, 3), **event} for event in events]
