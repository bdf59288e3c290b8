"""Tables on standard output: as wide as the terminal, and never cut where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 10_000  # columns; a pipe or a file has no width


def table_console() -> Console:
    """A console to print tables on."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = UNLIMITED
    return console
