"""Scores one model on tasks of every kind: names of the suite, lm-eval's definitions, and questions of your own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml

from bessemer.errors import UserError
from bessemer.evaluate.harness import FEWSHOT_SEED, load_tasks, run_harness, unchanged_random_state
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.own_tasks import TaskQuestion, read_questions, run_questions
from bessemer.evaluate.results import Evaluation, TaskResult, make_hash
from bessemer.evaluate.suite import (
    CODE,
    SUITE,
    data_folder,
    definition_data,
    expand,
    how_to_get,
    pool,
    run_code_suite,
    task_data,
    write_definitions,
    yaml_key,
)
from bessemer.spec.load import read_text

QUESTIONS, DEFINITIONS = (".jsonl",), (".yaml", ".yml")


@dataclass(frozen=True)
class TaskSettings:
    """What is asked and how. `tasks` are names and paths; `formats` prompt formats are tried on own questions."""

    tasks: tuple[str, ...]
    limit: int | None = None
    shots: int | None = None
    chat: bool = False
    data: Path | None = None
    seed: int = FEWSHOT_SEED
    formats: int = 1

    def to_json(self) -> dict[str, Any]:
        return {"tasks": list(self.tasks), "limit": self.limit, "num_fewshot": self.shots, "chat": self.chat,
                "fewshot_seed": self.seed, "formats": self.formats}  # fmt: skip


@dataclass(frozen=True)
class TaskList:
    """The names of the tasks, sorted by who runs them. Files are read and checked."""

    own: dict[str, list[TaskQuestion]]
    definitions: dict[str, Path]  # by the name of the task
    suite: list[str]
    built_in: list[str]


def open_tasks(settings: TaskSettings) -> TaskList:
    """Reads what can be read before a model is loaded, so that mistakes come first."""
    task_list = TaskList({}, {}, [], [])
    for name in expand(settings.tasks):
        path = Path(os.path.expanduser(name))
        if path.suffix in (*QUESTIONS, *DEFINITIONS):
            task = path.stem if path.suffix in QUESTIONS else _task_name(path)
            if task in {**task_list.own, **task_list.definitions}:
                raise UserError(f"--tasks {name}: another task is named {task!r}, and scores go by name: rename one")
            if path.suffix in QUESTIONS:
                task_list.own[task] = read_questions(path)
            else:
                task_list.definitions[task] = path
        elif name in SUITE:
            task_list.suite.append(name)
        else:
            task_list.built_in.append(name)
    if task_list.suite:
        data_folder(settings.data)
    return task_list


def registration(settings: TaskSettings) -> dict[str, str]:
    """A hash for each task, of its files and their data and of how it is asked: what a pre-registered suite must not
    change."""
    settings_hash = make_hash([settings.limit, settings.shots, settings.chat, settings.seed])
    hashes = {}
    for name in expand(settings.tasks):
        path = Path(os.path.expanduser(name))
        files = [path] if path.is_file() else []
        if path.is_file() and path.suffix in DEFINITIONS:
            files += definition_data(read_text(path))
        elif name in SUITE:
            files += task_data(name, data_folder(settings.data))
        content = xxhash.xxh3_128(b"" if path.is_file() else name.encode())
        for file in files:
            content.update(file.read_bytes())
        hashes[name] = f"{content.hexdigest()}-{settings_hash}"
    return hashes


def run_tasks(model: LanguageModel, settings: TaskSettings, tasks: TaskList | None = None) -> Evaluation:
    """All scores, in the order: own questions, definitions, suite, built-in. Global random generators stay as they
    are."""
    with unchanged_random_state():
        return _run_tasks(model, settings, tasks or open_tasks(settings))


def _run_tasks(model: LanguageModel, settings: TaskSettings, tasks: TaskList) -> Evaluation:
    results: list[TaskResult] = []
    raw: dict[str, Any] = {}
    for name, questions in tasks.own.items():
        results += run_questions(
            model, name, questions, settings.shots, settings.seed, settings.limit, settings.formats
        )  # fmt: skip
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        groups: dict[str, list[str]] = {}
        if harness := [name for name in tasks.suite if name not in CODE]:
            groups, notes = write_definitions(harness, data_folder(settings.data), Path(scratch))
        folders = [path.parent for path in tasks.definitions.values()] + [Path(scratch)] * bool(groups)
        names = [*tasks.definitions, *(task for made in groups.values() for task in made)]
        if names:
            results += _run_harness(model, settings, names, folders, groups, raw)
    if tasks.built_in:
        results += _run_harness(model, settings, tasks.built_in, [], {}, raw)
    for name in tasks.suite:
        if name in CODE:
            place = data_folder(settings.data) / name
            if not place.is_dir():
                notes.append(f"{name}: no data: {how_to_get(name, place)}")
            else:
                results.append(run_code_suite(model, name, place, settings.limit, settings.shots))
    if notes and not results:
        raise UserError("; ".join(notes))
    settings_json = settings.to_json() | {"prefix": model.prefix_rule, "truncated": model.scorer.truncated}
    settings_json |= {"missing": notes, "registration": registration(settings)}
    return Evaluation("", results, settings=settings_json, harness=raw)


def _run_harness(
    model: LanguageModel, settings: TaskSettings, names: Sequence[str], folders: Sequence[Path],
    groups: dict[str, list[str]], raw: dict[str, Any],
) -> list[TaskResult]:  # fmt: skip
    """Tasks of lm-eval. A named task of several parts is also scored as a whole."""
    shots = {task: SUITE[name].shots for name, made in groups.items() for task in made}
    results: list[TaskResult] = []
    for count in sorted({shots.get(name, -1) for name in names}):
        chosen = [name for name in names if shots.get(name, -1) == count]
        usual = None if count < 0 else count
        wanted = usual if settings.shots is None else settings.shots
        loaded = load_tasks(chosen, folders, wanted, settings.seed)
        task_list, part = run_harness(model, loaded, settings.limit)
        results += task_list
        for key, value in part.items():
            if isinstance(value, dict) and key != "config":
                raw.setdefault(key, {}).update(value)
    for name, made in groups.items():
        if len(made) > 1 and name != "truthfulqa":
            results += pool(name, [result for result in results if result.task in made])
    return results


def _task_name(path: Path) -> str:
    text = read_text(path, "a task definition of lm-eval")
    try:
        name = yaml_key(text, "task") or yaml_key(text, "group")
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"--tasks {path}: is not YAML ({problem}); correct it") from None
    if name is None:
        raise UserError(f"--tasks {path}: has no `task:`; write an lm-eval task definition")
    return name
