"""The steps of a spec over all parts of all sources: what is due, what the cache already has, and in which order. A
part's state after some steps has a key: a hash of what it reads and of those steps. A local step depends on nothing
else, so adding a file to a source leaves the work on other parts valid; a global step's key covers all the parts that
it compared."""

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

from bessemer.data.curate.engine import Engine, Meter, each
from bessemer.data.curate.ledger import (
    StepCounts,
    collected_path,
    counts_path,
    ledger_damage,
    ledger_path,
    quarantine_path,
    read_cached,
    read_json,
    read_tally,
    ruling_path,
    save_arrays,
    write_json,
)
from bessemer.data.curate.passes import Census, Op, PassTask, Reading, Split, curated_documents, run_pass
from bessemer.data.curate.step import Collected, identity, is_global, make_step
from bessemer.data.document import Document
from bessemer.data.read import FileEntry, SourcePart, divide
from bessemer.errors import UserError
from bessemer.spec.curate.step import StepSpec
from bessemer.spec.curate.text import ExtractSpec
from bessemer.spec.data import DataSpec, SourceSpec

RULES_VERSION = 1  # raise it when the same files and steps would give other documents
_MARKUP = {"html", "warc"}
_HASHING_THREADS = 8


@dataclass
class PartState:
    """A part on its way through the steps."""

    part: SourcePart
    source: SourceSpec
    read_key: str
    key: str  # after the last step that is done or due
    done: list[str] = field(default_factory=list)  # ledgers of the steps that are done
    due: list[Op] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)  # of each step, done or due: its place in Corpus.stages
    reading: Reading | None = None
    census: Census | None = None


@dataclass
class Stage:
    """A step as the report shows it: once for the corpus, or once for the source it belongs to."""

    step: str
    settings: dict[str, Any]
    source: str | None  # None: all sources together
    tallies: dict[str, StepCounts] = field(default_factory=dict)  # by source
    summary: dict[str, Any] = field(default_factory=dict)  # of a global step


