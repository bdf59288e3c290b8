"""The same run for other frameworks: `emit` turns a spec into their files, the line that starts them, and notes.

Nothing is dropped in silence: a key of the spec that a framework has no counterpart for is in the notes, and in the
files as a comment where these can hold one.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.errors import UserError
from bessemer.launch.emit.resolve import EmittedFiles, KeyLedger, write_files

if TYPE_CHECKING:
    from bessemer.launch.emit.resolve import ResolvedRun
    from bessemer.spec.schema import RunSpec

__all__ = ["FRAMEWORKS", "EmittedFiles", "emit", "write_files"]

FRAMEWORKS = ("accelerate", "deepspeed", "megatron", "torchtitan", "axolotl")


def emit(framework: str, spec: RunSpec, folder: str | Path = "", processes: int | None = None) -> EmittedFiles:
    """The files of a run for one framework, to be written to `folder` (default: `NAME-FRAMEWORK`).

    Prepares the spec's data if that has not been done, as training would, and decides what is `auto`. `processes`
    replaces the spec's data-parallel replicas. Nothing is written to `folder`; see `write_files`.
    """
    if framework not in FRAMEWORKS:
        raise UserError(f"--emit {framework}: write one of {', '.join(FRAMEWORKS)}")
    from bessemer.launch.emit.resolve import resolve

    return render(framework, resolve(spec, Path(folder or f"{spec.name}-{framework}"), processes))


def render(framework: str, run: ResolvedRun) -> EmittedFiles:
    """The files of a run that is decided already; costs nothing."""
    ledger = KeyLedger(run.spec, framework)
    made: EmittedFiles = import_module(f"bessemer.launch.emit.{framework}").write(run, ledger)
    lines = "".join(f"- {note}\n" for note in made.notes)
    told = f"# {run.spec.name} for {framework}\n\n```\n{made.command}\n```\n\nWhat is different there:\n\n{lines}"
    return EmittedFiles(run.shared_files() | made.files | {"NOTES.md": told}, made.command, made.notes)
