"""`bessemer new`: starter projects for training, and around a served model."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import AS_JSON, print_json
from bessemer.errors import UserError


def new(
    kind: str | None = typer.Argument(
        None,
        help="sentiment, text-generation, trades, continued-pretraining, sft-lora, dpo, rlhf, cluster; for a served "
        "model: endpoint (FastAPI with a container file), web-form (Next.js with Supabase).",
    ),
    folder: Path | None = typer.Argument(None, help="A new folder; its name is the project's."),
    as_json: bool = AS_JSON,
) -> None:
    """Write a starter project with data, spec, tests and a README.

    The data is generated on this machine. `endpoint` and `web-form` are projects around a served model.

    Example: bessemer new sft-lora my-assistant
    """
    from bessemer.starters.project import KINDS, new_project

    if kind is None or folder is None:
        example = "bessemer new sft-lora my-assistant"
        raise UserError(f"name a project and a new folder, such as: {example}; there are {', '.join(KINDS)}")
    files = new_project(kind, folder)
    if as_json:
        print_json({"kind": kind, "folder": str(folder), "files": [str(path) for path in files]})
        return
    print("\n".join(str(path) for path in files))
    keys = ", copy .env.example and fill in the keys" if (folder / ".env.example").exists() else ""
    print(f"\nnext: read {folder / 'README.md'}{keys}")
