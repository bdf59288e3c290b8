"""Starter projects around a served model (`bessemer new`): files from templates, with the project's name filled in.

Secrets are placeholders, `{project}_{env}_your_key_here`, in a file that is not read until it is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from bessemer.errors import UserError

KINDS = ("endpoint", "web-form")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def new_project(kind: str, folder: Path) -> list[Path]:
    """Write a project into a new folder, whose name is the project's. Returns its files."""
    if kind not in KINDS:
        raise UserError(f"{kind}: no such project; write {' or '.join(KINDS)}")
    if not _NAME.fullmatch(folder.name):
        raise UserError(f"{folder.name!r}: a project's name has lower-case letters, digits, - and _, such as my-model")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already: choose another name")
    written = []
    for parts, template in _files(resources.files("bessemer.serve").joinpath("templates", kind)):
        name = parts[-1].removesuffix(".tmpl")
        path = folder.joinpath(*parts[:-1], f".{name[4:]}" if name.startswith("dot-") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.read_text(encoding="utf-8").replace("{{project}}", folder.name), encoding="utf-8")
        written.append(path)
    return written


def _files(folder: Traversable, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.is_dir():
            yield from _files(entry, (*parts, entry.name))
        elif entry.name.endswith(".tmpl"):
            yield (*parts, entry.name), entry
