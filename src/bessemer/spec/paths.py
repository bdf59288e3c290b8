"""The files and folders that a spec names, and whether they are there: what `bessemer spec check` looks for.

Nothing is read but a model's config.json. URLs are not asked for.
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
from bessemer.spec.curate.step import StepSpec
from bessemer.spec.document import Path
from bessemer.spec.quantity import shown
from bessemer.spec.schema import RunSpec

Expected = Literal["file", "folder", "any"]
LAYOUTS = ("chatml", "llama3", "plain")  # of conversations; other values of tokenizer.chat are files or templates
OBJECT = "python"  # the path of a source that is given as an object of Python
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
    """A path as written, the key that holds it, and what has to be there."""

    key: Path
    path: str
    expected: Expected = "any"
    wildcards: bool = False


def named_paths(spec: RunSpec) -> Iterator[NamedPath]:
    """Every local path that the spec reads from."""
    prepares = spec.data.store is None  # published data is read, or files are
    for name, source in spec.data.sources.items() if prepares else ():
        for path in source.path:
            if path != OBJECT:
                yield NamedPath(("data", "sources", name, "path"), path, wildcards=True)
        yield from _step_paths(("data", "sources", name, "clean"), source.clean)
    yield from _step_paths(("data", "clean"), spec.data.clean if prepares else [])
    for path in spec.data.exclude:
        yield NamedPath(("data", "exclude"), path, "file")
    if spec.model.hf is not None:
        yield NamedPath(("model", "hf"), spec.model.hf, "folder")
    if spec.start_from is not None:
        yield NamedPath(("start_from",), spec.start_from, "folder")
    if spec.tokenizer.path is not None:
        yield NamedPath(("tokenizer", "path"), spec.tokenizer.path)
    chat = spec.tokenizer.chat
    if chat not in LAYOUTS and "{%" not in chat and "{{" not in chat:
        yield NamedPath(("tokenizer", "chat"), chat, "file")


def _step_paths(key: Path, steps: list[StepSpec]) -> Iterator[NamedPath]:
    for i, step in enumerate(steps):
        for name, expected in STEP_PATHS.get(step.step, {}).items():
            for path in _flat(getattr(step, name)):
                yield NamedPath((*key, i, step.step, name), path, expected)
        if step.step == "decontaminate":
            for name, one in getattr(step, "sets").items():  # noqa: B009, steps have no common type with sets
                for path in one.path:
                    yield NamedPath((*key, i, step.step, "sets", name), path, wildcards=True)
        where = (getattr(step, "function", None) or "").rpartition(":")[0]
        if where.endswith(".py") or "/" in where:
            yield NamedPath((*key, i, step.step, "function"), where, "file")


def _flat(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value.values() if isinstance(value, dict) else value)


def path_problems(
    spec: RunSpec, read_config: Callable[[dict[str, Any]], object] | None = None
) -> Iterator[tuple[Path, str]]:
    """(key, problem with its fix) of each path that cannot be used. `read_config` raises UserError for a config.json
    that no native model can be built from."""
    for named in named_paths(spec):
        problem = missing(named)
        if problem is None and named.key == ("model", "hf"):
            problem = _model_problem(named.path, spec, read_config)
        if problem is None and named.key == ("start_from",):
            problem = _without(
                named.path, "manifest.json", "is not a checkpoint: give runs/x/checkpoints/step-00001000.a1"
            )
        if problem is not None:
            yield named.key, problem


def missing(named: NamedPath) -> str | None:
    """Why the path cannot be used; None where it can, or where it is a URL."""
    scheme, mark, rest = named.path.partition("://")
    if mark and scheme not in ("file", "local"):
        return None
    try:
        path = os.path.expanduser(rest if mark else named.path)
        mode = "folder" if os.path.isdir(path) else "file"
        if named.wildcards and glob.has_magic(path) and not os.path.lexists(path):
            return (
                None
                if next(glob.iglob(path, recursive=True), None)
                else f"nothing matches {shown(named.path)}: correct it"
            )
        os.stat(path)
        readable = os.access(path, os.R_OK | (os.X_OK if mode == "folder" else 0))
        if readable and mode == "folder" and named.expected != "file":
            with os.scandir(path) as entries:
                if next(entries, None) is None:
                    return f"{shown(named.path)} is an empty folder: give another, or fill it"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        return _why(error, named)
    if not readable:
        return f"{shown(named.path)} cannot be read: permission denied"
    if named.expected not in ("any", mode):
        return f"{shown(named.path)} is a {mode}: give a {named.expected}"
    return None


def _why(error: OSError | ValueError, named: NamedPath) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOENT, errno.ENOTDIR):
        what = {"any": "file or folder", "file": "file", "folder": "folder"}[named.expected]
        problem = f"no such {what}: {shown(named.path)}: correct the path (it starts from {shown(os.getcwd())})"
        if named.key == ("model", "hf") and re.fullmatch(r"[\w.-]+/[\w.-]+", named.path):
            name = named.path.partition("/")[2]
            problem += (
                f"; `hf download {named.path} --local-dir {name}` fetches a model of the Hub, then write hf: {name}"
            )
        return problem
    if code == errno.ENAMETOOLONG:
        return f"a path of {len(named.path)} characters is longer than this file system takes: {shown(named.path)}"
    return f"{shown(named.path)} cannot be read: {error.strerror if isinstance(error, OSError) else error}"


def _without(folder: str, file: str, problem: str) -> str | None:
    return None if os.path.isfile(os.path.join(os.path.expanduser(folder), file)) else f"{shown(folder)} {problem}"


def _model_problem(folder: str, spec: RunSpec, read_config: Callable[[dict[str, Any]], object] | None) -> str | None:
    if problem := _without(folder, "config.json", "is not a model's folder: it has no config.json"):
        return problem
    full = os.path.expanduser(folder)
    names = os.listdir(full)
    if not any(name.endswith(".safetensors") for name in names):
        return f"{shown(folder)} has no weights: there should be model.safetensors or model.safetensors.index.json"
    if spec.tokenizer.path is None and not {"tokenizer.json", "tokenizer.model"} & set(names):
        return f"{shown(folder)} has no tokenizer.json: write tokenizer: {{path: FILE}}"
    try:
        with open(os.path.join(full, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("not an object in braces")
        if read_config is not None and not spec.model.wrap:
            read_config(config)
    except UserError as error:
        return f"{shown(folder)}: {error}"
    except (OSError, ValueError, RecursionError) as error:
        return f"{shown(folder)}: config.json cannot be read ({error}): download or save it again"
    return None
