"""Checks that the files and folders that a spec names exist, for `bessemer spec check`.

Reads only the config.json of a model. Does not open URLs.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.spec.document import KeyPath
from bessemer.spec.quantity import format_value
from bessemer.spec.schema import RunSpec
from bessemer.spec.text_steps import StepSpec

Expected = Literal["file", "folder", "any"]
CHAT_TEMPLATES = ("chatml", "llama3", "plain", "none")  # other values of tokenizer.chat are files or templates
PYTHON_OBJECT = "python"  # the path of a source that is a Python object
# Keys of curation steps that hold paths: a path, a list of them, or a mapping of names to them.
STEP_PATHS: dict[str, dict[str, Expected]] = {
    "quality": {"model": "file"},
    "domain": {"model": "file"},
    "perplexity": {"model": "file"},
    "language": {"model": "file"},
    "toxicity": {"lexicons": "file", "classifier": "file"},
    "block_urls": {"lists": "any", "word_lists": "file", "soft_word_lists": "file"},
    "opt_out": {"lists": "any", "robots": "folder", "hashes": "file", "ids": "file"},
}


@dataclass(frozen=True)
class NamedPath:
    """A path, its key, and what it must be."""

    key: KeyPath
    path: str
    expected: Expected = "any"
    wildcards: bool = False


def named_paths(spec: RunSpec) -> Iterator[NamedPath]:
    """Every local path that the spec reads from."""
    prepares = spec.data.store is None  # published data needs no files
    for name, source in spec.data.sources.items() if prepares else ():
        for path in source.path:
            if path != PYTHON_OBJECT:
                yield NamedPath(("data", "sources", name, "path"), path, wildcards=True)
        yield from _step_paths(("data", "sources", name, "clean"), source.clean)
    yield from _step_paths(("data", "clean"), spec.data.clean if prepares else [])
    for path in spec.data.exclude:
        yield NamedPath(("data", "exclude"), path, "file")
    if spec.model.hf is not None:
        yield NamedPath(("model", "hf"), spec.model.hf, "folder")
    if spec.start_from is not None:
        yield NamedPath(("start_from",), spec.start_from, "folder")
    stored = spec.distill.stored and os.path.exists(os.path.expanduser(spec.distill.stored))
    for name, other in spec.models.items():
        if stored and name == "teacher":  # its predictions are there; it may be elsewhere
            continue
        yield NamedPath(("models", name, "path"), other.path, "folder")
    module = spec.objective.rpartition(":")[0]
    if module.endswith(".py") or "/" in module:
        yield NamedPath(("objective",), module, "file")
    yield from _of_rl(spec)
    if spec.tokenizer.path is not None:
        yield NamedPath(("tokenizer", "path"), spec.tokenizer.path)
    chat = spec.tokenizer.chat
    if chat not in CHAT_TEMPLATES and "{%" not in chat and "{{" not in chat:
        yield NamedPath(("tokenizer", "chat"), chat, "file")


def _of_rl(spec: RunSpec) -> Iterator[NamedPath]:
    """Functions, models, rubrics and schemas of rewards, and the environment."""
    rl = spec.rl
    for name, reward in rl.rewards.items():
        key: KeyPath = ("rl", "rewards", name)
        module = (reward.function or "").rpartition(":")[0]
        if module.endswith(".py") or "/" in module:
            yield NamedPath((*key, "function"), module, "file")
        if reward.model is not None:
            yield NamedPath((*key, "model"), reward.model, "folder")
        if reward.judge is not None:
            yield NamedPath((*key, "judge", "rubric"), reward.judge.rubric, "file")
        if isinstance(reward.json_schema, str):
            yield NamedPath((*key, "json_schema"), reward.json_schema, "file")
    module = (rl.environment or "").rpartition(":")[0]
    if module.endswith(".py") or "/" in module:
        yield NamedPath(("rl", "environment"), module, "file")
    if rl.generator is not None and rl.generator.folder is not None:
        yield NamedPath(("rl", "generator", "folder"), rl.generator.folder, "folder")


def _step_paths(key: KeyPath, steps: list[StepSpec]) -> Iterator[NamedPath]:
    for i, step in enumerate(steps):
        for name, expected in STEP_PATHS.get(step.step, {}).items():
            for path in _flat(getattr(step, name)):
                yield NamedPath((*key, i, step.step, name), path, expected)
        if step.step == "decontaminate":
            for name, evaluation_set in getattr(step, "sets").items():  # noqa: B009, steps have no common type with sets
                for path in evaluation_set.path:
                    yield NamedPath((*key, i, step.step, "sets", name), path, wildcards=True)
        module = (getattr(step, "function", None) or "").rpartition(":")[0]
        if module.endswith(".py") or "/" in module:
            yield NamedPath((*key, i, step.step, "function"), module, "file")


def _flat(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value.values() if isinstance(value, dict) else value)


def path_problems(
    spec: RunSpec, read_config: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[tuple[KeyPath, str]]:
    """(key, problem with its fix) of each unusable path. `read_config` raises UserError for a config.json that no
    native model can be built from."""
    for named in named_paths(spec):
        problem = find_path_problem(named)
        if problem is None and named.key == ("model", "hf"):
            problem = _model_problem(named.path, spec, read_config)
        if problem is None and named.key == ("start_from",):
            problem = _check_contains(
                named.path,
                "manifest.json",
                "is not a checkpoint: write for example runs/x/checkpoints/step-00001000.a1",
            )
        if problem is not None:
            yield named.key, problem


def find_path_problem(named: NamedPath) -> str | None:
    """Why the path cannot be used; None if it can, or if it is a URL."""
    scheme, separator, rest = named.path.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    try:
        path = os.path.expanduser(rest if separator else named.path)
        mode = "folder" if os.path.isdir(path) else "file"
        if named.wildcards and glob.has_magic(path) and not os.path.lexists(path):
            return (
                None
                if next(glob.iglob(path, recursive=True), None)
                else f"no file matches {format_value(named.path)}: correct the pattern"
            )
        os.stat(path)
        readable = os.access(path, os.R_OK | (os.X_OK if mode == "folder" else 0))
        if readable and mode == "folder" and named.expected != "file":
            with os.scandir(path) as entries:
                if next(entries, None) is None:
                    return f"{format_value(named.path)} is an empty folder: write another, or fill it"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return _explain_error(error, named)
    if not readable:
        return f"{format_value(named.path)} cannot be read: permission denied; change its permissions"
    if named.expected not in ("any", mode):
        return f"{format_value(named.path)} is a {mode}: write a {named.expected}"
    return None


def _explain_error(error: OSError | ValueError, named: NamedPath) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOENT, errno.ENOTDIR):
        kind = "file or folder" if named.expected == "any" else named.expected
        problem = (
            f"no such {kind}: {format_value(named.path)}: correct the path (relative to {format_value(os.getcwd())})"
        )
        if named.key == ("model", "hf") and re.fullmatch(r"[\w.-]+/[\w.-]+", named.path):
            name = named.path.partition("/")[2]
            problem += (
                f"; `hf download {named.path} --local-dir {name}` downloads a model of the Hub; then write hf: {name}"
            )
        return problem
    if code == errno.ENAMETOOLONG:
        return f"a path of {len(named.path)} characters is too long for this file system: {format_value(named.path)}"
    return f"{format_value(named.path)} cannot be read: {error.strerror if isinstance(error, OSError) else error}"


def _check_contains(folder: str, file: str, problem: str) -> str | None:
    return (
        None if os.path.isfile(os.path.join(os.path.expanduser(folder), file)) else f"{format_value(folder)} {problem}"
    )


def _model_problem(folder: str, spec: RunSpec, read_config: Callable[[dict[str, Any]], object] | None) -> str | None:
    if problem := _check_contains(folder, "config.json", "is not a model folder: it has no config.json"):
        return problem
    full = os.path.expanduser(folder)
    names = os.listdir(full)
    if not any(name.endswith(".safetensors") for name in names):
        return f"{format_value(folder)} has no weights: it needs model.safetensors or model.safetensors.index.json"
    if spec.tokenizer.path is None and not {"tokenizer.json", "tokenizer.model"} & set(names):
        return f"{format_value(folder)} has no tokenizer.json: write tokenizer: {{path: FILE}}"
    try:
        with open(os.path.join(full, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
        if read_config is not None and not spec.model.wrap:
            read_config(config)
    except UserError as error:
        return f"{format_value(folder)}: {error}"
    except (OSError, ValueError, RecursionError) as error:
        return f"{format_value(folder)}: config.json cannot be read ({error}): download or save it again"
    return None
