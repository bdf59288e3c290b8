"""Examines files and folders of any kind and gives ranked findings: runs, logs, error texts, dumps, traces, configs.

A log that holds metrics and a traceback gives findings of both. Files that are given together belong to one run: a
configuration holds the settings of the runs given with it, and dumps of several ranks are compared.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bessemer.diagnose.errors.collectives import is_flight_dump, judge_flight
from bessemer.diagnose.errors.read import (
    judge_json,
    judge_text,
    rank_findings,
    rank_of_dump,
    read_json,
    read_tail,
    refuse_pickle,
)  # fmt: skip
from bessemer.diagnose.journal_events import judge_events
from bessemer.diagnose.rules import judge_run, judge_scaling
from bessemer.errors import UserError
from bessemer.observe.foreign import ForeignRun, read, recognise
from bessemer.run.directory import Run
from bessemer.run.finding import Finding

CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
LOG_SUFFIXES = (".log", ".out", ".err", ".txt")
TABLE_FORMATS = ("csv", "jsonl", "hf_trainer", "tensorboard", "wandb", "mlflow", "aim")  # which hold no texts of errors
CONFIG_BYTES = 1 << 20
PREFERENCE_NOTE = (
    "the curves of preference training do not show what the answers became, such as sycophantic or long; "
    "`bessemer align probe sycophancy MODEL --before SFT_MODEL` measures agreement with wrong claims, and "
    "`bessemer align audit PAIRS` whether the chosen answers teach it"
)
MOST_LOGS = 200  # of a folder
CONTROL_SHARE = 0.02  # of characters, above which a file is not text


@dataclass
class JudgedFinding:
    """A finding with the file that it is from, and the run whose curves show it."""

    finding: Finding
    source: str
    run: ForeignRun | None = None


@dataclass
class Diagnosis:
    """`read` says as what each input was read; `notes` lists what was skipped."""

    findings: list[JudgedFinding] = field(default_factory=list)
    runs: list[ForeignRun] = field(default_factory=list)
    read: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)  # of several paths, those that could not be read, and why

    def to_json(self) -> dict[str, Any]:
        findings = [{**entry.finding.to_json(), "source": entry.source} for entry in self.findings]
        unread = {"unread": self.unread} if self.unread else {}
        return {"read": self.read, "findings": findings, "notes": self.notes, **unread}


def examine(paths: list[Path]) -> Diagnosis:
    """Ranked findings of everything in `paths`. UserError for a file that cannot be read as anything."""
    examiner = _Examiner()
    for path in paths:
        try:
            examiner.add(path)
        except (UserError, OSError) as error:
            if len(paths) == 1:
                raise
            examiner.result.unread[str(path)] = str(error)
    if len(examiner.result.unread) == len(paths):
        raise UserError("; ".join(examiner.result.unread.values()))
    return examiner.finish()


class _Examiner:
    def __init__(self) -> None:
        self.result = Diagnosis()
        self.settings: dict[str, Any] = {}
        self.dumps: dict[int, dict[str, Any]] = {}
        self.dump_names: list[str] = []

    def add(self, path: Path) -> None:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if path.is_dir():
            self._add_folder(path)
        elif kind := self._add_file(path, str(path)):
            self.result.read[str(path)] = kind
        else:
            raise UserError(
                f"{path}: neither a run, a log, a dump, a trace nor a configuration; `bessemer diagnose --help` lists "
                "what it reads"
            )

    def _add_folder(self, folder: Path) -> None:
        format = recognise(folder)
        kinds = [format] if format else []
        if format:
            self.result.runs += _with_settings(read(folder), folder)
        if format == "bessemer":
            self._add_texts(judge_events(Run(folder)), str(folder / "events.jsonl"))
        files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
        logs = [file for file in files if file.suffix in LOG_SUFFIXES or file.name.startswith("nccl_trace_rank")]
        if len(logs) > MOST_LOGS:
            self.result.notes.append(f"{folder}: {len(logs) - MOST_LOGS} of {len(logs)} logs are not read; name them")
        for file in [*logs[:MOST_LOGS], *(file for file in files if file.suffix == ".json" and format is None)]:
            kind = self._add_file(file, str(file), in_folder=True, with_runs=format is None)
            kinds += [kind] if kind and kind not in kinds else []
        if not kinds:
            raise UserError(f"{folder}: holds no run, log, dump or trace; name the file to read")
        self.result.read[str(folder)] = ", ".join(kinds)

    def _add_file(self, path: Path, name: str, in_folder: bool = False, with_runs: bool = True) -> str:
        """What a file was taken for; empty if it is nothing known."""
        if path.stat().st_size == 0:
            if in_folder:
                return ""
            raise UserError(f"{path}: is empty")
        refuse_pickle(path)
        content = read_json(path)
        if is_flight_dump(content):
            self.dumps[rank_of_dump(path, content, len(self.dumps))] = content
            self.dump_names.append(name)
            return "flight-recorder dump"
        if (findings := judge_json(content)) is not None:
            self._add_texts(findings, name)
            return "profiler trace"
        format = recognise(path) if with_runs else None
        if format:
            self.result.runs += read(path)
        elif not in_folder and path.suffix in CONFIG_SUFFIXES and (settings := _read_settings(path)):
            self.settings |= settings
            return "configuration"
        if format in TABLE_FORMATS or content is not None:
            return format or ""
        text = read_tail(path)
        if not _is_text(text):
            return format or ""
        self._add_texts(judge_text(text), name)
        return format or "text"

    def _add_texts(self, findings: list[Finding], source: str) -> None:
        self.result.findings += [JudgedFinding(finding, source) for finding in findings]

    def finish(self) -> Diagnosis:
        result = self.result
        if set(result.read.values()) == {"configuration"}:
            raise UserError(f"{', '.join(result.read)}: only a configuration; give it together with its run or log")
        if self.dumps:
            self._add_texts(judge_flight(self.dumps), ", ".join(self.dump_names))
        for run in result.runs:
            run.settings = self.settings | run.settings
            source = str(run.paths[0]) if run.paths else run.name
            for finding in judge_run(run):
                if (line := _line_of(run, finding)) is not None:
                    finding.evidence.setdefault("line", line)
                result.findings.append(JudgedFinding(finding, source, run))
            result.notes += [f"{run.name}: {note}" for note in run.notes]
            if "reward_margin" in run.series:
                result.notes.append(f"{run.name}: {PREFERENCE_NOTE}")
        for one in result.runs:
            for many in result.runs:
                if one is not many and (scaling := judge_scaling(one, many)):
                    result.findings.append(JudgedFinding(scaling, f"{one.name}, {many.name}"))
        result.findings = _ranked(result.findings)
        return result


def _line_of(run: ForeignRun, finding: Finding) -> int | None:
    """The line of the run's file that holds the step of a finding; None where the reader does not know it."""
    if finding.step is None or len(run.paths) != 1:
        return None
    held_out = any(word in finding.symptom.lower() for word in ("held-out", "validation"))
    for name in ("validation_loss", "loss") if held_out else ("loss", "lr", "grad_norm", "step_s"):
        series = run.series.get(name)
        if series is None:
            continue
        lines = series.lines[series.steps == finding.step]
        if len(lines) and lines[0] > 0:
            return int(lines[0])
    return None