class Corpus:
    """All parts of all sources. `curate` brings them through their steps; afterwards `documents` reads the result."""

    def __init__(
        self, data: DataSpec, files: dict[str, list[FileEntry]], cache: Path, engine: Engine, meter: Meter
    ) -> None:
        self.data, self.cache, self.engine, self.meter = data, cache, engine, meter
        self.copies = cache / "copies"
        self.notes: list[str] = []  # damage that was mended
        self.stages: list[Stage] = []
        self.parts: list[PartState] = []
        for name, source in data.sources.items():
            how = [RULES_VERSION, source.text_field, source.id_field, source.url_field, source.messages_field]
            for part in divide(name, files[name], source, data.part, self.copies, self._each):
                key = digest(["read", part.key, *how])
                self.parts.append(PartState(part, source, key, key))
        formats = {name: {entry.format for entry in entries} for name, entries in files.items()}
        self._markup = {name for name, found in formats.items() if _MARKUP & found}

    def curate(self, split: Split) -> None:
        """All steps of all sources. What the cache holds is not done again."""
        for name, source in self.data.sources.items():
            own = [state for state in self.parts if state.part.source == name]
            steps = list(source.clean)
            if name in self._markup and not any(isinstance(step, ExtractSpec) for step in steps):
                steps.insert(0, ExtractSpec())
            for step in steps:
                self._add(step, own, name)
        for step in self.data.clean:
            self._add(step, self.parts, None)
        self._run("reading" if not self.stages else "cleaning", self.parts, None, split)
        for stage in self.stages:
            stage.tallies = {name: stage.tallies[name] for name in self.data.sources if name in stage.tallies}

    def documents(self, state: PartState) -> Iterator[tuple[int, Document]]:
        return curated_documents(state.part, state.source, self.cache, state.done, self.copies)

    def _each(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        return each(self.engine, function, tasks)

    def _add(self, spec: StepSpec, states: list[PartState], source: str | None) -> None:
        made = make_step(spec, 0)
        settings = spec.model_dump(mode="json")[spec.step]
        stage = len(self.stages)
        self.stages.append(Stage(spec.step, settings, source))
        what = [spec.step, settings, *identity(made)]
        rulings: list[str | None] = [None] * len(states)
        if is_global(made):
            # What a step collects does not change with the settings that only its judgement reads.
            reads = {key: value for key, value in settings.items() if key not in getattr(made, "judging", ())}
            key = ["collect", spec.step, reads, *identity(made)]
            gathered = [Op(spec, digest([state.key, *key])) for state in states]
            together = digest(["ruling", [state.key for state in states], *what])
            paths = [ruling_path(self.cache, together, i) for i in range(len(states))]
            summary = read_cached(self.cache / "rulings" / together / "summary.json")
            if summary is None or not all(path.exists() for path in paths):
                self._run(f"reading for {spec.step}", states, gathered, None)
                self._resolve(spec, together, states, gathered)
                summary = read_json(self.cache / "rulings" / together / "summary.json")
            self.stages[stage].summary = summary
            rulings = [str(path) for path in paths]
            what = [*what, together]
        for state, ruling in zip(states, rulings, strict=True):
            state.key = digest([state.key, *what, ruling and Path(ruling).name])
            state.due.append(Op(spec, state.key, ruling))
            state.stages.append(stage)

    def _resolve(self, spec: StepSpec, key: str, states: list[PartState], gathered: list[Op]) -> None:
        """A global step's judgement over everything collected."""
        step = make_step(spec, 0)
        assert is_global(step)
        collected = [
            Collected(i, collected_path(self.cache, op.key), state.part.source, _of(state.reading).documents)
            for i, (state, op) in enumerate(zip(states, gathered, strict=True))
        ]
        self.meter.say(f"{spec.step}: comparing {sum(one.documents for one in collected):,} documents")
        folder = self.cache / "rulings" / key
        scratch = folder.with_name(f"{key}.scratch-{uuid.uuid4().hex[:8]}")
        scratch.mkdir(parents=True)
        try:
            rulings, about = step.resolve(collected, scratch, self._each)
            for i, ruling in enumerate(rulings):
                save_arrays(ruling_path(self.cache, key, i), dict(ruling))
            write_json(folder / "summary.json", about)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if getattr(step, "bulky", False):
            for one in collected:
                one.path.unlink(missing_ok=True)

    def _run(self, what: str, states: list[PartState], collect: Sequence[Op] | None, split: Split | None) -> None:
        """Brings every part through the steps that are due, and collects or takes the census at the end."""
        tasks: list[PassTask] = []
        waiting: list[PartState] = []
        intact = self._intact_ledgers(states)
        for i, state in enumerate(states):
            census = (digest(["census", state.key, split.seed, split.share]), split) if split else None
            task = self._task(state, collect[i] if collect else None, census, intact)
            if task is not None:
                tasks.append(task)
                waiting.append(state)
        self.meter.start(what, sum(task.part.size_bytes for task in tasks))
        for i, result in self.engine.run(run_pass, tasks):
            waiting[i].reading, waiting[i].census = result
            self.meter.advance(tasks[i].part.size_bytes)
            # A wrong field shows early.
            self._check_bad_rows(states, max(self.data.bad_rows, 0.5), least=10_000)
        self._check_bad_rows(states, self.data.bad_rows)
        for state in states:  # in order, so that sums of numbers come out the same for any number of workers
            for op, stage in zip(state.due, state.stages[len(state.done) :], strict=True):
                tallies = self.stages[stage].tallies
                tally = read_tally(ledger_path(self.cache, op.key))
                tallies.setdefault(state.part.source, StepCounts()).add(tally)
            state.done += [op.key for op in state.due]
            state.due = []

    def _intact_ledgers(self, states: Sequence[PartState]) -> set[str]:
        """The keys of the due steps that an earlier call finished. Hashing their ledgers reads what is read next."""
        keys = list(dict.fromkeys(op.key for state in states for op in state.due))
        keys = [key for key in keys if counts_path(self.cache, key).exists()]
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            damages = list(pool.map(lambda key: ledger_damage(ledger_path(self.cache, key)), keys))
        self.notes += [f"{damage}: the step is run again on this part" for damage in damages if damage]
        return {key for key, damage in zip(keys, damages, strict=True) if damage is None}

    def _task(
        self, state: PartState, collect: Op | None, census: tuple[str, Split] | None, intact: set[str]
    ) -> PassTask | None:
        """What is missing of a part, or None."""
        found = next((i for i, op in enumerate(state.due) if op.key not in intact), len(state.due))
        reading = read_cached(counts_path(self.cache, state.read_key), Reading.__dataclass_fields__)
        complete = found == len(state.due) and reading is not None
        if collect is not None:
            complete = complete and collected_path(self.cache, collect.key).exists()
        if census is not None:
            counted = read_cached(counts_path(self.cache, census[0]), Census.__dataclass_fields__)
            complete = complete and counted is not None
            if complete and counted is not None:
                state.census = Census(**{name: counted[name] for name in Census.__dataclass_fields__})
        if complete and reading is not None:
            state.reading = Reading(**{name: reading[name] for name in Reading.__dataclass_fields__})
            return None
        done = (*state.done, *(op.key for op in state.due[:found]))
        return PassTask(
            state.part, state.source, self.cache, state.read_key, done, tuple(state.due[found:]), collect, census,
            self.copies,
        )  # fmt: skip

    def _check_bad_rows(self, states: Sequence[PartState], most: float, least: int = 0) -> None:
        """Past the limit the job stops; the rows are in the quarantine files either way."""
        for name in dict.fromkeys(state.part.source for state in states):
            read = [state for state in states if state.part.source == name and state.reading]
            bad = sum(_of(state.reading).bad for state in read)
            rows = bad + sum(_of(state.reading).documents + _of(state.reading).empty for state in read)
            if bad <= most * rows or rows < least:
                continue
            state = next(state for state in read if _of(state.reading).bad)
            first = _of(state.reading).examples[0]
            aside = quarantine_path(self.cache, state.read_key)
            limit = f"data.bad_rows allows {self.data.bad_rows:.3g} of them"
            rest = f"; they are set aside in {aside}" if bad > 1 else ""
            raise UserError(
                f"source {name!r}: {first['file']}:{first['row']}: {first['reason']} "
                f"({bad:,} of {rows:,} rows cannot be used and {limit}{rest})"
            )


def _of(reading: Reading | None) -> Reading:
    assert reading is not None, "the part has been read"
    return reading


def digest(what: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode()))


def sweep(cache: Path, older_than_s: float = 86_400) -> None:
    """Deletes what killed processes left in the cache of steps long enough ago for nobody to be at it still."""
    now_s = time.time()
    for pattern in ("steps/*/*.tmp", "collected/*/*.tmp", "rulings/*.scratch-*", "*.doomed-*"):
        for leftover in cache.glob(pattern):
            if now_s - leftover.stat().st_mtime > older_than_s:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
