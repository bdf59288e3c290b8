"""A scoring function of the user's, found by its name: `module:name` or `path/to/file.py:name`.

Only what a spec names is ever run. A file has to stand alone, or import what is installed: only its own content is in
its identity.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from bessemer.data.clean.model_file import file_identity
from bessemer.errors import UserError


def function_identity(reference: str) -> str:
    """A hash of the file that holds the function; what that file imports is not in it. Runs nothing of it, but the
    packages around a `module:name`."""
    return file_identity(_file_of(reference))


def load_function(reference: str) -> Callable[..., Any]:
    """The function, imported once for each process and content of its file."""
    file, name = _file_of(reference), reference.rpartition(":")[2]
    if _is_file(reference):
        module = _run_file(file, Path(file).read_bytes(), reference)
    else:
        module = _imported(reference)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"score.function {reference}: {file} has no function {name!r}; it has {', '.join(names) or 'none'}"
        )
    function: Callable[..., Any] = found
    return function


def _is_file(reference: str) -> bool:
    where = reference.rpartition(":")[0]
    return where.endswith(".py") or "/" in where


def _file_of(reference: str) -> str:
    where = reference.rpartition(":")[0]
    if _is_file(reference):
        path = Path(where).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"score.function {reference}: no file {path}; correct the path")
        return str(path)
    try:
        found = importlib.util.find_spec(where)
    except Exception as error:  # the packages around it are the user's code, which may raise anything
        raise _failed(reference, error) from error
    if found is None:
        raise UserError(
            f"score.function {reference}: no module {where!r} is installed; for a file write path/to/{where}.py:..."
        )
    if not found.origin or not Path(found.origin).is_file():
        raise UserError(f"score.function {reference}: {where!r} has no file; name a module that has one")
    return found.origin


@lru_cache(maxsize=16)
def _run_file(path: str, source: bytes, reference: str) -> types.ModuleType:
    """The module that a file makes; a changed file is run anew. Nothing is written beside it, as importing it would."""
    module = types.ModuleType(f"bessemer_score_{xxhash.xxh3_128_hexdigest(source)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        raise _failed(reference, error) from error
    return module


def _imported(reference: str) -> types.ModuleType:
    try:
        return importlib.import_module(reference.rpartition(":")[0])
    except Exception as error:
        raise _failed(reference, error) from error


def _failed(reference: str, error: Exception) -> UserError:
    return UserError(
        f"score.function {reference}: cannot be imported ({type(error).__name__}: {error}); correct it"
    )