def _ranked(entries: list[JudgedFinding]) -> list[JudgedFinding]:
    """Ranked; the same cause in several files is one finding, whose evidence names the other files."""
    by_id = {id(entry.finding): entry for entry in entries}
    merged: dict[tuple[str, int | None, str], JudgedFinding] = {}
    for finding in rank_findings([entry.finding for entry in entries]):
        entry = by_id[id(finding)]
        key = (finding.rule or finding.symptom, finding.step, finding.severity)
        first = merged.setdefault(key, entry)
        if first is not entry and entry.source != first.source:
            first.finding.evidence.setdefault("also_in", []).append(entry.source)
        elif first is not entry:
            merged[(*key[:2], f"{key[2]}{len(merged)}")] = entry
    return list(merged.values())


def _is_text(text: str) -> bool:
    head = text[:65536]
    control = sum(1 for letter in head if letter == "�" or (letter < " " and letter not in "\n\r\t\x1b\x08"))
    return control <= CONTROL_SHARE * len(head)


def _with_settings(runs: list[ForeignRun], folder: Path) -> list[ForeignRun]:
    """The runs of a folder with the settings of the configurations beside them."""
    for path in sorted(folder.iterdir()):
        if path.suffix in CONFIG_SUFFIXES and path.is_file() and path.stat().st_size < CONFIG_BYTES:
            try:
                settings = _read_settings(path)
            except UserError:  # a folder may hold anything; a file that was named is refused
                continue
            for run in runs:
                run.settings = settings | run.settings
    return runs


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of a configuration file; empty if it holds none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        if path.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    return content if isinstance(content, dict) else {}
