"""Starter projects (`bessemer new`): files from templates, with the project's name filled in.

Training projects make their own data and test themselves; the projects around a served model have secrets as
placeholders, `{project}_{env}_your_key_here`, in a file that is not read until it is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from bessemer.errors import UserError

# A kind's folders of templates, by package. `common` and `facts` are parts of several training projects.
_SERVED = {kind: (("bessemer.serve", kind),) for kind in ("endpoint", "web-form")}
_TRAINED = {
    "sentiment": ("common", "sentiment"),
    "text-generation": ("common", "text-generation-data", "text-generation"),
    "trades": ("common", "trades"),
    "continued-pretraining": ("common", "continued-pretraining"),
    "sft-lora": ("common", "facts", "sft-lora"),
    "dpo": ("common", "facts", "dpo"),
    "rlhf": ("common", "facts", "rlhf"),
    "cluster": ("common", "text-generation-data", "cluster"),
}
SERVED, TRAINED = tuple(_SERVED), tuple(_TRAINED)
KINDS = (*TRAINED, *SERVED)
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def new_project(kind: str, folder: Path) -> list[Path]:
    """Write a project into a new folder, whose name is the project's. Returns its files."""
    if kind not in KINDS:
        raise UserError(f"{kind}: no such project; write {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if not _NAME.fullmatch(folder.name):
        raise UserError(f"{folder.name!r}: a project's name has lower-case letters, digits, - and _, such as my-model")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already: choose another name")
    written = []
    for parts, template in _templates(kind):
        name = parts[-1].removesuffix(".tmpl")
        path = folder.joinpath(*parts[:-1], f".{name[4:]}" if name.startswith("dot-") else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template.read_text(encoding="utf-8").replace("{{project}}", folder.name), encoding="utf-8")
        written.append(path)
    return written


def _templates(kind: str) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    """A project's templates with their places in it."""
    parts = _SERVED.get(kind) or [("bessemer.starters", name) for name in _TRAINED[kind]]
    for package, name in parts:
        yield from _files(resources.files(package).joinpath("templates", name))


def _files(folder: Traversable, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.is_dir():
            yield from _files(entry, (*parts, entry.name))
        elif entry.name.endswith(".tmpl"):
            yield (*parts, entry.name), entry
