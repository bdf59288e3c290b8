"""How groups of commands show themselves: each command with its first sentence, wrapped and never cut."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperGroup


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
