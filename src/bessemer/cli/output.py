"""What commands print: tables as wide as the terminal (never cut where there is none), messages that name the spec."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.errors import UserError

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
    from bessemer.data.store_format import PREPARE_COMMAND

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
