"""How groups of commands show themselves: each command with its first sentence, wrapped and never cut.

What commands print: tables as wide as the terminal (never cut where there is none), messages that name the spec.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

from bessemer.errors import UserError


def first_sentence(help: str) -> str:
    """Of a docstring or a help text. `Kubernetes, ...` ends no sentence."""
    paragraph = " ".join(help.split("\n\n")[0].split())
    return re.split(r"(?<=[^.]\.) (?=[A-Z`])", paragraph)[0]


class CommandGroup(TyperGroup):
    """A group whose help has the whole first sentence of each command; typer's cuts it at the width of the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, first_sentence(command.help or "")) for name, command in commands if command and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNLIMITED = 10_000  # columns; a pipe or a file has no width


def table_console() -> Console:
    """A console to print tables on."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = UNLIMITED
    return console


def print_table(table: Table) -> None:
    """Print a table without the spaces that fill its last column: one long cell would pad every row."""
    console = table_console()
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def name_spec(message: str, spec: Path, settings: Sequence[str] = ()) -> str:
    """A message that says `bessemer data prepare SPEC`, with the spec and the settings of this command."""
    from bessemer.data.store.format import PREPARE_COMMAND

    overrides = [part for setting in settings for part in ("--set", setting)]
    return message.replace(PREPARE_COMMAND, shlex.join([*PREPARE_COMMAND.split()[:-1], str(spec), *overrides]))


@contextmanager
def naming_spec(spec: Path, settings: Sequence[str]) -> Iterator[None]:
    """Errors raised inside name the spec, as in `name_spec`."""
    try:
        yield
    except UserError as error:
        error.args = (name_spec(str(error), spec, settings),)
        raise
