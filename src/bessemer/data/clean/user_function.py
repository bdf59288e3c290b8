"""A scoring function of the user's, found by its name: `module:name` or `path/to/file.py:name`. Only what a spec
names is ever run. A file has to stand alone, or import what is installed: only its own content is in its identity."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.clean.model_file import file_identity
from bessemer.errors import UserError


def function_identity(reference: str, key: str = "score") -> str:
    """A hash of the file that holds the function; what that file imports is not in it. Runs nothing of it, but the
    packages around a `module:name`. `key` is the step that a message speaks of."""
    return file_identity(_file_of(reference, key))


def load_function(reference: str, key: str = "score") -> Callable[..., Any]:
    """The function, imported once for each process and content of its file."""
    file, (where, _, name) = _file_of(reference, key), reference.rpartition(":")
    try:
        if _is_file(where):
            module = _run_file(file, Path(file).read_bytes())
        else:
            module = importlib.import_module(where)
    except Exception as error:
        raise _failed(reference, key, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        what = f"{key}.function {reference}: {file} has no function {name!r}"
        raise UserError(f"{what}; it has {', '.join(names) or 'none'}")
    function: Callable[..., Any] = found
    return function


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _file_of(reference: str, key: str) -> str:
    where, named = reference.rpartition(":")[0], f"{key}.function {reference}"
    if _is_file(where):
        path = Path(os.path.abspath(os.path.expanduser(where)))
        if not os.path.isfile(path):
            raise UserError(f"{named}: no file {path}; correct the path")
        return str(path)
    try:
        found = importlib.util.find_spec(where)
    except Exception as error:  # the packages around it are the user's code, which may raise anything
        raise _failed(reference, key, error) from error
    if found is None:
        raise UserError(f"{named}: no module {where!r} is installed; for a file write path/to/{where}.py:...")
    if not found.origin or not Path(found.origin).is_file():
        raise UserError(f"{named}: {where!r} has no file; name a module that has one")
    return found.origin


@lru_cache(maxsize=16)
def _run_file(path: str, source: bytes) -> types.ModuleType:
    """The module that a file makes; a changed file is run anew. Nothing is written beside it, as importing it would."""
    module = types.ModuleType(f"bessemer_score_{xxhash.xxh3_128_hexdigest(source)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except Exception:
        del sys.modules[module.__name__]
        raise
    return module


def _failed(reference: str, key: str, error: Exception) -> UserError:
    why = f"{type(error).__name__}: {error}"
    return UserError(f"{key}.function {reference}: cannot be imported ({why}); correct it")
