"""Tables on standard output: as wide as the terminal, and never cut where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
