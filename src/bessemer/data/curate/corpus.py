"""Runs the steps of a spec over all parts of all sources and reuses what the cache holds. A part's state after some
steps has a key: a hash of what it reads and of those steps. A local step depends on nothing else, so adding a file
leaves the work on other parts valid; a global step's key covers all the parts that it compared."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.curate import ledger
from bessemer.data.curate.engine import CurationEngine, Meter, run_all
from bessemer.data.curate.ledger import StepCounts, counts_path, ledger_path, read_cached, read_json
from bessemer.data.curate.passes import (
    Census,
    PassTask,
    ReadCounts,
    StepTask,
    ValidationSplit,
    read_curated_documents,
    run_pass,
)
from bessemer.data.curate.step import Collected, is_global, make_step, step_identity
from bessemer.data.read import FileEntry, SourcePart, divide_source
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, SourceSpec
from bessemer.spec.text_steps import ExtractSpec, StepSpec

RULES_VERSION = 1  # increase when the same files and steps would give other documents
_MARKUP = {"html", "warc"}
_HASHING_THREADS = 8


@dataclass
class PartState:
    """The progress of a part through the steps."""

    part: SourcePart
    source: SourceSpec
    read_key: str
    key: str  # after the last done or due step
    done: list[str] = field(default_factory=list)  # ledger keys of the done steps
    due: list[StepTask] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)  # index in Corpus.stages of each done or due step
    reading: ReadCounts | None = None
    census: Census | None = None


@dataclass
class CurationStage:
    """A step as the report shows it: once for the corpus, or once for its source."""

    step: str
    settings: dict[str, Any]
    source: str | None  # None: all sources
    counts_by_source: dict[str, StepCounts] = field(default_factory=dict)  # by source
    summary: dict[str, Any] = field(default_factory=dict)  # of a global step


class Corpus:
    """All parts of all sources. `curate` runs their steps; `documents` then reads the result."""

    def __init__(
        self, data: DataSpec, files: dict[str, list[FileEntry]], cache: Path, engine: CurationEngine, meter: Meter
    ) -> None:
        self.data, self.cache, self.engine, self.meter = data, cache, engine, meter
        self.copies = cache / "copies"
        self.notes: list[str] = []  # repaired damage
        self.stages: list[CurationStage] = []
        self.parts: list[PartState] = []
        for name, source in data.sources.items():
            settings = [RULES_VERSION, source.text_field, source.id_field, source.url_field, source.messages_field]
            settings += [source.columns] if source.columns else []
            settings += [source.chat_format, source.columns] if source.chat_format else []
            settings += ["weights"] if source.message_weights else []
            for part in divide_source(name, files[name], source, data.part, self.copies, self._each):
                key = hash_key(["read", part.key, *settings])
                self.parts.append(PartState(part, source, key, key))
        formats = {name: {entry.format for entry in entries} for name, entries in files.items()}
        self._markup = {name for name, file_formats in formats.items() if _MARKUP & file_formats}

    def curate(self, split: ValidationSplit) -> None:
        """Runs all steps of all sources, except what the cache holds."""
        for name, source in self.data.sources.items():
            source_parts = [state for state in self.parts if state.part.source == name]
            steps = list(source.clean)
            if name in self._markup and not any(isinstance(step, ExtractSpec) for step in steps):
                steps.insert(0, ExtractSpec())
            for step in steps:
                self._add(step, source_parts, name)
        for step in self.data.clean:
            self._add(step, self.parts, None)
        self._run("reading" if not self.stages else "cleaning", self.parts, None, split)
        for stage in self.stages:
            stage.counts_by_source = {
                name: stage.counts_by_source[name] for name in self.data.sources if name in stage.counts_by_source
            }

    def documents(self, state: PartState) -> Iterator[tuple[int, Document]]:
        return read_curated_documents(state.part, state.source, self.cache, state.done, self.copies)

    def _each(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        return run_all(self.engine, function, tasks)

    def _add(self, spec: StepSpec, states: list[PartState], source: str | None) -> None:
        instance = make_step(spec, 0)
        settings = spec.model_dump(mode="json")[spec.step]
        stage = len(self.stages)
        self.stages.append(CurationStage(spec.step, settings, source))
        identifiers = [spec.step, settings, *step_identity(instance)]
        decisions_by_part: list[str | None] = [None] * len(states)
        if is_global(instance):
            # Collected data does not depend on the settings that only `resolve` and `apply` use.
            reads = {key: value for key, value in settings.items() if key not in getattr(instance, "judging", ())}
            key = ["collect", spec.step, reads, *step_identity(instance)]
            collect_tasks = [StepTask(spec, hash_key([state.key, *key])) for state in states]
            decisions_key = hash_key(["ruling", [state.key for state in states], *identifiers])
            paths = [ledger.decisions_path(self.cache, decisions_key, i) for i in range(len(states))]
            summary = read_cached(self.cache / "rulings" / decisions_key / "summary.json")
            if summary is None or not all(path.exists() for path in paths):
                self._run(f"reading for {spec.step}", states, collect_tasks, None)
                self._resolve(spec, decisions_key, states, collect_tasks)
                summary = read_json(self.cache / "rulings" / decisions_key / "summary.json")
            self.stages[stage].summary = summary
            decisions_by_part = [str(path) for path in paths]
            identifiers = [*identifiers, decisions_key]
        for state, decisions in zip(states, decisions_by_part, strict=True):
            state.key = hash_key([state.key, *identifiers, decisions and Path(decisions).name])
            state.due.append(StepTask(spec, state.key, decisions))
            state.stages.append(stage)

    def _resolve(self, spec: StepSpec, key: str, states: list[PartState], collect_tasks: list[StepTask]) -> None:
        """Computes and stores a global step's decisions from everything collected."""
        step = make_step(spec, 0)
        assert is_global(step)
        collected = []
        for i, (state, task) in enumerate(zip(states, collect_tasks, strict=True)):
            documents = _require(state.reading).documents
            collected.append(Collected(i, ledger.collected_path(self.cache, task.key), state.part.source, documents))
        self.meter.say(f"{spec.step}: comparing {sum(part.documents for part in collected):,} documents")
        folder = self.cache / "rulings" / key
        scratch = folder.with_name(f"{key}.scratch-{uuid.uuid4().hex[:8]}")
        scratch.mkdir(parents=True)
        try:
            decisions_by_part, summary = step.resolve(collected, scratch, self._each)
            for i, decisions in enumerate(decisions_by_part):
                ledger.save_arrays(ledger.decisions_path(self.cache, key, i), dict(decisions))
            ledger.write_json(folder / "summary.json", summary)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if getattr(step, "bulky", False):
            for part in collected:
                part.path.unlink(missing_ok=True)

    def _run(
        self, label: str, states: list[PartState], collect: list[StepTask] | None, split: ValidationSplit | None
    ) -> None:
        """Runs the due steps on every part, then collects for a global step or takes the census."""
        tasks: list[PassTask] = []
        running: list[PartState] = []
        intact = self._intact_ledgers(states)
        for i, state in enumerate(states):
            census = (hash_key(["census", state.key, split.seed, split.share]), split) if split else None
            task = self._task(state, collect[i] if collect else None, census, intact)
            if task is not None:
                tasks.append(task)
                running.append(state)
        self.meter.start(label, sum(task.part.size_bytes for task in tasks))
        for i, result in self.engine.run(run_pass, tasks):
            running[i].reading, running[i].census = result
            self.meter.advance(tasks[i].part.size_bytes)
            # Detects a wrong field early.
            self._check_bad_rows(states, max(self.data.bad_rows, 0.5), min_rows=10_000)
        self._check_bad_rows(states, self.data.bad_rows)
        for state in states:  # in order, so that float sums do not depend on the workers
            for op, stage in zip(state.due, state.stages[len(state.done) :], strict=True):
                tallies = self.stages[stage].counts_by_source
                tally = ledger.read_counts(ledger_path(self.cache, op.key))
                tallies.setdefault(state.part.source, StepCounts()).add(tally)
            state.done += [op.key for op in state.due]
            state.due = []

    def _intact_ledgers(self, states: Sequence[PartState]) -> set[str]:
        """The keys of due steps that an earlier run finished. Hashing their ledgers reads what is read next anyway."""
        keys = list(dict.fromkeys(op.key for state in states for op in state.due))
        keys = [key for key in keys if counts_path(self.cache, key).exists()]
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            damages = list(pool.map(lambda key: ledger.ledger_damage(ledger_path(self.cache, key)), keys))
        self.notes += [f"{damage}: the step runs again on this part" for damage in damages if damage]
        return {key for key, damage in zip(keys, damages, strict=True) if damage is None}

    def _task(
        self, state: PartState, collect: StepTask | None, census: tuple[str, ValidationSplit] | None, intact: set[str]
    ) -> PassTask | None:
        """The missing work on a part, or None."""
        first_due = next((i for i, op in enumerate(state.due) if op.key not in intact), len(state.due))
        reading = read_cached(counts_path(self.cache, state.read_key), ReadCounts.__dataclass_fields__)
        complete = first_due == len(state.due) and reading is not None
        if collect is not None:
            complete = complete and ledger.collected_path(self.cache, collect.key).exists()
        if census is not None:
            counts = read_cached(counts_path(self.cache, census[0]), Census.__dataclass_fields__)
            complete = complete and counts is not None
            if complete and counts is not None:
                state.census = Census(**{name: counts[name] for name in Census.__dataclass_fields__})
        if complete and reading is not None:
            state.reading = ReadCounts(**{name: reading[name] for name in ReadCounts.__dataclass_fields__})
            return None
        done = (*state.done, *(op.key for op in state.due[:first_due]))
        return PassTask(
            state.part, state.source, self.cache, state.read_key, done, tuple(state.due[first_due:]), collect, census,
            self.copies,
        )  # fmt: skip

    def _check_bad_rows(self, states: Sequence[PartState], limit_share: float, min_rows: int = 0) -> None:
        """Stops the job above the limit; the rows are in the quarantine files either way."""
        for name in dict.fromkeys(state.part.source for state in states):
            read = [state for state in states if state.part.source == name and state.reading]
            bad = sum(_require(state.reading).bad for state in read)
            rows = bad + sum(_require(state.reading).documents + _require(state.reading).empty for state in read)
            if bad <= limit_share * rows or rows < min_rows:
                continue
            state = next(state for state in read if _require(state.reading).bad)
            first = _require(state.reading).examples[0]
            quarantine = ledger.quarantine_path(self.cache, state.read_key)
            limit = f"data.bad_rows allows {self.data.bad_rows:.3g} of them"
            rest = f"; they are written to {quarantine}" if bad > 1 else ""
            raise UserError(
                f"source {name!r}: {first['file']}:{first['row']}: {first['reason']} "
                f"({bad:,} of {rows:,} rows cannot be used and {limit}{rest})"
            )


def _require(reading: ReadCounts | None) -> ReadCounts:
    assert reading is not None, "the part has been read"
    return reading


def hash_key(value: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode()))


def delete_stale_files(cache: Path, older_than_s: float = 86_400) -> None:
    """Deletes what killed processes left in the cache, once it is old enough that no process still uses it."""
    now_s = time.time()
    for pattern in ("steps/*/*.tmp", "collected/*/*.tmp", "rulings/*.scratch-*", "*.doomed-*"):
        for leftover in cache.glob(pattern):
            if now_s - leftover.stat().st_mtime > older_than_s:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
