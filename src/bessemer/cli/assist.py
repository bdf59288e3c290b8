"""`bessemer mcp` serves the verbs to coding assistants; `bessemer assist install` writes their skills and settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bessemer.cli.console import AS_JSON, CommandGroup, print_json
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.assist.verbs import Verb

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Set up coding assistants to work with Bessemer.\n\nExample: bessemer assist install --for claude",
)


@app.callback()
def _group() -> None:
    """Keeps `install` a word of its own."""


def all_verbs() -> list[Verb]:
    """Every verb of the command line."""
    from bessemer.assist.verbs import collect_verbs
    from bessemer.cli.main import app as root

    return list(collect_verbs(typer.main.get_command(root)))


def mcp(
    root: Path = typer.Option(Path("."), "--root", help="The folder to work in; paths outside it are refused."),
    allow: list[str] = typer.Option(
        [], "--allow",
        help="write: new files. run: also train, submit, control and delete. ask: a person confirms each call. "
        "Repeatable (default: reading only).",
    ),
    http: bool = typer.Option(False, "--http", help="Serve HTTP with a token instead of standard input and output."),
    host: str = typer.Option("127.0.0.1", "--host", help="With --http: the address; others than this machine's need "
                             "the token to be set."),
    port: int = typer.Option(8801, "--port", min=0, max=65535, help="With --http; 0 takes a free one."),
    token: str = typer.Option("", envvar="BESSEMER_MCP_TOKEN", hidden=True),
) -> None:  # fmt: skip
    """Serve the verbs as tools to coding assistants (Model Context Protocol).

    With --http, clients send the token in BESSEMER_MCP_TOKEN; without it a new one is printed.

    Example: bessemer mcp --root . --allow ask
    """
    try:
        from bessemer.assist.server import Assistant
        from bessemer.assist.transport import serve_http, serve_stdio
    except ImportError as error:
        raise UserError(f"mcp needs {error.name}: pip install 'bessemer[mcp]'") from None
    from bessemer.assist.access import Permission

    if not root.is_dir():
        raise UserError(f"--root {root}: no such folder")
    assistant = Assistant(all_verbs(), root, Permission.parse(allow))
    if http:
        serve_http(assistant, host, port, token)
    else:
        serve_stdio(assistant)


@app.command()
def install(
    assistants: list[str] = typer.Option(
        ..., "--for", help="claude, cursor, codex, cline, opencode, openclaw, kimi or gemini. Repeatable."
    ),
    folder: Path = typer.Option(Path("."), "--folder", help="The project to set up."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only print what would be written."),
    as_json: bool = AS_JSON,
) -> None:
    """Write the skill or rules and the MCP server's entry of coding assistants. Their other settings stay as they are.

    The server only reads; add `--allow write`, `run` or `ask` to its arguments to allow more. The same command again
    replaces the files of earlier versions.

    Example: bessemer assist install --for claude --for codex --dry-run
    """
    from bessemer.assist.install import plan_install, write_changes

    if not folder.is_dir():
        raise UserError(f"--folder {folder}: no such folder")
    changes = plan_install(assistants, folder, Path.home(), all_verbs())
    if not dry_run:
        write_changes(changes)
    if as_json:
        print_json({"dry_run": dry_run, "files": [change.to_json() for change in changes]})
        return
    for change in changes:
        would = "would be " if dry_run and change.action in ("written", "updated") else ""
        print(f"{would}{change.action}  {change.path}")
