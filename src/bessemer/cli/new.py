"""`bessemer new`: starter projects around a served model."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, print_json


def new(
    kind: str = typer.Argument(help="endpoint (FastAPI with a container file) or web-form (Next.js with Supabase)."),
    folder: Path = typer.Argument(help="A new folder; its name is the project's."),
    as_json: bool = AS_JSON,
) -> None:
    """Write a starter project for a served model: a prediction endpoint, or a web form that calls it.

    Example: bessemer new endpoint my-endpoint
    """
    from bessemer.serve.project import new_project

    files = new_project(kind, folder)
    if as_json:
        print_json({"kind": kind, "folder": str(folder), "files": [str(path) for path in files]})
        return
    print("\n".join(str(path) for path in files))
    print(f"\nnext: read {folder / 'README.md'}, copy .env.example and fill in the keys")
